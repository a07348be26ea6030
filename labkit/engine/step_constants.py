"""`StepConstants`: efficiencies and overheads of `StepTimeModel`, on four levels, with where they come from."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib import resources
from math import log
from typing import Any, Literal

from labkit.memory.rules import vllm_rules
from labkit.specs.gpu_spec import GpuSpec

Level = Literal["data sheet", "shipped", "microbenchmark", "calibrated"]
TPOT = "tpot_mean_s"
# Nine in ten values of a normal distribution lie so many standard deviations around its mean.
_NORMAL_90 = 1.645
LEVELS: tuple[Level, ...] = ("data sheet", "shipped", "microbenchmark", "calibrated")


@dataclass(frozen=True)
class StepConstants:
    """Shares of data-sheet figures that are reached, and seconds that are lost; each 0 or more.

    Attributes:
        bandwidth_efficiency: weights read by products, of the memory bandwidth.
        flops_efficiency, flops_efficiency_8bit, flops_efficiency_4bit: products, of the peak of that width.
        expert_efficiency: grouped products over plain ones.
        kv_efficiency, kv_efficiency_8bit: decode attention, of the memory bandwidth.
        attention_efficiency: prefill attention, of the 16-bit peak.
        attention_start_s, attention_floor_s: of a layer's decode attention: added to the time of reading, and the least
            that reading takes.
        prompt_start_s, prompt_context_s, prompt_token_s: of a layer's prompt attention beside its products: once, for
            each token of mean context, for each prompt token.
        elementwise_passes: time of norms, rotations and activations over what the bandwidth allows; 0 where they are
            inside the shares that were fitted for products.
        sampling_passes, sampling_floor_s: logits read, as passes over float32 numbers; the shortest time for it.
        all_reduce_s, link_efficiency: one all-reduce; share of the link's bandwidth.
        step_s, layer_s, moe_layer_s, request_s: host and launch time of a step, a layer, a layer's routing, a request.
        eager_step_s, eager_layer_s, eager_prompt_layer_s: host time that a step without CUDA graphs takes more, each of
            its layers, and each beside that where the step computes prompts.
        token_s: host time of one prompt token.
        admission_s: host time to take in a request.
        first_token_s: HTTP, tokenizer and detokenizer, added to the time to first token.
        lag_steps: steps that a new request waits because they were queued before (asynchronous scheduling).
        host_link_bytes_per_s: between card and host memory.
        correction: one factor over the whole step, 1 until calibrated.
        sustained_factor: the same, of products that are bound by compute: cards slow down at their power limit.
        prompt_place_s: of a layer's prompt attention: each place that a captured step has for a prompt, taken or not.
        prompt_factor_8bit: products of prompt attention over an 8-bit cache, over those of a 16-bit one.
        products: measured seconds of 16-bit products as (outputs and inputs of the matrix, rows, seconds); empty where
            only the shares above are known.
        product_factor: over the times that `products` gives.
        interval_low, interval_high: a time per output token times these is the range that holds 90 % of measured ones.
        metric_intervals: the same of other metrics, as (metric, low, high), where runs have shown it.
        level: where the constants come from.
    """

    bandwidth_efficiency: float
    flops_efficiency: float
    flops_efficiency_8bit: float
    flops_efficiency_4bit: float
    expert_efficiency: float
    kv_efficiency: float
    kv_efficiency_8bit: float
    attention_efficiency: float
    attention_start_s: float
    attention_floor_s: float
    prompt_start_s: float
    prompt_context_s: float
    prompt_token_s: float
    elementwise_passes: float
    sampling_passes: float
    sampling_floor_s: float
    all_reduce_s: float
    link_efficiency: float
    step_s: float
    layer_s: float
    moe_layer_s: float
    request_s: float
    eager_step_s: float
    eager_layer_s: float
    token_s: float
    admission_s: float
    first_token_s: float
    lag_steps: float
    host_link_bytes_per_s: float
    correction: float = 1.0
    eager_prompt_layer_s: float = 0.0
    product_factor: float = 1.0
    sustained_factor: float = 1.0
    prompt_factor_8bit: float = 1.0
    prompt_place_s: float = 0.0
    products: tuple[tuple[float, float, float, float], ...] = ()
    interval_low: float = 0.5
    interval_high: float = 2.0
    metric_intervals: tuple[tuple[str, float, float], ...] = ()
    level: Level = "data sheet"

    def replace(self, **changes: Any) -> StepConstants:
        """A variant with `changes`."""
        return replace(self, **changes)

    def with_intervals(self, engine: str, level: Level, num_runs: int = 1) -> StepConstants:
        """At a level that is reached by measuring on the card, with the intervals that other runs have shown there.

        Args:
            engine: "vllm" or "labkit".
            num_runs: that calibrated the constants.
        """
        known = constants_table()["intervals"][engine][level]
        found = dict(known[min(num_runs, len(known)) - 1])
        low, high = found.pop(TPOT)
        others = tuple((metric, *edges) for metric, edges in found.items())
        return replace(self, level=level, interval_low=low, interval_high=high, metric_intervals=others)

    @property
    def relative_error(self) -> float:
        """Standard deviation of log(measured/predicted) of a time per token, as the interval has it."""
        return log(self.interval_high / self.interval_low) / (2 * _NORMAL_90)


CONSTANT_NAMES = tuple(entry.name for entry in fields(StepConstants) if entry.type == "float")


@lru_cache(maxsize=1)
def constants_table() -> dict[str, Any]:
    """The content of `step_constants.json`."""
    return json.loads(resources.files("labkit.engine").joinpath("step_constants.json").read_text(encoding="utf-8"))


def load_constants(
    engine_version: str = "0.33.0", level: Level = "shipped", *, is_moe: bool = False, engine: str = "vllm"
) -> StepConstants:
    """The constants that come with labkit.

    Args:
        engine_version: of vLLM.
        level: "data sheet" (written down before any run was looked at) or "shipped" (fitted to public runs, and for
            labkit's own engine to runs on one card).
        is_moe: mixtures of experts are predicted worse, so that their interval is wider.
        engine: "vllm" or "labkit".

    Raises:
        OutOfRangeError: the text is no version.
    """
    table = constants_table()
    values = dict(table["data sheet"])
    if level != "data sheet":
        values.update(table["shipped"]["labkit" if engine == "labkit" else vllm_rules(engine_version).engine])
    low, high = values.pop("interval_moe" if is_moe else "interval_dense")
    values.pop("interval_dense" if is_moe else "interval_moe")
    return StepConstants(**values, interval_low=low, interval_high=high, level=level)


def link_bytes_per_s(gpu: GpuSpec) -> float:
    """Bytes per second that one card sends to its peers: NVLink in one direction, else PCIe."""
    links = constants_table()["links_bytes_per_s"]
    return float(links.get(gpu.name, links["other"]))
