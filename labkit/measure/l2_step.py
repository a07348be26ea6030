"""The simulated L2 under all attention layers of a step of the engine, and of a run at its fullest moment."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter

from labkit.errors import LabkitError, UnsupportedError
from labkit.format import of
from labkit.measure.attention_shape import AttentionShape, BatchShape
from labkit.measure.l2_calibration import L2Calibration
from labkit.measure.l2_simulator import simulate_attention
from labkit.measure.run_record import Counters, RequestRow, RunRecord
from labkit.memory.dtypes import compute_dtype, stored_kv_dtype
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import LayerSpec, ModelSpec
from labkit.text import plain

KV_KINDS = ("full", "sliding", "chunked", "mla")
# The decode kernel takes up to so many new tokens of a sequence; more go through the prefill kernel.
MAX_DECODE_QUERIES = 8


def layer_shapes(model: ModelSpec, config: EngineConfig, batch: BatchShape) -> dict[AttentionShape, int]:
    """The launch of each kind of layer that reads KV, and how many layers are alike.

    Raises:
        UnsupportedError: the model keeps no KV.
        OutOfRangeError: a batch or heads beyond what a launch takes.
    """
    shapes = Counter(layer_shape(model, config, layer, batch) for layer in model.layers if layer.kind in KV_KINDS)
    if not shapes:
        raise UnsupportedError(
            f"{plain(model.name, 60)} keeps no KV, so its attention reads none", works="a model with attention layers"
        )
    return dict(shapes)


def simulate_step(
    model: ModelSpec, gpu: GpuSpec, config: EngineConfig, batch: BatchShape, *, variant: str | None = None,
    calibration: L2Calibration | None = None,
) -> Counters:  # fmt: skip
    """Simulated counters of the attention launches of all layers in one step of `batch`.

    Args:
        variant: one of `attention_shape.VARIANTS`; None is the kernel that the engine takes for such a step.
        calibration: of the card's L2; None reads the package's.

    Raises:
        UnsupportedError: the card's L2, SMs or bandwidth are not known, or the model keeps no KV.
        OutOfRangeError: a batch or heads beyond what a launch takes.
    """
    if variant is None:
        variant = "prefill" if max(batch.query_lens) > MAX_DECODE_QUERIES else "full"
    reads = missed = time_s = 0.0
    method = ""
    for shape, num_layers in layer_shapes(model, config, batch).items():
        found = simulate_attention(shape, gpu, variant, calibration=calibration)
        reads += num_layers * found.l2_read_bytes
        missed += num_layers * found.counters.dram_bytes
        time_s += num_layers * found.counters.kernel_time_s
        method = found.counters.method
    return Counters(
        method=method,
        card=gpu.name,
        l2_hit_rate=max(0.0, 1 - missed / reads),
        dram_bytes=missed,
        dram_bytes_per_s=missed / time_s,
        kernel_time_s=time_s,
        l2_read_bytes=reads,
    )


def simulate_run(record: RunRecord, gpu: GpuSpec) -> Counters | None:
    """Simulated counters of the decode step at the run's fullest moment, on `gpu`; None when nothing was decoded.

    Raises:
        UnsupportedError, OutOfRangeError: as `simulate_step`.
    """
    batch = fullest_decode(record)
    if batch is None:
        return None
    scope = f"attention of a decode step of {of(len(batch.query_lens), 'request')}"
    return dataclasses.replace(simulate_step(record.model, gpu, record.plan.config, batch), scope=scope)


def with_simulated_counters(record: RunRecord, gpu: GpuSpec) -> RunRecord:
    """`record` with what `simulate_run` says; as it is where that cannot be simulated."""
    with contextlib.suppress(LabkitError):
        return dataclasses.replace(record, counters=simulate_run(record, gpu))
    return record


def fullest_decode(record: RunRecord) -> BatchShape | None:
    """The decode step at the moment when the most blocks were in use; None when nothing was decoded then."""
    fullest = max(record.steps, key=lambda step: step.num_blocks_used, default=None)
    if fullest is None:
        return None
    at_s = fullest.start_s + fullest.duration_s
    running = [row for row in record.requests if _decodes_at(row, at_s)]
    if not running:
        return None
    contexts = tuple(row.input_tokens + max(1, sum(time_s <= at_s for time_s in row.token_times_s)) for row in running)
    shared = min(row.num_cached_tokens for row in running) if len(running) > 1 else 0
    return BatchShape(contexts, (1,) * len(contexts), shared)


def _decodes_at(row: RequestRow, at_s: float) -> bool:
    if row.first_token_s is None or row.first_token_s > at_s:
        return False
    last_s = row.finish_s if row.finish_s is not None else max(row.token_times_s, default=at_s)
    return last_s >= at_s


def layer_shape(model: ModelSpec, config: EngineConfig, layer: LayerSpec, batch: BatchShape) -> AttentionShape:
    """The launch of one layer that reads KV.

    Raises:
        OutOfRangeError: a batch or heads beyond what a launch takes.
    """
    stored = stored_kv_dtype(model, config)
    dtype = compute_dtype(model, config) if stored == "auto" else stored
    if layer.kind == "mla":
        width = layer.kv_lora_rank + layer.qk_rope_head_dim
        return AttentionShape(
            batch, num_heads=layer.num_heads, num_kv_heads=1, head_dim=width, block_size=config.block_size,
            kv_cache_dtype=dtype, v_head_dim=layer.kv_lora_rank, is_latent=True,
        )  # fmt: skip
    return AttentionShape(
        batch, num_heads=layer.num_heads, num_kv_heads=layer.num_kv_heads, head_dim=layer.head_dim,
        block_size=config.block_size, kv_cache_dtype=dtype, v_head_dim=layer.v_head_dim,
        window=layer.window if layer.kind in ("sliding", "chunked") else None,
    )  # fmt: skip
