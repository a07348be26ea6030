"""`simulate`: a workload on a virtual GPU, as a `RunRecord` of origin "simulated"."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from labkit.engine.engine import RequestOutput, StepResult
from labkit.engine.launch_rules import labkit_rules, vllm_launch_rules
from labkit.engine.sampling_params import EngineRequest, SamplingParams
from labkit.engine.step_constants import StepConstants
from labkit.engine.step_cost import step_cost
from labkit.engine.step_time import StepTimeModel
from labkit.engine.virtual_gpu import Jump, VirtualEngine
from labkit.errors import DoesNotFitError, OutOfRangeError, UnsupportedError
from labkit.experiments.card_files import calibration_for, constants_for
from labkit.experiments.measured_memory import MeasuredMemory
from labkit.experiments.refusals import does_not_fit
from labkit.measure.run_record import RequestRow, RunRecord, StepRow, step_rows
from labkit.memory import plan as memory_plan
from labkit.memory.card_parts import padded_tokens, why_eager
from labkit.memory.records import MemoryPlan
from labkit.specs import prompt_token_ids
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import ModelSpec
from labkit.specs.workload import Workload

IsCancelled = Callable[[], bool]
_ASK_EVERY = 16
_METRICS = {"output_tokens_per_s": "output tokens per second", "itl_p99_s": "p99 between tokens"}


@dataclass(frozen=True)
class VirtualOptions:
    """How a workload is offered to a virtual engine.

    Attributes:
        arrival_scale: multiplies every arrival time; 0 offers all requests at once.
        has_server: requests come through HTTP and tokenizer, and asynchronous scheduling lets them wait for steps
            that are queued; False for the engine alone, as labkit's own runs are.
        seed: of the engine.
    """

    arrival_scale: float = 1.0
    has_server: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.arrival_scale <= 1e6:
            raise OutOfRangeError(f"arrival_scale cannot be {self.arrival_scale}", works="0 or more")


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No search for cycles meanwhile: a run makes none before it is dropped, and so many objects that looking through
    them takes a seventh of its time. What is dropped inside is found by the first search after it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_collector_paused()
def simulate(
    model: ModelSpec,
    gpu: GpuSpec,
    workload: Workload,
    config: EngineConfig | None = None,
    *,
    engine: str = "vllm",
    engine_version: str = "0.33.0",
    constants: StepConstants | None = None,
    memory: MeasuredMemory | None = None,
    options: VirtualOptions | None = None,
    is_cancelled: IsCancelled = lambda: False,
    run_id: str = "virtual",
    name: str = "",
    created: str = "",
) -> RunRecord:
    """Serve `workload` on a `gpu` that need not be there.

    Args:
        config: the knobs; None means all defaults of `engine`.
        engine: "vllm" for its rules of planning and scheduling, "labkit" for the lab's own.
        constants: of the step-time model; by default the best that is known of this model, card and engine here: from
            runs, from a microbenchmark (`labkit calibrate`), or those that come with labkit.
        memory: what runs of this machine say about the planner's parts, for the size of the pool; by default what the
            runs behind the default constants said.
        is_cancelled: asked now and then; what was served until then is kept.
        run_id, name, created: of the record.

    Returns:
        The record; `versions` holds the level of the constants and the interval that holds 90 % of measured times per
        output token, as factors. `status` is "failed" with `error` set when the plan refuses the configuration.

    Raises:
        UnsupportedError: the card has no data-sheet bandwidth and compute figures.
        OutOfRangeError: a configuration that the engine refuses.
    """
    if not gpu.mem_bandwidth_bytes_per_s or not (gpu.bf16_flops or gpu.fp16_flops):
        raise UnsupportedError(
            f"step times of {gpu.name} cannot be predicted: its bandwidth and compute are not known",
            works="a card of the catalogue (see `labkit gpus`)",
        )
    config = config or EngineConfig()
    if memory is None and constants is None:
        by_runs = calibration_for(gpu, model.name, engine=engine, engine_version=engine_version)
        memory = None if by_runs is None else by_runs.memory
    plan = memory_plan(model, gpu, config, engine=engine, engine_version=engine_version)
    if memory is not None:
        known = memory.calibration()
        plan = memory_plan(model, gpu, config, engine=engine, engine_version=engine_version, calibration=known)
    constants = constants or constants_for(
        gpu, model.name, engine=engine, engine_version=engine_version, is_moe=model.moe is not None
    )
    options = options or VirtualOptions(has_server=engine == "vllm")
    record = _new_record(plan, config, workload, constants, options, run_id, name, created)
    try:
        run = VirtualRun(virtual_engine(plan, constants, options.seed), workload, options, constants, is_cancelled)
    except DoesNotFitError as error:
        return _with(record, status="failed", error=str(error))
    return _with(record, **run.serve())


def virtual_engine(plan: MemoryPlan, constants: StepConstants, seed: int = 0) -> VirtualEngine:
    """An engine for `plan` whose steps take what the constants say.

    Raises:
        DoesNotFitError: the plan has no block, or cannot hold one request of max_model_len.
    """
    if plan.verdict == "does not fit":
        raise does_not_fit(plan)
    return VirtualEngine(plan, step_time_model(plan, constants), seed=seed)


def step_time_model(plan: MemoryPlan, constants: StepConstants) -> StepTimeModel:
    """How long steps take under `plan`, launched as its engine launches them."""
    config = plan.config
    captures = not why_eager(plan.model, plan.gpu, config)
    padded = padded_tokens(plan.model, plan.gpu, config) if plan.engine != "vllm" else 0
    rules = partial(labkit_rules, config, captures=captures, padded_tokens=padded)
    launch = vllm_launch_rules(config) if plan.engine == "vllm" else rules()
    model = StepTimeModel(step_cost(plan.model, config), plan.gpu, constants, launch)
    if plan.engine == "vllm":
        return model
    is_captured = plan.details.get("captures_largest")
    if is_captured is None:
        is_captured = model.waits_for_host(int(config.max_num_batched_tokens or 1))
    if not is_captured:
        return model
    return replace(model, launch=rules(largest=True))


class VirtualRun:
    """Serves a workload on a virtual engine; the arguments are those of `simulate`."""

    def __init__(
        self,
        engine: VirtualEngine,
        workload: Workload,
        options: VirtualOptions,
        constants: StepConstants,
        is_cancelled: IsCancelled,
    ) -> None:
        self._engine = engine
        self._workload = workload
        self._is_cancelled = is_cancelled
        self._delay_s = constants.first_token_s if options.has_server else 0.0
        self._queued_steps = max(0, round(constants.lag_steps) - 1) if options.has_server else 0
        self._admission_s = 0.0 if options.has_server else constants.admission_s
        self._arrivals = [request.arrival_s * options.arrival_scale for request in workload.requests]
        self._next = 0
        self._steps_seen = 0
        self._offer_at_step = -1
        self._requests: list[RequestRow] = []
        self._steps: list[StepRow] = []
        self._block_map: tuple[int, ...] = ()
        self._most_mapped = 0.0

    def serve(self) -> dict[str, object]:
        """Run to the end, or until cancelled; the fields of the record that this decides."""
        engine, turns = self._engine, 0
        status = "finished"
        while self._next < len(self._arrivals) or engine.has_unfinished:
            turns += 1
            if turns % _ASK_EVERY == 0 and self._is_cancelled():
                status = "cancelled"
                self._cancel()
                break
            self._offer_arrived()
            if not engine.has_unfinished:
                if self._next < len(self._arrivals):
                    engine.gpu.now_s = max(engine.gpu.now_s, self._ready_s())
                continue
            self._advance()
        self._requests.sort(key=lambda row: row.request_id)
        return {
            "status": status, "requests": tuple(self._requests), "steps": tuple(self._steps),
            "duration_s": engine.gpu.now_s, "block_map": self._block_map,
        }  # fmt: skip

    def _ready_s(self) -> float:
        """When the next request is through HTTP and tokenizer."""
        return self._arrivals[self._next] + self._delay_s if self._next < len(self._arrivals) else math.inf

    def _offer_arrived(self) -> None:
        engine = self._engine
        while self._next < len(self._arrivals) and self._ready_s() <= engine.gpu.now_s:
            if self._queued_steps and engine.has_unfinished:
                if self._offer_at_step < 0:
                    self._offer_at_step = self._steps_seen + self._queued_steps
                if self._steps_seen < self._offer_at_step:
                    return
            self._offer(self._next)
            self._next += 1
        self._offer_at_step = -1

    def _offer(self, index: int) -> None:
        request = self._workload.requests[index]
        self._engine.gpu.now_s += self._admission_s
        prompt = stand_in_prompt(self._workload, index, self._engine.plan.model.vocab_size)
        sampling = _sampling(max(1, request.output_tokens))
        try:
            self._engine.add_request(EngineRequest(index, prompt, sampling, self._arrivals[index]))
        except (DoesNotFitError, OutOfRangeError) as error:
            arrival_s, reason = self._arrivals[index], f"refused: {error}"
            self._requests.append(
                RequestRow(index, arrival_s, None, None, request.input_tokens, 0, finish_reason=reason)
            )

    def _advance(self) -> None:
        waits = self._offer_at_step >= 0
        ready_s = self._ready_s()
        jump = None if waits else self._engine.jump(ready_s, self._queued_steps)
        if jump is None:
            result = self._engine.step()
            self._steps_seen += 1
            if result.num_tokens:
                self._steps.append(step_row(result))
            self._requests += [request_row(output) for output in result.finished]
            self._map_blocks(result.num_blocks_used)
            return
        self._steps_seen += len(jump.start_s)
        if self._engine.gpu.now_s >= ready_s:
            # The request was ready when the first of these steps ended.
            late = int((jump.start_s + jump.duration_s >= ready_s).sum()) - 1
            self._offer_at_step = self._steps_seen - late + self._queued_steps
        self._steps += jump_rows(jump)
        self._requests += [request_row(output) for output in jump.finished]
        self._map_blocks(int(jump.num_blocks_used.max()))

    def _map_blocks(self, num_used: int) -> None:
        # Half as much again as the last map keeps the number of maps small however slowly the pool fills.
        if num_used > 1.5 * self._most_mapped:
            self._most_mapped = float(num_used)
            self._block_map = self._engine.block_map()

    def _cancel(self) -> None:
        for index in range(self._next):
            self._engine.abort(index)
        if self._engine.has_unfinished:
            self._requests += [request_row(output) for output in self._engine.step().finished]


@lru_cache(maxsize=4096)
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def stand_in_prompt(workload: Workload, index: int, vocab_size: int) -> tuple[int, ...]:
    """Token ids that share with other requests exactly the prefixes that the workload says; where it says none, a
    prompt that only differs from all others, as nobody reads it."""
    request = workload.requests[index]
    if request.prefix_blocks:
        return tuple(prompt_token_ids(workload, index, vocab_size=vocab_size))
    first, rest = divmod(index, vocab_size)
    return ((first % vocab_size,) + (rest,) * (request.input_tokens - 1)) if request.input_tokens else ()


def step_row(result: StepResult) -> StepRow:
    """One step of an engine as a row."""
    return StepRow(
        result.start_s, result.duration_s, result.num_tokens, result.num_prefill_tokens, result.num_decode_tokens,
        result.num_running, result.num_waiting, result.num_blocks_used, result.num_blocks_cached,
        result.num_tokens_stored, result.num_preemptions, result.num_swapped_blocks,
    )  # fmt: skip


def jump_rows(jump: Jump) -> list[StepRow]:
    """The rows of the steps of a jump."""
    num_steps = len(jump.start_s)
    tokens, none = [jump.num_decode_tokens] * num_steps, [0] * num_steps
    return step_rows(
        jump.start_s.tolist(), jump.duration_s.tolist(), tokens, none, tokens, jump.num_running.tolist(),
        [jump.num_waiting] * num_steps, jump.num_blocks_used.tolist(), jump.num_blocks_cached.tolist(),
        jump.num_tokens_stored.tolist(), none, none,
    )  # fmt: skip


def request_row(output: RequestOutput) -> RequestRow:
    """A finished request as a row."""
    ended = output.finish_reason.startswith(("length", "stop"))
    return RequestRow(
        output.request_id, output.arrival_s, output.first_token_s, output.finish_s if ended else None,
        output.input_tokens, len(output.token_ids), output.num_cached_tokens, output.num_preemptions,
        output.finish_reason, output.token_times_s,
    )  # fmt: skip


def interval_words(constants: StepConstants) -> str:
    """Between which factors on what is shown nine in ten measured runs lie."""
    known = [("time per output token", constants.interval_low, constants.interval_high)]
    known += [(_METRICS[name], low, high) for name, low, high in constants.metric_intervals if name in _METRICS]
    parts = [f"{low:.2f} to {high:.2f} times the {words}" for words, low, high in known]
    return f"Nine in ten measured runs had {', '.join(parts)} that is predicted."


def _new_record(
    plan: MemoryPlan,
    config: EngineConfig,
    workload: Workload,
    constants: StepConstants,
    options: VirtualOptions,
    run_id: str,
    name: str,
    created: str,
) -> RunRecord:
    low, high = constants.interval_low, constants.interval_high
    return RunRecord(
        run_id=run_id, name=name or f"{plan.model.name} on a virtual {plan.gpu.name}", created=created,
        status="running", config=config, model=plan.model, gpu=plan.gpu, plan=plan, seed=options.seed,
        workload={
            "name": workload.name, "source": workload.source, "licence": workload.licence,
            "steps": tuple(workload.steps), "seed": workload.seed, "num_requests": len(workload.requests),
            "arrival_scale": options.arrival_scale,
        },
        versions={
            plan.engine: plan.engine_version, "step-time constants": constants.level,
            "time per token, interval": f"{low:.3g} to {high:.3g}",
        },
        origin="simulated",
        note=f"Simulated with {constants.level} constants. {interval_words(constants)}",
    )  # fmt: skip


def _with(record: RunRecord, **changes: object) -> RunRecord:
    return replace(record, **changes)  # type: ignore[arg-type]
