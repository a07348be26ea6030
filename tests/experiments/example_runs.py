"""Small complete records, made by hand: what the store, the export and the worker are fed in tests."""

from __future__ import annotations

from labkit.measure.run_record import Counters, RequestRow, RunRecord, StepRow
from labkit.memory.records import MemoryBreakdown, MemoryPlan
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import LayerSpec, ModelSpec, RopeSpec, StateSpec
from labkit.specs.workload import RequestSpec, Workload

GIB = 2**30


def example_model() -> ModelSpec:
    return ModelSpec(
        name="tiny <b>model</b>",
        architecture="LlamaForCausalLM",
        model_type="llama",
        layers=(
            LayerSpec("full", num_heads=4, num_kv_heads=2, head_dim=16),
            LayerSpec("state", state=StateSpec("mamba2", ((4, 8),), ("auto",), (0,))),
        ),
        hidden_size=64,
        intermediate_size=128,
        vocab_size=256,
        max_position_embeddings=512,
        rope=RopeSpec(kind="llama3", parameters=(("factor", 8.0), ("original", 64))),
        eos_token_ids=(2,),
    )


def example_plan(config: EngineConfig | None = None) -> MemoryPlan:
    config = (config or EngineConfig(cpu_memory_gib=1.0)).replace(
        max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64
    )
    breakdown = MemoryBreakdown("predicted", GIB, weights_bytes=1000, kv_cache_bytes=64 * 4096)
    return MemoryPlan(
        model=example_model(),
        gpu=GpuSpec("cpu", GIB, origin="cpu"),
        config=config,
        engine="labkit",
        engine_version="0.1",
        breakdown=breakdown,
        block_bytes=4096,
        num_gpu_blocks=64,
        num_swap_blocks=0,
        kv_cache_tokens=1024,
        max_concurrency=2.0,
        max_model_len_that_fits=1024,
        verdict="fits",
        margin_bytes=131072,
        binding_limit="kv_cache",
        formulas={"kv_cache": "64 blocks of 4,096 bytes"},
        details={"groups": ((1, 2), (3, 4)), "ratio": float("inf")},
    )


def example_workload(num_requests: int = 4, output_tokens: int = 4) -> Workload:
    requests = tuple(RequestSpec(0.001 * index, 8 + index, output_tokens) for index in range(num_requests))
    return Workload("example", requests, source="made by hand", licence="Apache-2.0", steps=("none",), seed=3)


def example_requests(count: int, first: int = 0) -> tuple[RequestRow, ...]:
    return tuple(
        RequestRow(index, 0.1 * index, 0.1 * index + 0.5, 0.1 * index + 1.5, 10, 3, 4, 1, "length", (0.5, 1.0, 1.5))
        for index in range(first, first + count)
    )


def example_steps(count: int, first: int = 0) -> tuple[StepRow, ...]:
    return tuple(StepRow(0.01 * index, 0.009, 12, 8, 4, 5, 1, 20, 3, 300) for index in range(first, first + count))


def example_record(run_id: str = "run-1", num_requests: int = 3, num_steps: int = 5, **changes) -> RunRecord:
    plan = example_plan()
    values = {
        "run_id": run_id,
        "name": f"{run_id}: 'block 16'; ü \u202e<script>",
        "created": "2026-11-30T12:00:00Z",
        "status": "finished",
        "config": plan.config,
        "model": plan.model,
        "gpu": plan.gpu,
        "workload": {"name": "example", "steps": ("sliced", "clipped"), "seed": 3, "num_requests": num_requests},
        "plan": plan,
        "requests": example_requests(num_requests),
        "steps": example_steps(num_steps),
        "measured": MemoryBreakdown("measured", GIB, weights_bytes=1001, uncertainty_bytes={"weights": 5}),
        "counters": Counters("simulated (LRU)", "H100-80GB", 0.01, 1e9, 3e12, 1e9 / 3e12),
        "block_map": (-1, -2, 0, 1),
        "duration_s": 2.5,
        "seed": 7,
        "versions": {"labkit": "0.1.0", "machine": "2 cores"},
    }
    return RunRecord(**{**values, **changes})
