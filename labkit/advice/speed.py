"""What a configuration gives on a traffic before it runs: rate and p99 from the virtual GPU, scaled to a run if any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from labkit.errors import LabkitError
from labkit.experiments.virtual_run import VirtualOptions, simulate
from labkit.measure.run_record import RunRecord
from labkit.measure.summary import RunSummary, summarize
from labkit.memory.records import MemoryPlan
from labkit.specs.workload import RequestSpec, Workload

# Enough to fill a card's KV cache with today's models, few enough for a dozen proposals in some seconds.
MAX_REQUESTS = 128


@dataclass(frozen=True)
class Speed:
    """Rate and latency of a configuration on a traffic.

    Attributes:
        rate: output tokens per second (`unit` "tok/s"), or requests where each gives one token ("req/s"), when all
            requests wait: more than that the configuration cannot give, so a gain of it is an upper bound.
        ttft_p99_s, inter_token_p99_s: at the traffic's own arrivals; None where there is no such time.
        basis: "simulated", "simulated on 128 requests" of a longer traffic, either followed by ", scaled to a run".
        record: of the traffic at its own arrivals.
    """

    rate: float
    unit: str
    ttft_p99_s: float | None
    inter_token_p99_s: float | None
    basis: str
    record: RunRecord


SpeedOf = Callable[[MemoryPlan], Speed | None]


def can_simulate(plan: MemoryPlan) -> bool:
    """Whether the step-time model knows the plan's card and the plan has blocks."""
    gpu = plan.gpu
    known = bool(gpu.mem_bandwidth_bytes_per_s and (gpu.bf16_flops or gpu.fp16_flops))
    return known and not gpu.is_cpu and plan.verdict != "does not fit" and plan.engine in ("vllm", "labkit")


@dataclass(frozen=True)
class Scale:
    """Measured over simulated, of a run on the same card: of the rate, and of the time between tokens."""

    rate: float = 1.0
    between: float = 1.0


def speed_of(plan: MemoryPlan, traffic: Workload, scale: Scale | None = None) -> Speed | None:
    """The speed of `plan`'s configuration on the first requests of `traffic`.

    Args:
        scale: of `scale_of`, to correct what is simulated by what ran.

    Returns:
        None where the card's figures are not known or the plan does not fit.
    """
    if not can_simulate(plan) or not traffic.requests:
        return None
    is_cut = len(traffic.requests) > MAX_REQUESTS
    basis = f"simulated on {MAX_REQUESTS} requests" if is_cut else "simulated"
    traffic = traffic.with_requests(traffic.requests[:MAX_REQUESTS], f"first {MAX_REQUESTS} requests")
    has_server = plan.engine == "vllm"
    record = _served(plan, traffic, 1.0, has_server)
    is_full = not has_server and all(request.arrival_s == 0 for request in traffic.requests)
    # The server's own delay ends before the last request does: it is no part of what the engine can give at most.
    full = record if is_full else _served(plan, traffic, 0.0, False)
    if record is None or full is None:
        return None
    load, most = summarize(record), summarize(full)
    per_request = all(request.output_tokens <= 1 for request in traffic.requests)
    rate = most.requests_per_s if per_request else most.output_tokens_per_s
    factor = scale or Scale()
    return Speed(
        factor.rate * (rate or 0.0),
        "req/s" if per_request else "tok/s",
        factor.between * load.ttft_s.p99 if load.ttft_s else None,
        factor.between * load.inter_token_s.p99 if load.inter_token_s else None,
        basis if scale is None else f"{basis}, scaled to a run",
        record,
    )


def _served(plan: MemoryPlan, traffic: Workload, arrival_scale: float, has_server: bool) -> RunRecord | None:
    options = VirtualOptions(arrival_scale=arrival_scale, has_server=has_server)
    try:
        record = simulate(plan.model, plan.gpu, traffic, plan.config, engine=plan.engine,
                          engine_version=plan.engine_version, options=options)  # fmt: skip
    except LabkitError:
        return None
    return record if record.status == "finished" else None


def scale_of(run: RunRecord) -> Scale | None:
    """How far a measured run was from its own simulation; None where it cannot be simulated or gave too little."""
    requests = tuple(RequestSpec(row.arrival_s, row.input_tokens, row.output_tokens) for row in run.requests)
    if run.origin != "measured" or not can_simulate(run.plan) or not requests:
        return None
    again = _served(run.plan, Workload("as in the run", requests), 1.0, run.plan.engine == "vllm")
    if again is None:
        return None
    got, expected = summarize(run), summarize(again)
    rate = _ratio(got.output_tokens_per_s, expected.output_tokens_per_s)
    between = _ratio(_between(got), _between(expected))
    return Scale(rate, between) if rate and between else None


def _between(summary: RunSummary) -> float | None:
    return summary.inter_token_s.p50 if summary.inter_token_s else None


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None
