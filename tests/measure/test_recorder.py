"""What an engine reports step by step, as rows of a run: times from its start, nothing lost and nothing twice."""

from __future__ import annotations

import pytest

from labkit.engine.engine import RequestOutput, StepResult, TokenOutput
from labkit.measure.recorder import RunRecorder
from labkit.measure.run_record import RequestRow, StepRow

START_S = 1000.0


def step(at_s, *tokens_of, finished=(), blocks=3):
    """A step of half a second that gives one token to each of `tokens_of`."""
    outputs = tuple(TokenOutput(request_id, 7) for request_id in tokens_of)
    return StepResult(outputs, tuple(finished), START_S + at_s, 0.5, 12, 10, 2, 4, 5, blocks, 6, 40, 1, 8)


def ended(request_id, reason="length", times=(1001.5, 1002.0), finish_s=1002.0):
    first = times[0] if times else None
    return RequestOutput(request_id, (7,) * len(times), reason, 999.0, first, finish_s, 30, 16, 2, tuple(times))


@pytest.fixture
def recorder():
    recorder = RunRecorder(START_S)
    for request_id in (4, 5):
        recorder.offer(request_id, 0.25, 30)
    return recorder


def test_a_step_is_its_row_from_the_start_of_the_run(recorder):
    row = recorder.step(step(1.0, 4, 5))
    assert row == StepRow(1.0, 0.5, 12, 10, 2, 4, 5, 3, 6, 40, 1, 8)
    assert recorder.take_rows() == ((), (row,))
    assert recorder.take_rows() == ((), ())
    assert (recorder.num_steps, recorder.num_output_tokens, recorder.num_finished) == (1, 2, 0)


def test_a_finished_request_has_its_arrival_in_the_run_and_the_engines_times(recorder):
    recorder.step(step(1.0, 4))
    recorder.step(step(1.5, 4, finished=[ended(4)]))
    (row,), _ = recorder.take_rows()
    assert row == RequestRow(4, 0.25, 1.5, 2.0, 30, 2, 16, 2, "length", (1.5, 2.0))
    assert recorder.num_finished == 1


def test_a_request_that_ended_without_a_token_or_not_by_itself_has_no_such_time(recorder):
    recorder.step(step(1.0, finished=[ended(4, "cancelled", ()), ended(5, "cancelled")]))
    without, cut = recorder.take_rows()[0]
    assert (without.first_token_s, without.finish_s, without.output_tokens) == (None, None, 0)
    assert (cut.first_token_s, cut.finish_s, cut.output_tokens, cut.finish_reason) == (1.5, None, 2, "cancelled")


def test_what_the_engine_did_not_take_is_a_refused_row(recorder):
    recorder.refuse(4, "too long")
    (row,), _ = recorder.take_rows()
    assert row == RequestRow(4, 0.25, None, None, 30, 0, finish_reason="refused: too long")
    assert recorder.num_finished == 1


def test_a_run_that_breaks_off_keeps_the_tokens_that_were_given(recorder):
    """Each token stands at the end of its step."""
    recorder.step(step(1.0, 4))
    recorder.step(step(2.0, 4))
    recorder.close_open("failed")
    given, none = recorder.take_rows()[0]
    assert given == RequestRow(4, 0.25, 1.5, None, 30, 2, finish_reason="failed", token_times_s=(1.5, 2.5))
    assert (none.request_id, none.first_token_s, none.output_tokens) == (5, None, 0)
    recorder.close_open("failed")
    assert recorder.take_rows()[0] == ()


def test_a_request_that_nobody_offered_is_no_row(recorder):
    recorder.step(step(1.0, finished=[ended(9)]))
    assert recorder.take_rows()[0] == ()
    assert recorder.num_finished == 0


def test_the_fullest_step_is_the_first_of_the_highest_and_maps_are_few():
    """Asked for the owners of the blocks again only when a tenth more of them is used."""
    asked = []
    recorder = RunRecorder(START_S, lambda: (asked.append(1), (len(asked),))[1])
    for at_s, blocks in enumerate((10, 11, 12, 12, 5)):
        recorder.step(step(float(at_s), blocks=blocks))
    assert (recorder.fullest_step.start_s, recorder.fullest_step.num_blocks_used) == (2.0, 12)
    assert recorder.fullest_block_map == (2,)
