"""Bytes of weights: parameters, formats, parallel shares, the allocator's rounding; checked by hand or by files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labkit.memory.tensors import Sharing, count_parameters
from labkit.memory.weights import (
    StageLayers,
    absorbed_mla_bytes,
    allocated_bytes,
    counted_bytes,
    pipeline_stages,
    rope_cache_bytes,
    stage_weights_bytes,
    weight_format,
)
from labkit.specs.model_catalogue import catalogue_model
from labkit.specs.model_loading import load_model
from labkit.specs.model_spec import LayerSpec, ModelSpec, MoeSpec, WeightFormat
from labkit.specs.quantized_names import QUANTIZATION_FORMATS

GIB, MIB = 2**30, 2**20
FACTS = json.loads((Path(__file__).parent / "data" / "total_params.json").read_text())["total_params"]
# One layer, nothing but matrices and norms: 4 heads of 8, 2 KV heads, hidden 32, MLP 64, vocabulary 128.
TINY = ModelSpec("tiny", "LlamaForCausalLM", "llama", (LayerSpec("full", 4, 2, 8),), 32, 64, 128, 256)
QKV, OUT, MLP, NORMS, EMBED = 32 * 64, 32 * 32, 3 * 32 * 64, 3 * 32, 128 * 32


def whole(model):
    return StageLayers(0, model.num_layers, model.num_layers)


@pytest.mark.parametrize("name", FACTS)
def test_parameters_of_the_catalogue_are_those_that_transformers_counts(name):
    assert count_parameters(catalogue_model(name)) == FACTS[name]


def test_parameters_by_hand():
    assert count_parameters(TINY) == QKV + OUT + MLP + NORMS + 2 * EMBED
    assert count_parameters(TINY.replace(tie_word_embeddings=True)) == QKV + OUT + MLP + NORMS + EMBED


@pytest.mark.parametrize(
    ("kind", "matrix_bytes"),
    [
        # 4 bits, one fp16 scale and one 4-bit zero point for each 128 weights.
        ("awq", lambda n: n // 2 + n // 128 * 2 + n // 256),
        ("gptq", lambda n: n // 2 + n // 128 * 2 + n // 256),
        ("fp8_per_tensor", lambda n: n + 4),
        ("nvfp4", lambda n: n // 2 + n // 16),
    ],
)
def test_quantised_bytes_by_hand(kind, matrix_bytes):
    matrices = (QKV, OUT, 2 * 32 * 64, 64 * 32)
    expected = sum(matrix_bytes(size) for size in matrices) + 2 * (NORMS + 2 * EMBED)
    assert counted_bytes(TINY, QUANTIZATION_FORMATS[kind], "bfloat16") == expected


def test_channel_scales_of_fp8_are_one_for_each_output():
    scales = 4 * (64 + 32 + 128 + 32)
    expected = QKV + OUT + MLP + scales + 2 * (NORMS + 2 * EMBED)
    assert counted_bytes(TINY, QUANTIZATION_FORMATS["fp8"], "bfloat16") == expected


def test_mxfp4_checkpoint_of_gpt_oss_is_its_published_size():
    # Hub checkpoints: 13.8 and 65.2 GB (data/model_facts.json), experts not padded as a kernel pads them.
    for name, gigabytes in (("openai/gpt-oss-20b", 13.75), ("openai/gpt-oss-120b", 65.2)):
        model = catalogue_model(name)
        experts = sum(layer.num_experts for layer in model.layers) * 3 * 2880 * 2880
        rest = count_parameters(model) - experts
        assert (experts * 4.25 / 8 + 2 * rest) / 1e9 == pytest.approx(gigabytes, rel=0.01)
        assert counted_bytes(model, model.weight_format, "bfloat16") / 1e9 == pytest.approx(gigabytes * 1.06, rel=0.02)


def test_replicated_heads_and_divided_rest_under_tensor_parallelism():
    share = Sharing(tp=4)
    got = stage_weights_bytes(TINY, whole(TINY), share, WeightFormat(), "bfloat16", allocator=False)
    # One query head, one replicated KV head (K and V), a quarter of the rest; the vocabulary padded to 4 · 64.
    assert got == 2 * (32 * (8 + 16) + OUT // 4 + MLP // 4 + NORMS + 2 * 64 * 32)


def test_experts_are_cut_over_cards_or_spread_whole():
    moe = MoeSpec(8, 2, 16)
    model = TINY.replace(layers=(LayerSpec("full", 4, 2, 8, num_experts=8),), moe=moe)
    one = stage_weights_bytes(model, whole(model), Sharing(), WeightFormat(), "bfloat16", allocator=False)
    expert_bytes = 2 * 8 * 3 * 32 * 16
    for share in (Sharing(dp=4), Sharing(dp=4, expert_parallel=True)):
        got = stage_weights_bytes(model, whole(model), share, WeightFormat(), "bfloat16", allocator=False)
        assert one - got == expert_bytes * 3 // 4


@pytest.mark.parametrize(
    ("num_layers", "stages", "sizes"),
    [(32, 2, [16, 16]), (61, 4, [15, 15, 16, 15]), (30, 4, [7, 8, 8, 7]), (3, 1, [3]), (5, 3, [2, 2, 1])],
)
def test_pipeline_stages_are_divided_as_vllm_divides(num_layers, stages, sizes):
    # vllm.distributed.utils.get_pp_indices: the remainder goes to the stages before the last, from the back.
    got = pipeline_stages(num_layers, stages)
    assert [stage.last - stage.first for stage in got] == sizes
    assert (got[0].first, got[-1].last) == (0, num_layers)


def test_stages_together_hold_the_model_once():
    model = catalogue_model("Qwen/Qwen3-8B")
    for stages in (1, 2, 3, 5):
        parts = pipeline_stages(model.num_layers, stages)
        total = sum(
            stage_weights_bytes(model, stage, Sharing(), WeightFormat(), "bfloat16", allocator=False) for stage in parts
        )
        assert total == 2 * count_parameters(model)


@pytest.mark.parametrize(
    ("num_bytes", "counted"),
    [
        (1, 512),
        (513, 1024),
        (31 * MIB + MIB // 2, 32 * MIB),  # half a MiB is not split off
        (24 * MIB + MIB // 2, 24 * MIB + MIB // 2),  # one and a half is
        (32 * MIB, 32 * MIB),
    ],
)
def test_rounding_of_torchs_allocator(num_bytes, counted):
    assert allocated_bytes(num_bytes) == counted


def test_tables_and_copies_beside_the_weights():
    llama = catalogue_model("meta-llama/Llama-3.1-8B-Instruct")
    assert rope_cache_bytes(llama, "bfloat16", 8192) == 131072 * 128 * 2
    deepseek = catalogue_model("deepseek-ai/DeepSeek-V2-Lite")
    assert absorbed_mla_bytes(deepseek, whole(deepseek), Sharing(), "bfloat16") == 27 * 16 * 512 * 256 * 2
    assert absorbed_mla_bytes(deepseek, whole(deepseek), Sharing(tp=4), "bfloat16") == 27 * 4 * 512 * 256 * 2


def test_files_formats_win_over_the_flag():
    mxfp4 = catalogue_model("openai/gpt-oss-20b")
    assert weight_format(mxfp4, "fp8").kind == "mxfp4"
    assert weight_format(TINY, "fp8").kind == "fp8"
    assert weight_format(TINY, None).kind == "16bit"


def test_a_gguf_file_counts_as_its_tensors(smollm2_gguf):
    model = load_model(smollm2_gguf)
    assert 0.97 * smollm2_gguf.stat().st_size < model.weights_bytes < smollm2_gguf.stat().st_size
    assert count_parameters(model) == FACTS["HuggingFaceTB/SmolLM2-135M-Instruct"]


def test_safetensors_headers_and_the_count_agree(tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    shapes = {"model.embed_tokens": (256, 64), "lm_head": (256, 64), "model.norm": (64,)}
    for index in range(2):
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        shapes |= {f"{attention}.q_proj": (64, 64), f"{attention}.o_proj": (64, 64)}
        shapes |= {f"{attention}.k_proj": (32, 64), f"{attention}.v_proj": (32, 64)}
        shapes |= {f"{mlp}.gate_proj": (160, 64), f"{mlp}.up_proj": (160, 64), f"{mlp}.down_proj": (64, 160)}
        shapes |= {f"model.layers.{index}.{name}_layernorm": (64,) for name in ("input", "post_attention")}
    tensors = {f"{name}.weight": np.zeros(shape, np.float16) for name, shape in shapes.items()}
    names = list(tensors)
    for shard in (0, 1):
        part = {name: tensors[name] for name in names[shard::2]}
        save_file(part, tmp_path / f"model-0000{shard + 1}-of-00002.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 160,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
        "tie_word_embeddings": False, "torch_dtype": "float16", "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path)
    assert model.weights_bytes == 2 * count_parameters(model) == sum(value.nbytes for value in tensors.values())
