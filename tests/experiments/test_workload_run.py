"""One run on a virtual clock: arrival times, rows, progress, refusals, Cancel and faults, to the exact number."""

import pytest

from labkit.engine import Engine
from labkit.engine.simulation import VirtualExecutor, bare_plan, virtual_model
from labkit.experiments.run import RunOptions, WorkloadRun
from labkit.experiments.serialise import rows_from_plain
from labkit.specs.engine_config import EngineConfig
from labkit.specs.workload import RequestSpec, Workload

STEP_S, TOKEN_S = 0.001, 1e-5


class Bench:
    """An engine without a model on a clock that moves when it computes or sleeps."""

    def __init__(self, num_blocks=64, **knobs):
        defaults = {"block_size": 4, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}
        plan = bare_plan(virtual_model(), EngineConfig(**{**defaults, **knobs}), num_blocks)
        self.executor = VirtualExecutor(plan)
        self.engine = Engine(None, plan, executor=self.executor, clock=self.executor.clock)
        self.events = []
        self.cancel_at_s = float("inf")

    def sleep(self, seconds):
        assert 0 <= seconds <= 0.02
        self.executor.now_s += max(seconds, 1e-4)

    def serve(self, requests, **options):
        workload = Workload("w", tuple(requests))
        options = RunOptions(**{"report_every_s": 0.0, **options})
        run = WorkloadRun(
            self.engine, workload, lambda index: [1 + index] * requests[index].input_tokens, options,
            self.events.append, lambda: self.executor.now_s >= self.cancel_at_s, self.executor.clock, self.sleep,
        )  # fmt: skip
        outcome = run.serve()
        rows = {"requests": list(outcome.requests), "steps": list(outcome.steps)}
        for event in self.events:
            if event["type"] == "rows":
                rows["requests"] += rows_from_plain("request", event["requests"], "rows")
                rows["steps"] += rows_from_plain("step", event["steps"], "rows")
        return (
            outcome,
            sorted(rows["requests"], key=lambda row: row.request_id),
            sorted(rows["steps"], key=lambda row: row.start_s),
        )


def test_one_request_to_the_microsecond():
    outcome, (row,), steps = Bench().serve([RequestSpec(0.0, 8, 3)])
    first = STEP_S + 8 * TOKEN_S
    decode = STEP_S + TOKEN_S
    assert outcome.status == "finished"
    assert row.token_times_s == pytest.approx([first, first + decode, first + 2 * decode])
    assert row.first_token_s == pytest.approx(first)
    assert row.finish_s == pytest.approx(first + 2 * decode)
    assert (row.input_tokens, row.output_tokens, row.finish_reason) == (8, 3, "length")
    assert [(step.num_prefill_tokens, step.num_decode_tokens) for step in steps] == [(8, 0), (0, 1), (0, 1)]
    assert outcome.duration_s == pytest.approx(row.finish_s)


def test_requests_come_at_their_times_and_the_engine_sleeps_between():
    outcome, rows, steps = Bench().serve([RequestSpec(0.0, 4, 1), RequestSpec(1.0, 4, 1)])
    assert [row.arrival_s for row in rows] == [0.0, 1.0]
    assert steps[1].start_s >= 1.0
    assert rows[1].first_token_s == pytest.approx(1.0, abs=0.01)
    assert outcome.duration_s == pytest.approx(1.0, abs=0.01)


def test_arrival_scale_draws_the_requests_together():
    _, rows, _ = Bench().serve([RequestSpec(0.0, 4, 1), RequestSpec(1.0, 4, 1)], arrival_scale=0.5)
    assert rows[1].arrival_s == 0.5
    _, rows, steps = Bench().serve([RequestSpec(0.0, 4, 1), RequestSpec(1.0, 4, 1)], arrival_scale=0.0)
    assert [row.arrival_s for row in rows] == [0.0, 0.0]
    assert len(steps) == 1


def test_request_that_can_never_fit_is_refused_alone():
    _, rows, _ = Bench().serve([RequestSpec(0.0, 100, 5), RequestSpec(0.0, 4, 2)])
    assert rows[0].finish_reason.startswith("refused: ")
    assert "64" in rows[0].finish_reason
    assert rows[0].first_token_s is None
    assert (rows[1].finish_reason, rows[1].output_tokens) == ("length", 2)


def test_rows_come_exactly_once_and_carry_preemptions():
    bench = Bench(num_blocks=8, enable_prefix_caching=False)
    requests = [RequestSpec(0.0, 8, 12) for _ in range(4)]
    outcome, rows, steps = bench.serve(requests)
    assert [row.request_id for row in rows] == [0, 1, 2, 3]
    assert all(row.output_tokens == 12 == len(row.token_times_s) for row in rows)
    assert sum(row.num_preemptions for row in rows) == sum(step.num_preemptions for step in steps) > 0
    assert outcome.fullest_step.num_blocks_used == max(step.num_blocks_used for step in steps)
    assert len(outcome.block_map) == 8
    assert {owner for owner in outcome.block_map if owner >= 0} <= {0, 1, 2, 3}


def test_cancel_keeps_finished_and_begun_requests():
    bench = Bench()
    bench.cancel_at_s = 0.02
    outcome, rows, _ = bench.serve([RequestSpec(0.0, 4, 2), RequestSpec(0.0, 4, 50), RequestSpec(9.0, 4, 2)])
    assert outcome.status == "cancelled"
    assert [row.finish_reason for row in rows] == ["length", "cancelled"]
    assert 2 < rows[1].output_tokens < 50
    assert rows[1].finish_s is None
    assert not bench.engine.has_unfinished
    bench.engine.check()


def test_cancel_while_waiting_for_the_next_arrival():
    bench = Bench()
    bench.cancel_at_s = 0.5
    outcome, rows, _ = bench.serve([RequestSpec(100.0, 4, 2)])
    assert (outcome.status, rows) == ("cancelled", [])
    assert outcome.duration_s == pytest.approx(0.5, abs=0.05)


def test_error_in_a_step_gives_out_what_was_recorded():
    bench = Bench()

    def fail():
        if bench.executor.now_s > 0.005:
            raise MemoryError("no more")

    bench.executor.before_step = fail
    with pytest.raises(MemoryError):
        bench.serve([RequestSpec(0.0, 4, 50)], report_every_s=1e9)
    (event,) = [event for event in bench.events if event["type"] == "rows" and event["requests"]]
    (row,) = rows_from_plain("request", event["requests"], "rows")
    assert row.finish_reason == "failed"
    assert row.output_tokens == len(event["steps"]) > 0


def test_progress_counts_up_and_time_left_goes_down():
    bench = Bench()
    bench.serve([RequestSpec(0.0, 8, 20) for _ in range(8)])
    progress = [event for event in bench.events if event["type"] == "progress"]
    done = [event["done"] for event in progress]
    assert done == sorted(done)
    assert (progress[-1]["done"], progress[-1]["total"]) == (8, 8)
    assert progress[-1]["remaining_s"] == pytest.approx(0, abs=1e-9)
    half = progress[len(progress) // 2]
    assert half["remaining_s"] == pytest.approx(progress[-1]["elapsed_s"] - half["elapsed_s"], rel=0.5)


def test_step_events_carry_what_a_live_chart_needs():
    bench = Bench()
    bench.serve([RequestSpec(0.0, 8, 5) for _ in range(3)])
    steps = [event for event in bench.events if event["type"] == "step"]
    assert steps[-1]["num_output_tokens"] == 15
    assert {event["num_gpu_blocks"] for event in steps} == {64}
    assert max(event["num_running"] for event in steps) == 3
    total = sum(event["output_tokens_per_s"] * STEP_S for event in steps)
    assert total == pytest.approx(15, rel=0.3)


def test_reports_are_limited_in_number():
    bench = Bench()
    bench.serve([RequestSpec(0.0, 4, 50)], report_every_s=0.02)
    assert len([event for event in bench.events if event["type"] == "step"]) <= 4


def test_empty_workload_ends_at_once():
    outcome, rows, steps = Bench().serve([])
    assert (outcome.status, rows, steps, outcome.block_map) == ("finished", [], [], ())
