"""`StepTimeModel`: how long one engine step takes on a card that need not be there.

    t     = gemm(dense) + gemm(active experts) + gemm(head) + kv + prefill attention + communication + host
    gemm  = (tb^p + tf^p)^(1/p);  tb = bytes/(bandwidth·e),  tf = 2·elements·tokens/(peak·e')      p = 5
    active experts of E = E·(1 - (1 - k/E)^tokens)
    host  = o0 + oL·layers + oB·requests

All times are seconds from the start of a step to the start of the next: models of kernel time alone miss more than
half of it. Sources: smooth roofline and terms after the vLLM-tuning literature (Vidur, BLIS, KernelSight-LM); the
constants' origins are in `step_constants.json`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from labkit.engine.step_constants import StepConstants, link_bytes_per_s
from labkit.engine.step_cost import MatrixCost, StepCost
from labkit.specs.gpu_spec import GpuSpec

_SHARPNESS = 5.0
_GRAPH_SIZES = np.array([1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)])
_WIDE_FORMATS = ("16bit", "32bit", "awq", "gptq", "int4", "gguf")
Array = np.ndarray


@dataclass(frozen=True)
class StepLoad:
    """Work of one or many steps; every field is an array of one shape [steps].

    Attributes:
        num_tokens: tokens computed. num_seqs: requests that advance. num_sampled: rows that give a token.
        kv_tokens: for each `KvCost`, tokens of context that decode rows read.
        pairs: for each `KvCost`, (query, context) pairs of prefill rows.
        swapped_bytes: KV copied between card and host.
    """

    num_tokens: Array
    num_seqs: Array
    num_sampled: Array
    kv_tokens: tuple[Array, ...]
    pairs: tuple[Array, ...]
    swapped_bytes: Array = field(default_factory=lambda: np.zeros(1))


@dataclass(frozen=True)
class StepTimeModel:
    """Seconds of a step of one model under one configuration on one card.

    Attributes:
        cost: bytes and products. gpu: the card. constants: efficiencies and overheads, with their level.
        enforce_eager: without CUDA graphs each launch costs host time.
        max_graph_size: largest captured batch.
    """

    cost: StepCost
    gpu: GpuSpec
    constants: StepConstants
    enforce_eager: bool = False
    max_graph_size: int = 512

    def parts(self, load: StepLoad) -> dict[str, Array]:
        """Part → seconds, [steps] each; `seconds` is their sum."""
        c, cost = self.constants, self.cost
        tokens = self._padded(load.num_tokens)
        share = np.ones_like(tokens)
        if cost.num_experts:
            share = 1 - (1 - cost.experts_per_tok / cost.num_experts) ** tokens
        visits = tokens * cost.experts_per_tok / max(1, cost.num_experts)
        parts = {
            "dense": self._gemm(cost.dense, 1.0, tokens, 1.0),
            "experts": self._gemm(cost.experts, share, visits, c.expert_efficiency),
            "lm_head": self._gemm(cost.head, 1.0, load.num_sampled, 1.0, "16bit"),
            "kv": self._kv(load),
            "prefill_attention": self._prefill(load),
            "communication": self._communication(tokens),
            "sampling": load.num_sampled * cost.vocab_size * 4.0 * 3.0 / self._bandwidth,
            "swap": load.swapped_bytes / c.host_link_bytes_per_s + np.zeros_like(tokens),
        }
        device = sum(parts.values())
        launches = c.moe_layer_s * cost.num_moe_layers + c.layer_s * cost.num_layers
        host = c.step_s + c.request_s * load.num_seqs + launches
        if self.enforce_eager:
            # The host runs ahead of the card, so what counts is whichever is slower.
            host = host + np.maximum(0.0, c.eager_layer_s * cost.num_layers - device)
        return {**parts, "host": host}

    def seconds(self, load: StepLoad) -> Array:
        """Seconds from the start of each step to the start of the next, [steps]."""
        parts = self.parts(load)
        return np.asarray(sum(parts.values())) * self.constants.correction

    def decode_seconds(self, contexts: Array, num_steps: int) -> Array:
        """Seconds of the next `num_steps` steps in which nothing but decode happens, [num_steps].

        Args:
            contexts: tokens that each request's next query sees, itself included, [requests].
        """
        steps = np.arange(num_steps, dtype=float)
        count = np.full(num_steps, float(len(contexts)))
        zero = np.zeros(num_steps)
        kv = tuple(_context_sums(contexts, kind.window, steps) for kind in self.cost.kv)
        return self.seconds(StepLoad(count, count, count, kv, tuple(zero for _ in kv), zero))

    @property
    def _bandwidth(self) -> float:
        return float(self.gpu.mem_bandwidth_bytes_per_s or 0.0)

    def _peak(self, kind: str) -> tuple[float, float]:
        """FLOP/s of the tensor cores for a weight format, and the share that products reach."""
        gpu, c = self.gpu, self.constants
        sixteen = float(gpu.bf16_flops or gpu.fp16_flops or 0.0)
        if kind in _WIDE_FORMATS or not gpu.fp8_flops:
            return sixteen, c.flops_efficiency
        if kind in ("nvfp4", "mxfp4"):
            return (2 * gpu.fp8_flops, c.flops_efficiency_4bit) if _has_fp4(gpu) else (sixteen, c.flops_efficiency)
        return gpu.fp8_flops, c.flops_efficiency_8bit

    def _padded(self, num_tokens: Array) -> Array:
        """Tokens after padding to the captured batch sizes."""
        tokens = np.asarray(num_tokens, dtype=float)
        if self.enforce_eager:
            return tokens
        sizes = _GRAPH_SIZES[np.minimum(np.searchsorted(_GRAPH_SIZES, tokens), len(_GRAPH_SIZES) - 1)]
        return np.where(tokens <= self.max_graph_size, sizes, tokens)

    def _gemm(
        self, matrix: MatrixCost, read_share: Array | float, tokens: Array, efficiency: float, kind: str = ""
    ) -> Array:
        if not matrix.num_bytes:
            return np.zeros_like(tokens)
        peak, reached = self._peak(kind or self.cost.weight_kind)
        memory = read_share * matrix.num_bytes / (self._bandwidth * self.constants.bandwidth_efficiency * efficiency)
        compute = 2 * matrix.num_elements * tokens / (peak * reached * efficiency)
        return smooth_max(memory, compute)

    def _kv(self, load: StepLoad) -> Array:
        c, total = self.constants, np.zeros_like(load.num_tokens, dtype=float)
        efficiency = c.kv_efficiency_8bit if self.cost.kv_is_quantized else c.kv_efficiency
        peak = float(self.gpu.bf16_flops or self.gpu.fp16_flops or 0.0) * c.attention_efficiency
        for kind, tokens in zip(self.cost.kv, load.kv_tokens, strict=True):
            read = kind.token_bytes * tokens / (self._bandwidth * efficiency)
            busy = smooth_max(read, kind.decode_flops * tokens / peak)
            total = total + kind.num_layers * smooth_max(busy, c.attention_floor_s)
        return total

    def _prefill(self, load: StepLoad) -> Array:
        peak = float(self.gpu.bf16_flops or self.gpu.fp16_flops or 0.0) * self.constants.attention_efficiency
        total = np.zeros_like(load.num_tokens, dtype=float)
        for kind, pairs in zip(self.cost.kv, load.pairs, strict=True):
            total = total + kind.num_layers * kind.prefill_flops * pairs / peak
        return total

    def _communication(self, tokens: Array) -> Array:
        c, tp = self.constants, self.cost.tensor_parallel_size
        if tp == 1:
            return np.zeros_like(tokens)
        moved = tokens * self.cost.hidden_bytes * 2 * (tp - 1) / tp
        return 2 * self.cost.num_layers * (c.all_reduce_s + moved / (link_bytes_per_s(self.gpu) * c.link_efficiency))


def smooth_max(first: Array | float, second: Array | float) -> Array:
    """(first^p + second^p)^(1/p) of numbers of 0 or more: near the larger, a little above it where they are equal."""
    larger, smaller = np.maximum(first, second), np.minimum(first, second)
    ratio = smaller / np.where(larger > 0, larger, 1.0)
    return larger * (1 + ratio**_SHARPNESS) ** (1 / _SHARPNESS)


def _context_sums(contexts: Array, window: int, steps: Array) -> Array:
    """Σ over requests of min(context + step, window), [steps]."""
    if not window:
        return contexts.sum() + len(contexts) * steps
    return np.minimum(contexts[None, :] + steps[:, None], window).sum(axis=1)


def _has_fp4(gpu: GpuSpec) -> bool:
    return gpu.compute_capability is not None and int(gpu.compute_capability.split(".")[0]) >= 10
