"""Claims about speed: swap, dtypes, graphs, multi-step scheduling, paging, parallelism, logging."""

from __future__ import annotations

import io
import logging
import math
import time
from typing import Any

import numpy as np

from labkit.advice.claims.on_card import LINE_FORMAT, card_row, lost_percent, measured_on
from labkit.advice.claims.verdict import Verdict, Word, burst, judged, planned, served, summed
from labkit.advice.flags import check_command
from labkit.engine.step_constants import load_constants
from labkit.engine.step_cost import step_cost
from labkit.engine.step_time import StepLoad, StepTimeModel
from labkit.memory.questions import kv_bytes_for
from labkit.specs import load_gpu, load_model
from labkit.specs.engine_config import EngineConfig

_SMALL, _SEVEN, _CARD, _GIB = "Qwen/Qwen2-0.5B", "Qwen/Qwen2-7B", "A10", 2**30
_VERSION = "0.33.0"
_ALONE = ", nothing overlaps"


def _is_refused(arguments: str) -> bool:
    return bool(check_command(f"vllm serve {_SEVEN} {arguments}", _VERSION))


def c21() -> Verdict:
    """Swap to the host."""
    link = load_constants().host_link_bytes_per_s
    times = {
        name: 1e3 * kv_bytes_for(planned(name, _CARD, max_model_len=4096), 1, 2048) / link for name in (_SMALL, _SEVEN)
    }
    refused = _is_refused("--swap-space 32")
    return judged(
        "C21",
        "Swapping to the CPU adds 3 to 5 ms a swap; peak 19.2 to 14.3 GB; sensible below utilization 0.7 only.",
        "wrong" if refused else "depends",
        {
            **{f"one request of 2,048 tokens over PCIe, {name}, ms": value for name, value in times.items()},
            f"vLLM {_VERSION} takes --swap-space": "no" if refused else "yes",
        },
        "The time grows with the request's KV and is not one number. vLLM recomputes preempted requests since V1 and "
        "dropped the flag; swap space never lowered the pool, which takes the utilization's share.",
        "rules of vLLM",
    )


def c22() -> Verdict:
    """float16 and bfloat16."""
    plans = {kind: planned(_SMALL, _CARD, dtype=kind, max_model_len=4096) for kind in ("float16", "bfloat16")}
    used = {kind: found.breakdown.used_bytes for kind, found in plans.items()}
    traffic = burst(64, 500, 100)
    rates = {
        kind: summed(_SMALL, _CARD, traffic, dtype=kind, max_model_len=4096).output_tokens_per_s or 0.0
        for kind in plans
    }
    ratio = rates["float16"] / rates["bfloat16"]
    card = card_row("dtypes")
    measured = card["float16"] / card["bfloat16"] if card else ratio
    same_memory, same_speed = used["float16"] == used["bfloat16"], max(abs(ratio - 1), abs(measured - 1)) < 0.03
    return judged(
        "C22",
        "float16 and bfloat16 use equal memory; float16 is about 6 % faster.",
        "depends" if same_memory and same_speed else "holds",
        {
            "memory in use, float16 over bfloat16": used["float16"] / used["bfloat16"],
            "throughput, float16 over bfloat16, by data-sheet peaks": ratio,
            **({f"the same, measured with labkit's engine, {measured_on('dtypes')}": measured} if card else {}),
        },
        "The memory half holds. Tensor cores do both at one rate from capability 8.0 on, so no speed is to be "
        "expected; where there is a difference it comes from kernels. On older cards only float16 has tensor cores.",
        "measured on a card" if card else "simulation",
    )


def c23() -> Verdict:
    """bfloat16 and the V100."""
    cards = {name: load_gpu(name) for name in ("V100-32GB", "T4", "A10", "A100-40GB")}
    numbers: dict[str, float | str] = {
        f"{name}, capability {card.compute_capability}": "bfloat16" if card.bf16_flops else "no bfloat16 tensor cores"
        for name, card in cards.items()
    }
    by_rule = all((float(card.compute_capability or 0) >= 8) == bool(card.bf16_flops) for card in cards.values())
    return judged(
        "C23",
        "bfloat16 needs compute capability 8.0; the V100 has it.",
        "wrong" if by_rule and not cards["V100-32GB"].bf16_flops else "holds",
        numbers,
        "The rule holds, the example does not: the V100 is 7.0 and runs float16.",
    )


def c24() -> Verdict:
    """Eager and graphs."""
    traffic = burst(8, 200, 200)
    rates = {
        (name, eager): summed(name, _CARD, traffic, enforce_eager=eager, max_model_len=2048).output_tokens_per_s or 0.0
        for name in (_SMALL, _SEVEN)
        for eager in (False, True)
    }
    graphs = planned(_SEVEN, _CARD, max_model_len=2048).breakdown.cuda_graphs_bytes / _GIB
    costs = {name: 1 - rates[name, True] / rates[name, False] for name in (_SMALL, _SEVEN)}
    measured: dict[str, float | str] = {}
    for key, name in (("eager", _SMALL), ("eager, seven", _SEVEN), ("eager, many", _SEVEN)):
        row = card_row(key)
        if row:
            some = f"{row['details']['graphs']['most_running']} requests, {name}"
            measured[f"the same, measured with labkit's engine, {some}, %"] = lost_percent(row, "graphs", "eager")
    seven = card_row("eager, seven")
    if seven:
        measured["graphs of labkit's engine, Qwen2-7B, measured, MiB"] = (
            seven["details"]["graphs"]["graphs_bytes"] / 2**20
        )
    lost = measured.get(f"the same, measured with labkit's engine, 8 requests, {_SMALL}, %", 100 * costs[_SMALL])
    return judged(
        "C24",
        "Eager mode costs throughput; CUDA graphs cost memory.",
        "holds" if float(lost) > 5 and graphs > 0 else "depends",
        {
            **{f"lost by eager mode, 8 requests, {name}, A10, %": 100 * cost for name, cost in costs.items()},
            **measured,
            **({"measured on": measured_on("eager", "eager, seven", "eager, many")} if measured else {}),
            "graphs of vLLM, Qwen2-7B, GiB": graphs,
        },
        "It turns where a step takes the card longer than its launches take the host: large models, slow cards, "
        "large batches.",
        "measured on a card" if measured else "simulation",
    )


def c25() -> Verdict:
    """Multi-step scheduling."""
    config = EngineConfig(max_model_len=4096)
    model = StepTimeModel(step_cost(load_model(_SEVEN), config), load_gpu("L40"), load_constants("0.6.0"))
    batch = np.array([32.0])
    parts = model.parts(StepLoad(batch, batch, batch, (batch * 800,), (batch * 0,)))
    total = float(sum(part[0] for part in parts.values()))
    most = total / (total - float(parts["host"][0]))
    refused = _is_refused("--num-scheduler-steps 8")
    return judged(
        "C25",
        "Multi-step scheduling lifts an L40 from 11 to 29 req/s.",
        "wrong" if refused or most < 29 / 11 else "holds",
        {
            "largest gain if the host cost nothing, Qwen2-7B, 32 requests, V0 engine": most,
            "claimed gain": 29 / 11,
            f"vLLM {_VERSION} takes --num-scheduler-steps": "no" if refused else "yes",
        },
        "It only removes host time between steps. The flag went with V0; asynchronous scheduling, on by default, does "
        "what it did.",
        "simulation",
    )


def c26() -> Verdict:
    """Paged against contiguous."""
    traffic, length = burst(128, 500, 200), 8192
    paged = served(_SEVEN, _CARD, traffic, max_model_len=length)
    at_once = max(1, paged.plan.kv_cache_tokens // length)
    contiguous = served(_SEVEN, _CARD, traffic, max_model_len=length, max_num_seqs=at_once)
    gain = contiguous.duration_s / paged.duration_s
    return judged(
        "C26",
        "Paged KV against contiguous KV on one card: 3.2 to 18.7 req/s, 16 to 11.4 GB.",
        "depends" if gain > 1.2 else "wrong",
        {
            "requests at once, each with room for max-model-len": at_once,
            "requests at once, paged": max(step.num_running for step in paged.steps),
            "throughput, paged over contiguous": gain,
            **_paged_measured(),
        },
        "The gain is the ratio of max-model-len to what requests really hold, until another limit binds: large here, "
        "nothing where every request fills its length. The memory in use does not fall: more requests share it.",
        "measured on a card" if card_row("paged") else "simulation",
    )


def _paged_measured() -> dict[str, float | str]:
    row = card_row("paged")
    if row is None:
        return {}
    most = {name: row["details"][name]["most_running"] for name in ("contiguous", "paged")}
    return {
        **{f"requests at once, {name}, measured": count for name, count in most.items()},
        "throughput, paged over contiguous, measured": row["paged"] / row["contiguous"],
        "measured with labkit's engine on": measured_on("paged"),
    }


def c27() -> Verdict:
    """Tensor parallelism."""
    traffic = burst(32, 400, 150)
    rates = {
        count: summed(_SEVEN, "A10", traffic, max_model_len=4096, tensor_parallel_size=count).output_tokens_per_s or 0.0
        for count in (1, 2)
    }
    return judged(
        "C27",
        "tensor-parallel-size 2 on one card triggers useless all-reduce; 1 doubles throughput.",
        "wrong",
        {
            "cards that size 2 needs": 2,
            "throughput on two A10 over one": rates[2] / rates[1],
        },
        "vLLM gives each rank a card of its own and does not start with fewer cards than ranks, so there is no such "
        "state to leave. On two cards without a fast link, size 2 gives less than twice.",
        "rules of vLLM",
    )


def c29() -> Verdict:
    """Embeddings on L40 and A100."""
    name, traffic = "Qwen/Qwen3-Embedding-0.6B", burst(200, 2048, 1)
    rates = {}
    for card in ("L40", "A100-80GB"):
        for kind in ("auto", "fp8") if card == "L40" else ("auto",):
            run = summed(name, card, traffic, max_model_len=8192, kv_cache_dtype=kind, max_num_batched_tokens=8192)
            rates[card, kind] = run.requests_per_s or 0.0
    gpus = {card: load_gpu(card) for card in ("L40", "A100-80GB")}
    bandwidth, compute = (
        (getattr(gpus["L40"], field) or 0) / (getattr(gpus["A100-80GB"], field) or math.inf)
        for field in ("mem_bandwidth_bytes_per_s", "bf16_flops")
    )
    gain = rates["L40", "fp8"] / rates["L40", "auto"] - 1
    return judged(
        "C29",
        "L40 is slower than A100 on embeddings because of its bandwidth (43 %); fp8 KV closes the gap.",
        "wrong" if abs(gain) < 0.05 else "depends",
        {
            "throughput, L40 over A100": rates["L40", "auto"] / rates["A100-80GB", "auto"],
            "bandwidth, L40 over A100": bandwidth,
            "compute, L40 over A100": compute,
            "gain of fp8 KV on the L40, %": 100 * gain,
        },
        "Long prompts are bound by compute, and the gap follows it. KV is written once and hardly read, so its "
        "type does not matter.",
        "simulation",
    )


def c30() -> Verdict:
    """Debug logging: measured where a card has, else a line's time on this CPU beside a simulated step."""
    row = card_row("logging")
    return judged(
        "C30",
        "Debug logging slows serving by 15 %.",
        _logging_verdict(row),
        _logging_measured(row) if row else _logging_estimated(),
        "It turns with the number of lines and with what runs beside the card: a line for each step costs next to "
        "nothing, one for each of many requests reaches it. Asynchronous scheduling, on by default, hides what fits in "
        "the card's step beside the engine's own work.",
        "measured on a card" if row else "timing on this CPU",
    )


def _logging_measured(row: dict[str, Any]) -> dict[str, float | str]:
    return {
        **{
            f"throughput lost, {lines} in each step{ending}, %": lost_percent(row, f"none{ending}", which)
            for ending in ("", _ALONE)
            for which, lines in ((f"a step{ending}", "a line"), (f"a request{ending}", "64 lines"))
        },
        "measured on": measured_on("logging"),
    }


def _logging_verdict(row: dict[str, Any] | None) -> Word:
    losses = [value for value in _logging_measured(row).values() if isinstance(value, float)] if row else []
    if not losses or min(losses) < 15 <= max(losses):
        return "depends"
    return "holds" if min(losses) >= 15 else "wrong"


def _logging_estimated() -> dict[str, float | str]:
    logger = logging.Logger("labkit-claim", logging.DEBUG)
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(logging.Formatter(LINE_FORMAT))
    logger.addHandler(handler)
    start = time.process_time()
    for number in range(2000):
        logger.debug("Scheduled request %s with %d tokens", number, 128)
    line_s = (time.process_time() - start) / 2000
    record = served(_SMALL, _CARD, burst(64, 300, 100), max_model_len=2048)
    step_s = sum(step.duration_s for step in record.steps) / len(record.steps)
    return {
        "one log line on this CPU, microseconds": 1e6 * line_s,
        "mean step, Qwen2-0.5B on an A10, ms": 1e3 * step_s,
        "lines in every step that make 15 %": 0.15 * step_s / line_s,
    }
