"""Settings for common cards: on each, the best of a few configurations by simulation, with its command."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from labkit.advice.command import vllm_command
from labkit.engine.step_constants import load_constants
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
_NUM_SEQS, _NUM_TOKENS = (32, 128, 256), (2048, 8192)
_WORTH = 1.02


def best_settings(model: ModelSpec, gpu: GpuSpec, traffic: Workload) -> tuple[EngineConfig, RunSummary] | None:
    """The configuration with the most requests per second when all of `traffic` waits; None when nothing fits.

    Of configurations within 2 % the first stands: 16-bit KV before fp8, fewer requests and smaller steps before more.
    """
    longest = max(request.input_tokens + max(1, request.output_tokens) for request in traffic.requests)
    kinds = ("auto", "fp8") if gpu.fp8_flops else ("auto",)
    best: tuple[EngineConfig, RunSummary] | None = None
    for kind, seqs, tokens in itertools.product(kinds, _NUM_SEQS, _NUM_TOKENS):
        config = EngineConfig(
            max_model_len=longest, max_num_seqs=seqs, max_num_batched_tokens=tokens, kv_cache_dtype=kind
        )
        try:
            record = simulate(model, gpu, traffic, config, options=VirtualOptions(arrival_scale=0.0))
        except LabkitError:
            continue
        found = summarize(record)
        if record.status == "finished" and found.num_finished == found.num_requests:
            rate = found.requests_per_s or 0.0
            if best is None or rate > _WORTH * (best[1].requests_per_s or 0.0):
                best = (config, found)
    return best


def settings_table(
    cards: Sequence[str] = CARDS,
    models: Sequence[str] = MODELS,
    traces: Sequence[str] = TRACES,
    limit: int = 40,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> Iterator[dict[str, Any]]:
    """One row for each card, model and trace: settings, command, prediction, interval and level."""
    for name in models:
        model = load_model(name)
        constants = load_constants(VERSION, is_moe=model.moe is not None)
        for trace in traces:
            traffic = load_workload(trace, limit=limit, max_input_tokens=16000, max_output_tokens=1000)
            if model.is_embedding:
                ones = tuple(
                    type(one)(one.arrival_s, one.input_tokens, 1, one.prefix_blocks) for one in traffic.requests
                )
                traffic = traffic.with_requests(ones, "prompts only")
            for card in cards:
                row: dict[str, Any] = {"card": card, "model": name, "trace": trace}
                found = best_settings(model, load_gpu(card), traffic)
                if found is None:
                    row["command"] = "does not fit on one card"
                else:
                    config, summary = found
                    rate = summary.requests_per_s or 0.0
                    row |= {
                        "command": vllm_command(name, config, VERSION), "requests_per_s": float(f"{rate:.3g}"),
                        "output_tokens_per_s": float(f"{summary.output_tokens_per_s or 0.0:.3g}"),
                        "low": float(f"{rate / constants.interval_high:.3g}"),
                        "high": float(f"{rate / constants.interval_low:.3g}"), "level": constants.level,
                        "preemptions": summary.num_preemptions,
                    }  # fmt: skip
                on_row(row)
                yield row


def write_settings(path: str | os.PathLike[str], **table: Any) -> dict[str, Any]:
    """Write the table as a results file; `table` as for `settings_table`."""
    rows = list(settings_table(**table))
    fits = sum(1 for row in rows if "requests_per_s" in row)
    return write_results(
        path, command="python tools/make_card_settings.py", rows=rows,
        summary={"combinations with settings or a reason": at_least(len(rows), len(CARDS) * len(MODELS) * len(TRACES))},
        combinations_that_fit=fits,
    )  # fmt: skip
