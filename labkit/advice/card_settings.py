"""Settings for common cards: on each, the best of a few configurations by simulation, with its command."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.advice.command import vllm_command
from labkit.engine.step_constants import StepConstants, load_constants
from labkit.errors import LabkitError
from labkit.experiments.virtual_run import VirtualOptions, simulate
from labkit.measure.summary import RunSummary, summarize
from labkit.results import at_least, write_results
from labkit.specs import load_gpu, load_model, load_workload
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import ModelSpec
from labkit.specs.workload import Workload

CARDS = ("A10", "A100-40GB", "A100-80GB", "L4", "L40", "L40S", "RTX 4090", "H100 SXM", "H200")
MODELS = ("Qwen/Qwen3-Embedding-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen2.5-32B-Instruct")
TRACES = ("azure-2023-conv", "azure-2023-code", "mooncake-conversation")
VERSION = "0.33.0"
# With 40 requests more than 64 places are as good as none; larger steps than 8,192 tokens cost memory and latency.
NUM_REQUESTS, _NUM_SEQS, _NUM_TOKENS, _NUM_CARDS = 40, (32, 64), (2048, 8192), (1, 2, 4)
_WORTH = 1.02


@dataclass(frozen=True)
class Settings:
    """The best of a few configurations: settings, cards that they need, and what they give."""

    config: EngineConfig
    num_cards: int
    summary: RunSummary


def best_settings(model: ModelSpec, gpu: GpuSpec, traffic: Workload) -> Settings | None:
    """The configuration with the most requests per second when all of `traffic` waits, on the fewest cards on which
    one fits; None when none of them does.

    Of configurations within 2 % the first stands: fewer requests and smaller steps before more, 16-bit KV before fp8.
    """
    longest = max(request.input_tokens + max(1, request.output_tokens) for request in traffic.requests)
    for num_cards in _NUM_CARDS:
        base = EngineConfig(max_model_len=longest, tensor_parallel_size=num_cards)
        best = _best(model, gpu, traffic, [
            base.replace(max_num_seqs=seqs, max_num_batched_tokens=tokens)
            for seqs, tokens in itertools.product(_NUM_SEQS, _NUM_TOKENS)
        ])  # fmt: skip
        if gpu.fp8_flops:
            config = best.config if best else base.replace(max_num_seqs=_NUM_SEQS[0], max_num_batched_tokens=2048)
            best = _best(model, gpu, traffic, [config.replace(kv_cache_dtype="fp8")], best)
        if best is not None:
            return best
    return None


def _best(
    model: ModelSpec, gpu: GpuSpec, traffic: Workload, configs: Sequence[EngineConfig], best: Settings | None = None
) -> Settings | None:
    for config in configs:
        try:
            record = simulate(model, gpu, traffic, config, options=VirtualOptions(arrival_scale=0.0))
        except LabkitError:
            continue
        found = summarize(record)
        if record.status == "finished" and found.num_finished == found.num_requests:
            rate = found.requests_per_s or 0.0
            if best is None or rate > _WORTH * (best.summary.requests_per_s or 0.0):
                best = Settings(config, config.tensor_parallel_size, found)
    return best


def card_traffic(model: ModelSpec, trace: str, limit: int = NUM_REQUESTS) -> Workload:
    """The beginning of a trace, cut to 16,000 tokens in and 1,000 out; prompts only for an embedding model."""
    most = 1 if model.is_embedding else 1000
    return load_workload(trace, limit=limit, max_input_tokens=16000, max_output_tokens=most)


def settings_table(
    cards: Sequence[str] = CARDS,
    models: Sequence[str] = MODELS,
    traces: Sequence[str] = TRACES,
    limit: int = NUM_REQUESTS,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> Iterator[dict[str, Any]]:
    """One row for each card, model and trace: settings, command, prediction, interval and level."""
    for name in models:
        model = load_model(name)
        constants = load_constants(VERSION, is_moe=model.moe is not None)
        for trace in traces:
            traffic = card_traffic(model, trace, limit)
            for card in cards:
                row: dict[str, Any] = {"card": card, "model": name, "trace": trace}
                row |= _answer(name, best_settings(model, load_gpu(card), traffic), constants)
                on_row(row)
                yield row


def _answer(name: str, found: Settings | None, constants: StepConstants) -> dict[str, Any]:
    if found is None:
        return {"command": f"does not fit on {_NUM_CARDS[-1]} cards"}
    rate, output = found.summary.requests_per_s or 0.0, found.summary.output_tokens_per_s or 0.0
    numbers = {"requests_per_s": rate, "output_tokens_per_s": output, "low": rate / constants.interval_high,
               "high": rate / constants.interval_low}  # fmt: skip
    return {
        "command": vllm_command(name, found.config, VERSION), "num_cards": found.num_cards,
        **{key: float(f"{value:.3g}") for key, value in numbers.items()}, "level": constants.level,
        "preemptions": found.summary.num_preemptions,
    }  # fmt: skip


def write_settings(path: str | os.PathLike[str], **table: Any) -> dict[str, Any]:
    """Write the table as a results file; `table` as for `settings_table`."""
    rows = list(settings_table(**table))
    fits = sum(1 for row in rows if "requests_per_s" in row)
    return write_results(
        path, command="python tools/make_card_settings.py", rows=rows,
        summary={"combinations with settings": at_least(fits, len(CARDS) * len(MODELS) * len(TRACES))},
    )  # fmt: skip
