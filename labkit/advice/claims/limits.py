"""Claims about max-model-len, max-num-seqs, the token budget and the utilization."""

from __future__ import annotations

from collections.abc import Iterable

from labkit.advice.claims.on_card import Row, card_row, card_runs, measured_on
from labkit.advice.claims.verdict import Verdict, burst, judged, planned, served, summed
from labkit.measure.run_record import RunRecord
from labkit.measure.summary import summarize
from labkit.memory.tensors import Sharing
from labkit.memory.weights import StageLayers, stage_weights_bytes, weight_format
from labkit.specs import load_model, load_workload
from labkit.specs.engine_config import EngineConfig
from labkit.specs.model_spec import ModelSpec

_SMALL, _SEVEN, _CARD, _GIB = "Qwen/Qwen2-0.5B", "Qwen/Qwen2-7B", "A10", 2**30


def c13() -> Verdict:
    """Chunked prefill and the peak."""
    name, card = "Qwen/Qwen2-7B", "A100-40GB"
    whole = planned(
        name, card, max_model_len=32768, max_num_batched_tokens=32768, enable_chunked_prefill=False, max_num_seqs=64
    )
    chunked = planned(name, card, max_model_len=4096, max_num_batched_tokens=4096, max_num_seqs=64)
    long = planned(name, card, max_model_len=32768, max_num_batched_tokens=4096, max_num_seqs=64)
    peaks = [found.breakdown.activation_bytes for found in (whole, chunked, long)]
    used = [found.breakdown.used_bytes for found in (whole, chunked)]
    return judged(
        "C13",
        "Chunked prefill with max-model-len 4096 cuts the memory peak by 63 % for long inputs.",
        "depends" if peaks[1] < peaks[0] else "wrong",
        {
            "activation peak, one 32,768-token prompt in a step, GiB": peaks[0] / _GIB,
            "activation peak in chunks of 4,096, GiB": peaks[1] / _GIB,
            "cut of the activation peak, %": 100 * (1 - peaks[1] / peaks[0]),
            "activation peak in chunks of 4,096 at max-model-len 32768, GiB": peaks[2] / _GIB,
            "cut of all memory in use, %": 100 * (1 - used[1] / used[0]),
        },
        "The peak follows max-num-batched-tokens, not max-model-len; what it frees goes to the KV pool, so that the "
        "memory in use stays. A server with max-model-len 4096 refuses the long inputs.",
    )


def c14() -> Verdict:
    """max-model-len and TTFT."""
    traffic = load_workload("azure-2023-conv", limit=150, max_input_tokens=3000, max_output_tokens=500)
    first = {
        length: summed(_SMALL, _CARD, traffic, at_once=False, max_model_len=length).ttft_s
        for length in (4096, 8192, 32768)
    }
    medians = {length: times.p50 if times else 0.0 for length, times in first.items()}
    row = card_row("max-model-len")
    ratios = [medians[32768] / medians[4096], *([row["32768"] / row["4096"]] if row else [])]
    return judged(
        "C14",
        "A larger max-model-len can double the time to first token.",
        "wrong" if all(abs(ratio - 1) < 0.05 for ratio in ratios) else "depends",
        {
            **{f"TTFT p50 at max-model-len {length}, ms": 1e3 * value for length, value in medians.items()},
            **_first_tokens_measured(row, medians),
        },
        "Same requests, same steps. It turns where the pool is so small that fewer requests run, or where chunked "
        "prefill is off and the token budget has to grow with the length.",
        "measured on a card" if row else "simulation",
    )


def _first_tokens_measured(row: Row | None, lengths: Iterable[int]) -> dict[str, float | str]:
    if row is None:
        return {}
    return {
        **{f"64 prompts of 1,000 tokens at once, measured, at {length}, ms": row[str(length)] for length in lengths},
        **{f"one such prompt alone, measured, at {length}, ms": row["details"][str(length)]["alone"]
           for length in lengths},
        "measured with labkit's engine on": measured_on("max-model-len"),
    }  # fmt: skip


def c15() -> Verdict:
    """What the utilization leaves."""
    found = planned(_SMALL, _CARD, gpu_memory_utilization=0.9)
    parts = found.breakdown
    inside = parts.activation_bytes + parts.workspace_bytes + parts.cuda_graphs_bytes
    return judged(
        "C15",
        "gpu-memory-utilization 0.9 keeps 10 % for CUDA context and buffers.",
        "wrong" if inside > parts.outside_bytes else "depends",
        {
            "tenth that is left, GiB": 0.1 * parts.total_bytes / _GIB,
            "context and others, outside, GiB": parts.outside_bytes / _GIB,
            "activations, workspace and graphs, from the 0.9, GiB": inside / _GIB,
            "free in the end, GiB": parts.free_bytes / _GIB,
        },
        "Buffers come out of the 0.9; the rest is for what starts outside the budget, and most of it stays free. It "
        "turns where other processes hold as much.",
    )


def _most_running(record: RunRecord) -> int:
    return max((step.num_running for step in record.steps), default=0)


def c16() -> Verdict:
    """Concurrency and the token budget."""
    runs = {
        tokens: _most_running(
            served(
                _SMALL, _CARD, burst(64, tokens, 200), max_model_len=8192, max_num_batched_tokens=8192, max_num_seqs=256
            )
        )
        for tokens in (1000, 4000, 7900)
    }
    claimed = {tokens: 8192 // tokens for tokens in runs}
    return judged(
        "C16",
        "Real concurrency is at most max-num-batched-tokens over the average input; at 8192/8192 it is 1.",
        "wrong" if any(runs[tokens] > 1.5 * claimed[tokens] for tokens in runs) else "holds",
        {f"requests at once, inputs of {tokens} (claimed {claimed[tokens]})": count for tokens, count in runs.items()},
        "The budget bounds the tokens of one step. A request that decodes takes one of them, so prompts that came in "
        "one after the other run together; the KV pool and max-num-seqs bound how many.",
        "simulation",
    )


def c17() -> Verdict:
    """The recipe for the token budget."""
    name, card, traffic = "Qwen/Qwen2-7B", "A10", burst(128, 1280, 200)
    numbers: dict[str, float | str] = {}
    rates = {}
    for budget in (2048, 8192, 49152):
        record = served(name, card, traffic, max_model_len=4096, max_num_batched_tokens=budget, max_num_seqs=32)
        summary = summarize(record)
        rates[budget] = summary.output_tokens_per_s or 0.0
        numbers[f"output tok/s at {budget}"] = rates[budget] or "does not start"
        numbers[f"KV tokens at {budget}"] = record.plan.kv_cache_tokens
        numbers[f"plan at {budget}"] = record.plan.verdict
        if summary.inter_token_s:
            numbers[f"p99 between tokens at {budget}, ms"] = 1e3 * summary.inter_token_s.p99
    row = card_row("step tokens")
    numbers |= _step_tokens_measured(row)
    found = [rates, *([{budget: row[str(budget)] for budget in rates}] if row else [])]
    gains = [each[49152] >= 1.03 * max(each[2048], each[8192]) for each in found]
    return judged(
        "C17",
        "Set max-num-batched-tokens = min(65536, average input x concurrency x 1.2): 49,152 for 1,280 x 32.",
        "holds" if all(gains) else "depends" if any(gains) else "wrong",
        numbers,
        "A step is full of work at a few thousand tokens: beyond, no token more comes out, and the peak takes KV "
        "blocks away (on the A10 all of them). Answers under way wait as long as a step of prompts takes; at 49,152 "
        "none is under way here, since 32 equal requests begin and end together. It turns where prompts alone are "
        "served (embeddings) on a card with memory to spare.",
        "measured on a card" if row else "simulation",
    )


def _step_tokens_measured(row: Row | None) -> dict[str, float | str]:
    if row is None:
        return {}
    numbers: dict[str, float | str] = {}
    for budget, found in row["details"].items():
        numbers[f"output tok/s at {budget}, measured"] = row[budget]
        numbers[f"p99 between tokens at {budget}, measured, ms"] = found["between_tokens_p99_ms"]
    return {**numbers, "measured with labkit's engine on": measured_on("step tokens")}


def _bandwidth(record: RunRecord) -> float:
    """Bytes of weights and KV that the steps read, over their time, GB/s."""
    tokens = sum(step.num_tokens_stored for step in record.steps)
    seconds = sum(step.duration_s for step in record.steps)
    return _read_per_s(record.model, record.plan.config, len(record.steps), tokens, seconds)


def _read_per_s(model: ModelSpec, config: EngineConfig, num_steps: int, tokens_read: int, seconds: float) -> float:
    from labkit.engine.step_cost import step_cost

    cost = step_cost(model, config)
    token = sum(kind.num_layers * kind.token_bytes for kind in cost.kv)
    weights = cost.dense.num_bytes + cost.head.num_bytes
    return (num_steps * weights + token * tokens_read) / seconds / 1e9


# Row of `on_card` → the load that it is of.
_LOADS = {"max-num-seqs, light": "32 requests", "max-num-seqs": "300 requests"}


def _bandwidth_changes_measured() -> dict[str, float]:
    """Key of `_LOADS` → change of the bytes read a second, of those that were measured."""
    model, config = load_model(_SEVEN), EngineConfig(max_model_len=4096)
    changes = {}
    for key, row in ((key, card_row(key)) for key in _LOADS):
        if row is not None:
            few, many = (
                _read_per_s(model, config, found["num_steps"], found["tokens_read"], found["steps_s"])
                for found in (row["details"][seqs] for seqs in ("64", "256"))
            )
            changes[key] = many / few - 1
    return changes


def c18() -> Verdict:
    """max-num-seqs and bandwidth."""
    few = load_workload("azure-2023-conv", limit=40)
    loads = {"light": few, "burst": burst(300, 500, 200)}
    use = {}
    for load, traffic in loads.items():
        for seqs in (64, 256):
            at_once = load == "burst"
            record = served(_SEVEN, "A100-40GB", traffic, at_once=at_once, max_num_seqs=seqs, max_model_len=8192)
            use[load, seqs] = _bandwidth(record)
    changes = {load: use[load, 256] / use[load, 64] - 1 for load in ("light", "burst")}
    measured = _bandwidth_changes_measured()
    each = {**changes, **measured}.items()
    light_changes, burst_changes = (
        [abs(change) for load, change in each if load.endswith("light") is wanted] for wanted in (True, False)
    )
    return judged(
        "C18",
        "max-num-seqs 256 against 64 changes memory-bandwidth use by 47 %.",
        "depends" if max(light_changes) < 0.02 < min(burst_changes) else "holds",
        {
            "change at a light load, %": 100 * changes["light"],
            "change when 300 requests come at once, %": 100 * changes["burst"],
            **{f"change when {_LOADS[key]} come at once, measured, %": 100 * found for key, found in measured.items()},
            **({"measured with labkit's engine on": measured_on(*measured)} if measured else {}),
        },
        "The knob is a bound: it does nothing while fewer requests than the smaller value are there.",
        "measured on a card" if measured else "simulation",
    )


def c19() -> Verdict:
    """Reserved and allocated memory, measured on a card; the allocator's rounding by its rules."""
    model = load_model(_SEVEN)
    form, whole = weight_format(model, None), StageLayers(0, model.num_layers, model.num_layers)
    exact, rounded = (
        stage_weights_bytes(model, whole, Sharing(), form, model.dtype, allocator=allocator)
        for allocator in (False, True)
    )
    keys = [key for key in card_runs()["rows"] if key.startswith("reserved")]
    rows = [card_runs()["rows"][key] for key in keys]
    excess = [row["at the peak"] for row in rows]
    inside = [10 <= value <= 15 for value in excess]
    return judged(
        "C19",
        "Reserved memory exceeds allocated memory by 10 to 15 % (torch's allocator).",
        "not tested" if not rows else "holds" if all(inside) else "depends" if any(inside) else "wrong",
        {
            "allocated over asked for, weights of Qwen2-7B, by the allocator's rules, %": 100 * (rounded / exact - 1),
            **{f"reserved over allocated at the peak, {row['what']}, %": row["at the peak"] for row in rows},
            **{f"the same, median of its moments, {row['what']}, %": row["median"] for row in rows},
            "measured on": measured_on(*keys) if rows else "no card yet",
        },
        "An engine that allocates weights and pool once reserves hardly more than it hands out; where memory grows and "
        "shrinks, such as a cache that is concatenated at each token, far more is reserved than the guides say. It "
        "turns for programs in between.",
        "measured on a card",
    )
