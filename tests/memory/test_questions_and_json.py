"""Inverse questions, what flags buy, SGLang's rule, and the JSON object of `labkit plan`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from labkit.errors import OutOfRangeError, UnknownNameError
from labkit.memory import Overrides, plan
from labkit.memory.machine import answers_json, plan_json, question_for
from labkit.memory.questions import cards_needed, concurrent_requests, flag_effects
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_catalogue import catalogue_gpu
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_catalogue import catalogue_model
from labkit.specs.model_spec import WeightFormat

GIB = 2**30
FIELDS = {
    "total_gib", "budget_gib", "weights_gib", "activation_gib", "non_torch_gib", "cuda_graphs_gib", "kv_cache_gib",
    "block_bytes", "num_gpu_blocks", "kv_cache_tokens", "max_concurrency", "max_model_len_that_fits", "verdict",
    "binding_limit", "uncertainty",
}  # fmt: skip


def llama(knobs=None, **options):
    return question_for("meta-llama/Llama-3.1-8B-Instruct", "H100", knobs, **options)


def test_the_json_object_has_every_field_and_adds_up():
    found = plan_json(llama({"max_model_len": 8192}, vllm="0.19.0").plan())
    assert found.keys() >= FIELDS
    assert json.loads(json.dumps(found)) == found
    parts = found["weights_gib"] + found["activation_gib"] + found["non_torch_gib"]
    assert found["budget_gib"] - parts == pytest.approx(found["kv_cache_gib"], abs=1e-6)
    assert found["budget_gib"] == pytest.approx(0.9 * found["total_gib"], abs=1e-6)  # 0.19's default
    assert plan_json(llama(vllm="0.33.0").plan())["budget_gib"] == pytest.approx(0.92 * found["total_gib"], abs=1e-6)


def test_overrides_replace_what_the_machine_would_say():
    found = plan_json(llama({"max_model_len": 8192}, total_gib=70.0, weights_gib=10.0, vllm="0.19.0").plan())
    assert (found["total_gib"], found["weights_gib"]) == (70.0, 10.0)
    assert found["uncertainty"]["weights_gib"] == 0
    exact = plan_json(llama({"max_model_len": 8192}, available_kv_gib=58.11, vllm="0.19.0").plan())
    assert (exact["kv_cache_tokens"], round(exact["max_concurrency"], 2)) == (476032, 58.11)
    busy = plan_json(llama({"max_model_len": 8192}, free_gib=20.0).plan())
    assert (busy["verdict"], "free" in busy["binding_limit"]) == ("does not fit", True)


def test_cards_become_tensor_parallelism_unless_sizes_are_given():
    assert llama(num_gpus=4).config.tensor_parallel_size == 4
    staged = llama({"pipeline_parallel_size": 2}, num_gpus=2)
    assert (staged.config.tensor_parallel_size, staged.config.pipeline_parallel_size) == (1, 2)
    with pytest.raises(OutOfRangeError) as refused:
        llama({"tensor_parallel_size": 8}, num_gpus=4)
    assert (refused.value.needed, refused.value.available) == ("8 cards", "4 cards")


def test_ranks_are_listed_where_they_differ_and_the_last_stage_binds():
    found = plan_json(llama({"pipeline_parallel_size": 2, "max_model_len": 8192}, vllm="0.19.0").plan())
    assert [rank["layers"] for rank in found["ranks"]] == [[0, 15], [16, 31]]
    # The last stage samples (case N56).
    assert (found["binding_rank"], found["activation_gib"]) == (1, found["ranks"][1]["activation_gib"])
    assert found["num_gpu_blocks"] == min(rank["num_gpu_blocks"] for rank in found["ranks"])
    shared = ("weights_gib", "activation_gib", "non_torch_gib", "cuda_graphs_gib", "kv_cache_gib", "block_bytes")
    assert [found["ranks"][1][name] for name in shared] == [found[name] for name in shared]


def test_max_model_len_auto_is_the_longest_that_fits():
    small = llama({"max_model_len": -1}, available_kv_gib=1.0)
    assert small.config.max_model_len == 8176  # vLLM's own planner, golden table
    assert llama({"max_model_len": -1}).config.max_model_len == 131072


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"gpu": "H1000"}, UnknownNameError),
        ({"total_gib": -1.0}, OutOfRangeError),
        ({"vllm": "x"}, OutOfRangeError),
        ({"available_kv_gib": float("nan")}, OutOfRangeError),
    ],
)
def test_wrong_input_is_refused(options, error):
    with pytest.raises(error):
        question_for("meta-llama/Llama-3.1-8B-Instruct", options.pop("gpu", "H100"), **options).plan()


@pytest.mark.parametrize(
    ("name", "kind", "weights_gib"),
    [
        # Weights that vLLM 0.19 printed for these checkpoints (labkit/memory/runs).
        ("RedHatAI/Qwen2.5-7B-Instruct-fp8-dynamic", "fp8", 8.14),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "int8", 8.49),
        ("RedHatAI/Mistral-Small-3.1-24B-Instruct-2503-quantized.w8a8", "int8", 24.07),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "awq", 5.29),
        ("Qwen/Qwen3-8B-AWQ", "awq", 5.71),
    ],
)
def test_names_of_quantised_copies(name, kind, weights_gib):
    question = question_for(name, "H100", {"max_model_len": 4096}, vllm="0.19.0")
    assert (question.model.weight_format.kind, question.model.name) == (kind, name)
    assert question.plan().breakdown.weights_bytes / GIB == pytest.approx(weights_gib, rel=0.015)


def test_numbers_of_cards_that_cannot_share_the_model_are_skipped():
    """An MLP of 11,001 columns on two cards; block-fp8 experts of 768 columns, whole blocks on 2 cards and not on 4."""
    base = question_for("meta-llama/Llama-3.1-8B-Instruct", "T4", {"max_model_len": 4096})
    odd = replace(base, model=base.model.replace(intermediate_size=11_001))
    assert (cards_needed(base), cards_needed(odd)) == (2, None)
    blocks = WeightFormat("fp8", 8, 128 * 128, scale_bytes=4, method="fp8")
    moe = question_for("Qwen/Qwen3-30B-A3B", "T4", {"max_model_len": 4096})
    split = replace(moe, model=moe.model.replace(weight_format=blocks))
    assert cards_needed(split) is None
    assert cards_needed(replace(split, config=split.config.replace(enable_expert_parallel=True))) == 4


def test_effects_of_flags_are_what_the_changed_plan_says():
    question = llama({"max_model_len": 8192}, vllm="0.19.0")
    base = question.plan()
    effects = {(effect.knob, effect.after): effect for effect in flag_effects(question)}
    fp8 = effects["kv_cache_dtype", "fp8"]
    assert fp8.kv_bytes == 0
    assert fp8.tokens == pytest.approx(base.max_concurrency * 8192, rel=0.01)
    # 14.45 B · 768 requests · 128,256 entries, while the sampler is the larger moment (1.3 GiB; then the MLP is).
    assert 0.9 * GIB < effects["max_num_seqs", 256].kv_bytes < 1.4 * GIB
    assert effects["enforce_eager", True].kv_bytes == 0  # graphs were outside the budget in 0.19
    assert "tokens" in fp8.text


def test_cards_that_a_large_model_needs():
    for gpu, cards in (("H100", 4), ("H200", 2)):
        question = question_for("meta-llama/Llama-3.1-70B-Instruct", gpu, {"max_model_len": 32768}, vllm="0.25.0")
        assert cards_needed(question) == cards
    # MLA's KV is not divided: 163,840 tokens x 61 layers x 576 x 2 B are 10.7 GiB on each card of 14.6.
    assert cards_needed(question_for("deepseek-ai/DeepSeek-V3", "T4", {"max_model_len": 163840})) is None


def test_requests_of_a_length_distribution():
    pool = Overrides(available_kv_bytes=GIB)  # 512 blocks of 2 MiB
    config = EngineConfig(max_model_len=8176, max_num_seqs=1000)
    model, card = catalogue_model("meta-llama/Llama-3.1-8B-Instruct"), GpuSpec("H100 SXM", 80 * GIB)
    found = plan(model, card, config, engine="vllm", overrides=pool)
    # 16 and 48 tokens take 1 and 3 blocks: 2 on average.
    assert concurrent_requests(found, [16, 48]) == 256
    few = plan(model, card, config.replace(max_num_seqs=10), engine="vllm", overrides=pool)
    assert concurrent_requests(few, [16, 48]) == 10
    with pytest.raises(OutOfRangeError):
        concurrent_requests(found, [])
    with pytest.raises(OutOfRangeError):
        concurrent_requests(found, [0])


def test_utilization_that_gives_back_what_graphs_took():
    # Case N57: 0.36 GiB of a 23.7 GiB card are 0.0152.
    overrides = Overrides(total_bytes=round(23.7 * GIB), cuda_graphs_bytes=round(0.36 * GIB / 0.906))
    model = catalogue_model("Qwen/Qwen3-30B-A3B")
    config = EngineConfig(gpu_memory_utilization=0.82, tensor_parallel_size=2, max_model_len=4096)
    found = plan(model, GpuSpec("24 GB", 1), config, engine="vllm", engine_version="0.27.1", overrides=overrides)
    assert found.details["ranks"][0]["graphs_reserved_bytes"] / GIB == pytest.approx(0.36, abs=0.001)
    assert "gpu_memory_utilization 0.8352 gives as much KV" in found.formulas["cuda_graphs"]
    before = plan(model, GpuSpec("24 GB", 1), config, engine="vllm", engine_version="0.20.0", overrides=overrides)
    eager = plan(
        model, GpuSpec("24 GB", 1), config.replace(enforce_eager=True), engine="vllm", engine_version="0.27.1",
        overrides=overrides,
    )  # fmt: skip
    for other in (before, eager):
        assert "as much KV" not in other.formulas["cuda_graphs"]


def test_all_answers_are_plain_json():
    found = answers_json(llama({"max_model_len": 8192}))
    assert json.loads(json.dumps(found)) == found
    assert found["gpus_needed"] == 1
    assert 0.2 < found["smallest_gpu_memory_utilization"] < 0.3


def test_sglang_counts_weights_and_kv_in_its_static_fraction():
    # Case N05: 94 layers, 4 heads of 128 over 4 cards: 367,404 tokens are 16.47 GiB of K and V.
    model = catalogue_model("Qwen/Qwen3-235B-A22B")
    config = EngineConfig(tensor_parallel_size=4, gpu_memory_utilization=0.93, max_model_len=40960)
    pool = Overrides(available_kv_bytes=367404 * 94 * 2 * 128 * 2)
    found = plan(model, GpuSpec("H100 SXM", 80 * GIB), config, engine="sglang", overrides=pool)
    assert (found.kv_cache_tokens, found.block_bytes) == (367404, 48128)
    assert found.max_concurrency == pytest.approx(367404 / 40960)
    own = plan(
        catalogue_model("Qwen/Qwen3-8B"), GpuSpec("H100 SXM", 80 * GIB, free_bytes=79 * GIB),
        EngineConfig(gpu_memory_utilization=0.8, max_model_len=4096), engine="sglang",
    )  # fmt: skip
    expected = round(79 * GIB * 0.8) - own.breakdown.weights_bytes
    assert own.breakdown.kv_cache_bytes == expected // 147456 * 147456


def test_encoder_only_models_need_no_kv():
    from labkit.specs.model_config import model_from_config

    bert = model_from_config(
        {
            "architectures": ["BertModel"], "model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24,
            "num_attention_heads": 16, "intermediate_size": 4096, "vocab_size": 30522, "max_position_embeddings": 512,
        },
        "bert",
    )  # fmt: skip
    found = plan(bert, GpuSpec("L4", 22 * GIB), engine="vllm")
    assert (found.block_bytes, found.num_gpu_blocks, found.breakdown.kv_cache_bytes) == (0, 0, 0)
    assert (found.verdict, found.max_model_len_that_fits) == ("fits", 512)
    assert "no KV" in found.binding_limit


@pytest.mark.parametrize(
    ("model", "card", "share", "format_of", "reported_gib"),
    [("Qwen/Qwen3-32B", "RTX 4090", 0.90, "awq", 0.56), ("Qwen/Qwen3-14B", "A100-40GB", 0.85, None, 3.9)],
)
def test_steps_of_vllms_llm_class_explain_two_public_reports(model, card, share, format_of, reported_gib):
    """Both lie below the plan of a server, whose steps are 2,048 tokens on these cards."""
    config = EngineConfig(gpu_memory_utilization=share, max_model_len=4096, quantization=format_of)
    pools = [
        plan(catalogue_model(model), catalogue_gpu(card), config.replace(max_num_batched_tokens=tokens), engine="vllm")
        .details["ranks"][0]["available_kv_bytes"] / GIB
        for tokens in (2048, 8192)
    ]  # fmt: skip
    assert pools[1] == pytest.approx(reported_gib, abs=0.15)
    assert pools[0] > reported_gib + 0.7
