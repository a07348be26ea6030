"""Records made up for tests of figures, panel and report: small, deterministic, one for each state a run can be in."""

from __future__ import annotations

import dataclasses
import random

from labkit.measure.run_record import Counters, RequestRow, RunRecord, StepRow
from labkit.memory.records import MemoryBreakdown, MemoryPlan
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import LayerSpec, ModelSpec

GIB = 2**30
HOSTILE = "<img src=x onerror=alert(1)>${7*7}%{x}</script>\x1b[31m\u202e"
WORKLOAD = {"name": "azure-conv (40 requests)", "source": "synthetic", "licence": "", "steps": ["first 40 requests"],
            "seed": 0, "num_requests": 40}  # fmt: skip


def sample_model(name: str = "SmolLM2-135M-Instruct") -> ModelSpec:
    """Shapes of SmolLM2-135M."""
    return ModelSpec(
        name=name, architecture="LlamaForCausalLM", model_type="llama",
        layers=(LayerSpec("full", num_heads=9, num_kv_heads=3, head_dim=64),) * 30,
        hidden_size=576, intermediate_size=1536, vocab_size=49152, max_position_embeddings=8192,
        tie_word_embeddings=True, num_parameters=134_515_008,
    )  # fmt: skip


def sample_gpu(total_gib: float = 24.0, name: str = "L4") -> GpuSpec:
    """A card of `total_gib`; called "cpu" it is the CPU standing in for one."""
    return GpuSpec(name=name, total_bytes=int(total_gib * GIB), mem_bandwidth_bytes_per_s=300e9, l2_bytes=48 * 2**20,
                   origin="cpu" if name == "cpu" else "catalogue")  # fmt: skip


def sample_plan(
    config: EngineConfig | None = None, *, gpu: GpuSpec | None = None, model: ModelSpec | None = None
) -> MemoryPlan:
    """A plan by simple arithmetic of its own, so that tests of pictures need no planner."""
    config, gpu, model = config or EngineConfig(), gpu or sample_gpu(), model or sample_model()
    config = config.replace(
        max_model_len=config.max_model_len or model.max_position_embeddings,
        max_num_seqs=config.max_num_seqs or 128,
        max_num_batched_tokens=config.max_num_batched_tokens or 2048,
    )
    total = int(config.cpu_memory_gib * GIB) if gpu.is_cpu else gpu.total_bytes
    budget = total if gpu.is_cpu else int(total * config.gpu_memory_utilization)
    eight_bit = config.kv_cache_dtype.startswith(("fp8", "int8"))
    block_bytes = 2 * 30 * 3 * 64 * (1 if eight_bit else 2) * config.block_size
    weights, workspace, outside = 269_030_016, 0 if gpu.is_cpu else 150 << 20, 0 if gpu.is_cpu else 420 << 20
    activation = config.max_num_batched_tokens * 49152 * 2
    graphs = 0 if config.enforce_eager or gpu.is_cpu else 512 << 20
    tables = 4 * config.max_num_seqs * -(-config.max_model_len // config.block_size)
    blocks = max(0, (budget - weights - workspace - activation - graphs - tables) // block_bytes)
    blocks = config.num_gpu_blocks_override or blocks
    need = -(-config.max_model_len // config.block_size)
    fits = blocks >= need
    breakdown = MemoryBreakdown(
        kind="predicted", total_bytes=total, weights_bytes=weights, kv_cache_bytes=blocks * block_bytes,
        block_tables_bytes=tables, activation_bytes=activation, cuda_graphs_bytes=graphs, workspace_bytes=workspace,
        outside_bytes=outside, uncertainty_bytes={"activation": activation // 10, "cuda_graphs": graphs // 4},
    )  # fmt: skip
    return MemoryPlan(
        model=model, gpu=gpu, config=config, engine="labkit", engine_version="0.1.0", breakdown=breakdown,
        block_bytes=block_bytes, num_gpu_blocks=blocks, num_swap_blocks=0, kv_cache_tokens=blocks * config.block_size,
        max_concurrency=blocks / need, max_model_len_that_fits=blocks * config.block_size,
        verdict="fits" if fits else "does not fit", margin_bytes=(blocks - need) * block_bytes,
        binding_limit="KV blocks" if fits else "max_model_len",
        formulas={"weights": "134,515,008 parameters × 2 bytes", "kv_cache": "what the budget leaves, in blocks",
                  "activation": f"{config.max_num_batched_tokens} tokens × 49,152 logits × 2 bytes"},
        notes=("a plan made up for tests",),
    )  # fmt: skip


def sample_steps(num_steps: int, plan: MemoryPlan, seed: int = 0, slowness: float = 1.0) -> tuple[StepRow, ...]:
    """A pool that fills, overflows with preemptions, and drains."""
    random_ = random.Random(seed)
    rows, blocks = [], max(plan.num_gpu_blocks, 1)
    for index in range(num_steps):
        phase = index / max(num_steps - 1, 1)
        used = min(blocks, int(blocks * min(1.0, 2.2 * phase, 2.4 * (1 - phase))))
        running = max(1, int(24 * used / blocks))
        prefill = 96 if index % 7 == 0 else 0
        rows.append(
            StepRow(
                start_s=index * 0.05 * slowness,
                duration_s=slowness * (0.04 + 0.01 * random_.random()), num_tokens=running + prefill,
                num_prefill_tokens=prefill, num_decode_tokens=running, num_running=running,
                num_waiting=max(0, 10 - index // 4), num_blocks_used=used, num_blocks_cached=blocks // 50,
                num_tokens_stored=int(used * plan.config.block_size * 0.93),
                num_preemptions=1 if used == blocks and index % 5 == 0 else 0,
            )
        )  # fmt: skip
    return tuple(rows)


def sample_requests(num_requests: int, seed: int = 0, slowness: float = 1.0) -> tuple[RequestRow, ...]:
    """Finished requests with the time of each token."""
    random_ = random.Random(seed)
    rows = []
    for index in range(num_requests):
        arrival, output = 0.1 * index, random_.randint(4, 40)
        first = arrival + slowness * (0.05 + 0.2 * random_.random())
        gaps = [slowness * (0.02 + 0.02 * random_.random()) for _ in range(output - 1)]
        times = [first]
        for gap in gaps:
            times.append(times[-1] + gap)
        rows.append(
            RequestRow(index, arrival, first, times[-1], random_.randint(16, 900), output,
                       num_cached_tokens=16 * (index % 3), num_preemptions=int(index % 11 == 10),
                       finish_reason="length", token_times_s=tuple(times))
        )  # fmt: skip
    return tuple(rows)


def sample_measured(plan: MemoryPlan, error: float = 0.01) -> MemoryBreakdown:
    """The plan's parts, the weights `error` larger and the activation `2 * error` smaller than predicted."""
    parts = plan.breakdown
    return dataclasses.replace(
        parts, kind="measured", weights_bytes=int(parts.weights_bytes * (1 + error)),
        activation_bytes=int(parts.activation_bytes * (1 - 2 * error)), uncertainty_bytes={},
        kv_reserved_bytes=parts.kv_cache_bytes // 2, kv_stored_bytes=int(parts.kv_cache_bytes * 0.46),
    )  # fmt: skip


def sample_block_map(num_blocks: int, num_owners: int = 12) -> tuple[int, ...]:
    """Runs of blocks of each owner, some cached (-2), the rest free (-1)."""
    used, cached = int(num_blocks * 0.6), int(num_blocks * 0.1)
    owners = [index * num_owners // max(used, 1) for index in range(used)]
    return tuple(owners + [-2] * cached + [-1] * (num_blocks - used - cached))


def sample_record(
    config: EngineConfig | None = None, *, run_id: str = "run-1", name: str = "block 16", status: str = "finished",
    num_steps: int = 120, num_requests: int = 40, slowness: float = 1.0, gpu: GpuSpec | None = None, **changes,
) -> RunRecord:  # fmt: skip
    """A run of `status`; `changes` replace any field of the record."""
    plan = sample_plan(config, gpu=gpu)
    steps = sample_steps(num_steps, plan, slowness=slowness)
    requests = sample_requests(num_requests, slowness=slowness)
    record = RunRecord(
        run_id=run_id, name=name, created="2026-11-30T12:00:00+00:00", status=status, config=plan.config,
        model=plan.model, gpu=plan.gpu, workload=WORKLOAD, plan=plan, requests=requests, steps=steps,
        measured=sample_measured(plan) if status == "finished" else None,
        counters=Counters("simulated (LRU set model, kernel order)", plan.gpu.name, 0.412, 3.2e9, 180.5e9, 0.0177),
        block_map=sample_block_map(min(plan.num_gpu_blocks, 600)) if num_steps else (),
        duration_s=max([row.finish_s for row in requests] + [row.start_s + row.duration_s for row in steps],
                       default=0.0),
        versions={"labkit": "0.1.0", "torch": "2.13.0", "machine": "2 cores"},
    )  # fmt: skip
    return dataclasses.replace(record, **changes)


def sample_runs() -> tuple[RunRecord, ...]:
    """Three finished runs that differ in block size only; larger blocks are slower here."""
    return tuple(
        sample_record(EngineConfig(block_size=size), run_id=f"run-{size}", name=f"block {size}", slowness=slowness)
        for size, slowness in ((8, 1.3), (16, 1.0), (64, 1.1))
    )


def state_records() -> dict[str, RunRecord | None]:
    """One record for each state that every section must survive."""
    cut = sample_requests(40)[:3]
    never = tuple(dataclasses.replace(row, first_token_s=None, finish_s=None, output_tokens=0, finish_reason="",
                                      token_times_s=()) for row in sample_requests(4))  # fmt: skip
    empty = {"num_steps": 0, "num_requests": 0, "counters": None}
    return {
        "none": None,
        "finished": sample_record(),
        "one request": sample_record(num_steps=1, num_requests=1),
        "interrupted": sample_record(status="unfinished", num_steps=17, requests=cut, measured=None),
        "cancelled": sample_record(status="cancelled", num_steps=30, requests=cut + never),
        "failed": sample_record(status="failed", error="worker died with exit code -9", **empty),
        "out of memory": sample_record(status="failed", error="DoesNotFitError: KV cache needs 3 GiB", **empty),
        "no GPU": sample_record(EngineConfig(cpu_memory_gib=1.0), gpu=sample_gpu(1.0, "cpu"), counters=None),
        "hostile": sample_record(name=HOSTILE, model=sample_model(HOSTILE), note=HOSTILE, error=HOSTILE),
    }
