"""`plan` on plain attention models: parts, resolution, refusals, and labkit's own engine on a CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from labkit.errors import OutOfRangeError, UnknownNameError, UnsupportedError
from labkit.memory import count_parameters, plan
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import LayerSpec, ModelSpec

GIB = 2**30
H100 = GpuSpec("H100 SXM", round(79.19 * GIB))
L4_LIKE = GpuSpec("L4", 22 * GIB)
CPU = GpuSpec("cpu", 2 * GIB, origin="cpu")
LLAMA = ModelSpec(
    "llama-3.1-8b", "LlamaForCausalLM", "llama", (LayerSpec("full", 32, 8, 128),) * 32, 4096, 14336, 128256, 131072
)
SMOLLM2 = ModelSpec(
    "smollm2", "LlamaForCausalLM", "llama", (LayerSpec("full", 9, 3, 64),) * 30, 576, 1536, 49152, 8192,
    tie_word_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize("engine_version", ["0.6.5", "0.19.0", "0.25.1", "0.33.0"])
@pytest.mark.parametrize("tp", [1, 2])
def test_parts_sum_to_the_total(engine_version, tp):
    config = EngineConfig(max_model_len=8192, tensor_parallel_size=tp)
    breakdown = plan(LLAMA, H100, config, engine="vllm", engine_version=engine_version).breakdown
    assert sum(breakdown.parts().values()) == breakdown.total_bytes == H100.total_bytes


def test_every_none_is_resolved_with_vllms_defaults():
    config = plan(LLAMA, H100, engine="vllm", engine_version="0.33.0").config
    assert (config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens) == (131072, 1024, 8192)
    small = plan(LLAMA, GpuSpec("L4", 22 * GIB), engine="vllm", engine_version="0.33.0").config
    assert (small.max_num_seqs, small.max_num_batched_tokens) == (256, 2048)


def test_parameters_of_llama_and_smollm2():
    # The hub's own counts.
    assert (count_parameters(LLAMA), count_parameters(SMOLLM2)) == (8_030_261_248, 134_515_008)


def test_cpu_plan_is_the_engines_pool():
    got = plan(SMOLLM2, CPU, EngineConfig(max_model_len=2048, num_gpu_blocks_override=100, max_num_seqs=4))
    # 30 layers · 2 · 3 heads · 64 · 16 tokens · 4 bytes
    assert got.block_bytes == 30 * 2 * 3 * 64 * 16 * 4
    assert got.breakdown.kv_cache_bytes == 100 * got.block_bytes
    assert got.breakdown.block_tables_bytes == 4 * 100 * 4
    assert got.breakdown.workspace_bytes == 1600 * 2 * 3 * 64 * 4
    assert (got.breakdown.cuda_graphs_bytes, got.breakdown.outside_bytes) == (0, 0)
    # Weights and scratch are known to 2 %, the activation peak to 10 %, blocks and tables to the byte.
    shares = {
        part: size / got.breakdown.parts()[part] if size else 0
        for part, size in got.breakdown.uncertainty_bytes.items()
    }
    assert shares == pytest.approx(
        {"weights": 0.02, "kv_cache": 0, "block_tables": 0, "activation": 0.1, "workspace": 0.02}, rel=1e-3
    )
    assert sum(got.breakdown.parts().values()) == 2 * GIB
    assert got.config.dtype == "float32"


def test_cpu_pool_takes_what_is_left_of_the_budget_and_no_more():
    got = plan(SMOLLM2, CPU, EngineConfig(gpu_memory_utilization=0.5))
    used = got.breakdown.used_bytes
    assert used <= GIB < used + got.block_bytes + 4 * 32


@pytest.mark.parametrize(("num_blocks", "verdict"), [(128, "fits"), (127, "does not fit")])
def test_one_request_that_fills_a_cpus_pool_fits(num_blocks, verdict):
    """2,048 tokens are 128 blocks of 16: nothing may be missing and nothing need be left."""
    got = plan(SMOLLM2, CPU, EngineConfig(max_model_len=2048, num_gpu_blocks_override=num_blocks, max_num_seqs=4))
    assert (got.verdict, got.margin_bytes) == (verdict, (num_blocks - 128) * got.block_bytes)


def test_too_small_a_budget_is_said():
    got = plan(SMOLLM2, CPU, EngineConfig(cpu_memory_gib=0.5))
    assert (got.verdict, got.num_gpu_blocks, got.max_model_len_that_fits) == ("does not fit", 0, 0)


def test_refusals_name_the_knob_and_what_works():
    with pytest.raises(UnsupportedError, match="nvfp4") as refused:
        plan(SMOLLM2, CPU, EngineConfig(kv_cache_dtype="nvfp4"))
    assert refused.value.knob == "kv_cache_dtype"
    with pytest.raises(OutOfRangeError) as refused:
        plan(LLAMA, H100, EngineConfig(max_num_seqs=64, max_num_batched_tokens=32), engine="vllm")
    assert (refused.value.needed, refused.value.works) == ("64 tokens", "64")
    config = EngineConfig(max_model_len=4096, enable_chunked_prefill=False, max_num_batched_tokens=2048)
    with pytest.raises(OutOfRangeError, match="chunked"):
        plan(LLAMA, H100, config, engine="vllm")
    with pytest.raises(UnknownNameError) as refused:
        plan(LLAMA, H100, engine="vlm")
    assert refused.value.works == "vllm"
    with pytest.raises(OutOfRangeError):
        plan(LLAMA, H100, engine="vllm", engine_version="newest")


def test_an_unknown_version_is_said_and_the_nearest_used():
    got = plan(LLAMA, H100, engine="vllm", engine_version="0.91.2")
    assert any("0.91.2" in note and "0.33.0" in note for note in got.notes)
    assert not plan(LLAMA, H100, engine="vllm", engine_version="0.33.1").notes


def test_importing_the_planner_imports_no_torch():
    code = "import sys, labkit.memory; print('torch' in sys.modules, 'pandas' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False"]


def test_weights_of_a_model_type_that_nobody_knows_are_a_guess():
    # Known: 1 % of 15.0 GiB. Counted as a Llama without being one: a quarter, unless files say the bytes.
    unknown = LLAMA.replace(model_type="foo")
    shares = {
        name: plan(model, H100, EngineConfig(max_model_len=8192), engine="vllm").breakdown.uncertainty_bytes["weights"]
        / plan(model, H100, EngineConfig(max_model_len=8192), engine="vllm").breakdown.weights_bytes
        for name, model in (("known", LLAMA), ("unknown", unknown), ("stated", unknown.replace(weights_bytes=16 * GIB)))
    }
    assert shares == pytest.approx({"known": 0.01, "unknown": 0.25, "stated": 0.01}, rel=1e-6)
    assert plan(LLAMA, L4_LIKE, EngineConfig(max_model_len=8192), engine="vllm").verdict == "fits"
    assert plan(unknown, L4_LIKE, EngineConfig(max_model_len=8192), engine="vllm").verdict == "may not fit"
