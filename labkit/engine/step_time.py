"""`StepTimeModel`: how long one engine step takes on a card that need not be there.

    t     = gemm(dense) + gemm(active experts) + gemm(head) + kv + prefill attention + communication + host
    gemm  = (tb^p + tf^p)^(1/p);  tb = bytes/(bandwidth·e),  tf = 2·elements·tokens/(peak·e')      p = 5
            or, where products of the card were measured, between the measured ones
    active experts of E = E·(1 - (1 - k/E)^tokens)
    host  = o0 + oL·layers + oB·requests

Where the host puts the next step together while the card computes, t is the longer of card and host.

All times are seconds from the start of a step to the start of the next: models of kernel time alone miss more than
half of it. Sources: smooth roofline and terms after the vLLM-tuning literature (Vidur, BLIS, KernelSight-LM); the
constants' origins are in `step_constants.json`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from labkit.engine.launch_rules import LaunchRules
from labkit.engine.measured_products import MeasuredProducts
from labkit.engine.step_constants import StepConstants, link_bytes_per_s
from labkit.engine.step_cost import Matrix, MatrixCost, StepCost
from labkit.specs.gpu_spec import GpuSpec

_SHARPNESS, _TINY = 5, 1e-300
# Products at this share of the peak are as slow beside short measurements as they get.
_BUSY_SHARE = 0.7
_MOST_TABULATED = 16_384
_VLLM_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
_VLLM_GRAPHS = LaunchRules(_VLLM_SIZES, _VLLM_SIZES)
_WIDE_FORMATS = ("16bit", "32bit", "awq", "gptq", "int4", "gguf")
Array = np.ndarray


_NOTHING = np.zeros(1)
_NOTHING.setflags(write=False)


class StepLoad(NamedTuple):
    """Work of one or many steps; every field is an array, [steps] or [1] for all of them.

    Attributes:
        num_tokens: tokens computed. num_seqs: requests that advance. num_sampled: rows that give a token.
        kv_tokens: for each `KvCost`, tokens of context that decode rows read.
        pairs: for each `KvCost`, (query, context) pairs of prefill rows.
        swapped_bytes: KV copied between card and host.
        num_prompt_tokens: of `num_tokens`, those of requests that compute more than one. num_prompts: these requests.
    """

    num_tokens: Array
    num_seqs: Array
    num_sampled: Array
    kv_tokens: tuple[Array, ...]
    pairs: tuple[Array, ...]
    swapped_bytes: Array = _NOTHING
    num_prompt_tokens: Array = _NOTHING
    num_prompts: Array = _NOTHING


@dataclass(frozen=True)
class OverlappedSeconds:
    """Of each step: putting it together on the host, launching its kernels one by one, computing it on the card."""

    host: list[float]
    launching: list[float]
    device: list[float]


@dataclass
class StepClock:
    """Host and card of an engine that puts the next step together while the card computes.

    Attributes:
        host_s, card_s: until when each is busy.
    """

    host_s: float = 0.0
    card_s: float = 0.0

    def submit(self, host: float, launching: float, device: float) -> float:
        """Queue a step; returns when the card will be done with it.

        A captured graph starts when the host is ready and the card free; kernels that are launched one by one start
        with the first, and end after the last.
        """
        self.host_s += host
        done_s = max(self.card_s, self.host_s) + device
        self.host_s += launching
        self.card_s = max(done_s, self.host_s)
        return self.card_s

    def collect(self, done_s: float) -> float:
        """Wait for a step; returns the host's time."""
        self.host_s = max(self.host_s, done_s)
        return self.host_s


@dataclass(frozen=True)
class StepTimeModel:
    """Seconds of a step of one model under one configuration on one card.

    Attributes:
        cost: bytes and products. gpu: the card. constants: efficiencies and overheads, with their level.
        launch: which steps replay graphs, and whether the host works beside the card.
    """

    cost: StepCost
    gpu: GpuSpec
    constants: StepConstants
    launch: LaunchRules = _VLLM_GRAPHS

    def parts(self, load: StepLoad) -> dict[str, Array]:
        """Part → seconds, [steps] each; `seconds` is their sum. The host's part is what the card does not hide."""
        tokens, sampled, is_eager = self._launched(load)
        device = {**self._by_tokens(tokens), **self._by_rows(sampled), **self._by_context(load)}
        return {**device, "host": self._shown_host_seconds(*self._host_seconds(load, is_eager), _sum(device))}

    def _by_counts(self, load: StepLoad) -> tuple[Array, Array, Array]:
        """What depends on the numbers of tokens and requests alone, [steps] each: seconds of the card, those of putting
        the step together on the host, and those of launching its kernels."""
        tokens, sampled, is_eager = self._launched(load)
        return (self._counted_seconds(tokens, sampled), *self._host_seconds(load, is_eager))

    def _counted_seconds(self, tokens: Array, sampled: Array) -> Array:
        """Seconds of the card for so many tokens and sampled rows, as launched, [steps]."""
        return _sum(self._by_tokens(tokens)) + _sum(self._by_rows(sampled))

    def _context_seconds(self, load: StepLoad) -> Array:
        """The sum of `_by_context`, [steps]; what most steps have nothing of is not computed."""
        seconds = self._kv(load)
        if any(map(np.count_nonzero, load.pairs)):
            seconds = seconds + self._prefill(load)
        if load.swapped_bytes is not _NOTHING:
            seconds = seconds + load.swapped_bytes / self.constants.host_link_bytes_per_s
        return seconds

    def _by_context(self, load: StepLoad) -> dict[str, Array]:
        """Part → seconds of the card that depend on which requests are in the step, [steps] each."""
        return {
            "kv": self._kv(load),
            "prefill_attention": self._prefill(load),
            "swap": load.swapped_bytes / self.constants.host_link_bytes_per_s + 0.0 * load.num_tokens,
        }

    def _by_rows(self, sampled: Array) -> dict[str, Array]:
        """Part → seconds of the card that depend on the sampled rows alone, [steps] each."""
        return {
            "lm_head": self._products(self.cost.head, sampled, is_head=True),
            "sampling": self._sampling(sampled),
        }

    def _by_tokens(self, tokens: Array) -> dict[str, Array]:
        """Part → seconds of the card that depend on the tokens alone, [steps] each."""
        c, cost = self.constants, self.cost
        parts = {
            "dense": self._products(cost.dense, tokens, is_head=False),
            "elementwise": tokens * (cost.elementwise_bytes * c.elementwise_passes / self._bandwidth),
            "communication": self._communication(tokens),
        }
        if cost.num_experts:
            share = 1 - (1 - cost.experts_per_tok / cost.num_experts) ** tokens
            visits = tokens * cost.experts_per_tok / cost.num_experts
            parts["experts"] = self._gemm(cost.experts, share, visits, c.expert_efficiency)
        if self.launch.overlaps:
            # What lies between kernels is the card's time, which the host cannot hide.
            parts["gaps"] = self._between_kernels_s + 0.0 * tokens
        return parts

    def _host_seconds(self, load: StepLoad, is_eager: Array) -> tuple[Array, Array]:
        """Seconds in which the host puts each step together, and those in which it launches kernels that the card
        runs meanwhile, [steps] each."""
        c = self.constants
        host = c.step_s + c.request_s * load.num_seqs + c.token_s * load.num_prompt_tokens
        if self.launch.overlaps:
            more = np.where(load.num_prompt_tokens > 0, c.eager_prompt_layer_s, 0.0)
            return host, np.where(is_eager, c.eager_step_s + (c.eager_layer_s + more) * self.cost.num_layers, 0.0)
        # Engines that capture prompts too hide what they launch behind the large steps that have no graph.
        if self.launch.graph_sizes:
            return host + self._between_kernels_s, _NOTHING
        return host + self._between_kernels_s, np.array([c.eager_step_s + c.eager_layer_s * self.cost.num_layers])

    def _shown_host_seconds(self, host: Array, launching: Array, busy: Array) -> Array:
        """Host seconds that the card does not hide while it is `busy`, [steps]."""
        if self.launch.overlaps:
            return np.maximum(0.0, host + launching - busy)
        # The host runs ahead of the card while it launches, so what counts is whichever is slower.
        return host if launching is _NOTHING else host + np.maximum(0.0, launching - busy)

    def seconds(self, load: StepLoad) -> Array:
        """Seconds from the start of each step to the start of the next, [steps]; with an overlapping host, of a step
        among others like it."""
        counted, host, launching = self._by_counts(load)
        busy = counted + self._context_seconds(load)
        return (busy + self._shown_host_seconds(host, launching, busy)) * self.constants.correction

    def decode_seconds(self, contexts: Array, num_steps: int) -> Array:
        """Seconds of the next `num_steps` steps in which nothing but decode happens, [num_steps].

        Args:
            contexts: tokens that each request's next query sees, itself included, [requests].
        """
        return self.seconds(self.decode_load(contexts, num_steps))

    def decode_load(self, contexts: Array, num_steps: int) -> StepLoad:
        """The work of those steps; what is the same in all of them is there once."""
        steps = np.arange(num_steps, dtype=float)
        count = np.array([float(len(contexts))])
        kv = tuple(_context_sums(contexts, kind.window, steps) for kind in self.cost.kv)
        # A model without attention has nothing else of one entry a step.
        swapped = _NOTHING if kv else np.zeros(num_steps)
        return StepLoad(count, count, count, kv, (_NOTHING,) * len(kv), swapped)

    def overlapped(self, load: StepLoad) -> OverlappedSeconds:
        """Seconds of each step for `StepClock`."""
        counted, host, launching = self._by_counts(load)
        device = (counted + self._context_seconds(load)) * self.constants.correction
        shape = 0.0 * device
        return OverlappedSeconds((host + shape).tolist(), (launching + shape).tolist(), device.tolist())

    def waits_for_host(self, num_tokens: int) -> bool:
        """Whether launching a step of so many prompt tokens kernel by kernel takes longer than computing it."""
        tokens = np.array([float(num_tokens)])
        nothing = tuple(np.zeros(1) for _ in self.cost.kv)
        load = StepLoad(tokens, np.ones(1), np.ones(1), nothing, nothing, num_prompt_tokens=tokens)
        c = self.constants
        launching = c.eager_step_s + (c.eager_layer_s + c.eager_prompt_layer_s) * self.cost.num_layers
        busy = self._counted_seconds(tokens, np.ones(1)) + self._context_seconds(load)
        return launching > float(busy[0])

    @cached_property
    def _between_kernels_s(self) -> float:
        return self.constants.moe_layer_s * self.cost.num_moe_layers + self.constants.layer_s * self.cost.num_layers

    @cached_property
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

    def _launched(self, load: StepLoad) -> tuple[Array, Array, Array]:
        """Tokens and sampled rows of each step as it runs, padded where it replays a graph, and which steps are
        launched kernel by kernel."""
        tokens, launch = np.asarray(load.num_tokens, dtype=float), self.launch
        sampled = np.asarray(load.num_sampled, dtype=float)
        padded = _next_size(launch.graph_sizes, tokens)
        if launch.prompt_sizes == launch.graph_sizes:
            return np.maximum(tokens, padded), sampled, padded < tokens
        room = self._with_room(tokens, load.num_prompts)
        has_prompts, captured = load.num_prompt_tokens > 0, _next_size(launch.prompt_sizes, room)
        if launch.prompt_places:
            places = _next_size(launch.prompt_sizes, room, launch.prompt_places)
            captured = np.where(load.num_prompts > places, 0.0, captured)
            # A captured step gives a token of each place, whoever stands there.
            rows = np.where(has_prompts, np.minimum(captured + places, launch.graph_sizes[-1]), padded)
            sampled = np.where((sampled > 0) & (np.where(has_prompts, captured, padded) >= tokens), rows, sampled)
        padded = np.where(has_prompts, captured, padded)
        return np.maximum(tokens, padded), sampled, padded < tokens

    def _with_room(self, tokens: Array, num_prompts: Array) -> Array:
        """`tokens`, or those of the smallest graph with places for a step's prompts where the engine pads so far."""
        launch = self.launch
        if not launch.padded_tokens:
            return tokens
        room = _next_size(launch.prompt_places, num_prompts, launch.prompt_sizes)
        return np.where(room <= launch.padded_tokens, np.maximum(tokens, room), tokens)

    def _products(self, matrix: MatrixCost, tokens: Array, *, is_head: bool) -> Array:
        """Dense products: between measured ones where they are of the same format, else by the smooth roofline."""
        kind = "16bit" if is_head else self.cost.weight_kind
        if kind != "16bit" or self._curves is None:
            return self._gemm(matrix, 1.0, tokens, 1.0, kind)
        rows, dense, head = self._curves
        curve = head if is_head else dense
        inside = np.exp(np.interp(np.log(np.maximum(tokens, 1.0)), np.log(rows), np.log(np.maximum(curve, 1e-12))))
        # Beyond the largest measured step products are bound by compute: in proportion to the rows.
        seconds = np.where(tokens > 0, inside * np.maximum(1.0, tokens / rows[-1]), 0.0)
        # A card at work for long cannot keep the clocks of a short measurement: the more of its peak, the less.
        reached = 2 * matrix.num_elements * tokens / (self._peak("16bit")[0] * np.maximum(seconds, _TINY))
        busy = np.minimum(1.0, reached / _BUSY_SHARE) ** 2
        return seconds * self.constants.product_factor * (1 + (self.constants.sustained_factor - 1) * busy)

    @cached_property
    def _curves(self) -> tuple[Array, Array, Array] | None:
        """Rows, and seconds of all layers' products and of the head's at so many, [rows] each."""
        if not self.constants.products:
            return None
        return _product_curves(self.constants.products, self.cost.matrices)

    def _gemm(
        self, matrix: MatrixCost, read_share: Array | float, tokens: Array, efficiency: float, kind: str = ""
    ) -> Array:
        if not matrix.num_bytes:
            return 0.0 * tokens
        peak, reached = self._peak(kind or self.cost.weight_kind)
        memory = read_share * matrix.num_bytes / (self._bandwidth * self.constants.bandwidth_efficiency * efficiency)
        compute = 2 * matrix.num_elements * tokens / (peak * reached * efficiency)
        return smooth_max(memory, compute)

    def _kv(self, load: StepLoad) -> Array:
        c, total = self.constants, None
        for kind, token_s, tokens in zip(self.cost.kv, self._kv_token_s, load.kv_tokens, strict=True):
            seconds = kind.num_layers * smooth_max(token_s * tokens, c.attention_floor_s)
            total = seconds if total is None else total + seconds
            if c.attention_start_s:
                total = total + np.where(tokens > 0, kind.num_layers * c.attention_start_s, 0.0)
        return 0.0 * load.num_tokens if total is None else total

    @cached_property
    def _kv_token_s(self) -> tuple[float, ...]:
        """For each `KvCost`, seconds in which a layer's decode reads a token of context and multiplies with it."""
        c = self.constants
        efficiency = c.kv_efficiency_8bit if self.cost.kv_is_quantized else c.kv_efficiency
        peak = float(self.gpu.bf16_flops or self.gpu.fp16_flops or 0.0) * c.attention_efficiency
        return tuple(
            float(smooth_max(kind.token_bytes / (self._bandwidth * efficiency), kind.decode_flops / peak))
            for kind in self.cost.kv
        )

    def _prefill(self, load: StepLoad) -> Array:
        c, tokens = self.constants, load.num_prompt_tokens
        if not any(map(np.count_nonzero, load.pairs)):
            return 0.0 * load.num_tokens
        peak = float(self.gpu.bf16_flops or self.gpu.fp16_flops or 0.0) * c.attention_efficiency
        total = 0.0 * load.num_tokens
        if self.cost.kv_is_quantized:
            peak = peak / c.prompt_factor_8bit
        for kind, pairs in zip(self.cost.kv, load.pairs, strict=True):
            total = total + (kind.num_layers * kind.prefill_flops / peak) * pairs
            if c.prompt_start_s:
                context = pairs / np.maximum(tokens, 1.0)
                beside = c.prompt_start_s + c.prompt_context_s * context + c.prompt_token_s * tokens
                beside = beside + c.prompt_place_s * self._places(load)
                total = total + kind.num_layers * np.where(tokens > 0, beside, 0.0)
        return total

    def _places(self, load: StepLoad) -> Array:
        """Places for prompts of each step that replays a graph, [steps]; else its prompts."""
        launch = self.launch
        if not launch.prompt_places:
            return load.num_prompts
        tokens = self._with_room(np.asarray(load.num_tokens, dtype=float), load.num_prompts)
        places = _next_size(launch.prompt_sizes, tokens, launch.prompt_places)
        is_captured = (load.num_prompts <= places) & (tokens <= launch.prompt_sizes[-1])
        return np.where(is_captured, places, load.num_prompts)

    def _sampling(self, num_sampled: Array) -> Array:
        c = self.constants
        read = num_sampled * (self.cost.vocab_size * 4.0 * c.sampling_passes / self._bandwidth)
        return smooth_max(read, np.where(read > 0, c.sampling_floor_s, 0.0)) if c.sampling_floor_s else read

    def _communication(self, tokens: Array) -> Array:
        c, tp = self.constants, self.cost.tensor_parallel_size
        if tp == 1:
            return 0.0 * tokens
        moved = tokens * self.cost.hidden_bytes * 2 * (tp - 1) / tp
        return 2 * self.cost.num_layers * (c.all_reduce_s + moved / (link_bytes_per_s(self.gpu) * c.link_efficiency))


@dataclass(frozen=True)
class TabulatedStepTimes(StepTimeModel):
    """The same model for an engine that asks for few steps at a time: what depends on counts alone is computed once.

    Attributes:
        max_tokens: tokens of a step, at most.
    """

    max_tokens: int = 0
    _decodes: dict[tuple[float, ...], tuple[Array, Array, Array]] = field(default_factory=dict, init=False, repr=False)

    def _by_counts(self, load: StepLoad) -> tuple[Array, Array, Array]:
        if load.num_tokens.size > 1 or np.count_nonzero(load.num_prompt_tokens):
            return super()._by_counts(load)
        key = (load.num_tokens.item(), load.num_seqs.item(), load.num_sampled.item())
        if key not in self._decodes:
            self._decodes[key] = super()._by_counts(load)
        return self._decodes[key]

    @cached_property
    def _tables(self) -> tuple[Array, Array]:
        """Seconds of the card by tokens and by sampled rows, [counts] each."""
        most = max((self.max_tokens, *self.launch.graph_sizes, *self.launch.prompt_sizes))
        counts = np.arange(min(most, _MOST_TABULATED) + 1.0)
        return _sum(self._by_tokens(counts)), _sum(self._by_rows(counts))

    def _counted_seconds(self, tokens: Array, sampled: Array) -> Array:
        by_tokens, by_rows = self._tables
        if max(tokens.tolist()) >= len(by_tokens):
            return super()._counted_seconds(tokens, sampled)
        return by_tokens[tokens.astype(int)] + by_rows[sampled.astype(int)]


def _sum(parts: dict[str, Array]) -> Array:
    return np.asarray(sum(parts.values()))


def _next_size(sizes: tuple[int, ...], num_tokens: Array, values: tuple[int, ...] = ()) -> Array:
    """The next larger of `sizes`, or the largest, or what stands for it in `values`; 0 without any."""
    known = _as_array(sizes)
    return _as_array(values or sizes)[np.minimum(known.searchsorted(num_tokens), len(known) - 1)]


@lru_cache(maxsize=16)
def _product_curves(
    products: tuple[tuple[float, float, float, float], ...], matrices: tuple[Matrix, ...]
) -> tuple[Array, Array, Array]:
    measured = MeasuredProducts(products)
    curves = {False: np.zeros(len(measured.rows)), True: np.zeros(len(measured.rows))}
    for matrix in matrices:
        seconds = measured.seconds(matrix.outputs, matrix.inputs)
        curves[matrix.is_head] = curves[matrix.is_head] + matrix.number * seconds
    return measured.rows, curves[False], curves[True]


@lru_cache(maxsize=64)
def _as_array(sizes: tuple[int, ...]) -> Array:
    return np.array(sizes or (0,), dtype=float)


def smooth_max(first: Array | float, second: Array | float) -> Array:
    """(first^p + second^p)^(1/p) of numbers of 0 or more: near the larger, a little above it where they are equal."""
    larger, smaller = np.maximum(first, second), np.minimum(first, second)
    ratio = smaller / np.maximum(larger, _TINY)
    square = ratio * ratio
    return larger * (1 + square * square * ratio) ** (1 / _SHARPNESS)


def _context_sums(contexts: Array, window: int, steps: Array) -> Array:
    """Σ over requests of min(context + step, window), [steps]."""
    if not window:
        return np.add.reduce(contexts) + len(contexts) * steps
    return np.minimum(contexts[None, :] + steps[:, None], window).sum(axis=1)


def _has_fp4(gpu: GpuSpec) -> bool:
    return gpu.compute_capability is not None and int(gpu.compute_capability.split(".")[0]) >= 10
