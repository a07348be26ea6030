"""`RunRecorder`: turns what the engine reports, step by step, into the rows of a `RunRecord`, while the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from labkit.engine.engine import RequestOutput, StepResult
from labkit.measure.run_record import RequestRow, StepRow


@dataclass(frozen=True)
class _Offered:
    arrival_s: float
    input_tokens: int


class RunRecorder:
    """Collects rows; all times become seconds from the start of the run.

    Args:
        start_s: start of the run on the engine's clock (monotonic: the wall clock may be set meanwhile).
        block_map: gives the owner of each block; asked only when the pool is fuller than ever before and rows are
            taken, so that it costs nothing in a step.
    """

    def __init__(self, start_s: float, block_map: Callable[[], tuple[int, ...]] | None = None) -> None:
        self.start_s = start_s
        self.fullest_step: StepRow | None = None
        self.fullest_block_map: tuple[int, ...] = ()
        self.num_steps = 0
        self.num_finished = 0
        self.num_output_tokens = 0
        self._block_map = block_map
        self._most_blocks_mapped = -1
        self._open: dict[int, _Offered] = {}
        self._token_times: dict[int, list[float]] = {}
        self._new_requests: list[RequestRow] = []
        self._new_steps: list[StepRow] = []

    def offer(self, request_id: int, arrival_s: float, input_tokens: int) -> None:
        """A request arrived, `arrival_s` after the start of the run."""
        self._open[request_id] = _Offered(arrival_s, input_tokens)

    def refuse(self, request_id: int, reason: str) -> None:
        """The engine did not take an offered request."""
        self._close(request_id, f"refused: {reason}")

    def step(self, result: StepResult) -> StepRow:
        """One step happened; returns its row."""
        row = StepRow(
            start_s=result.start_s - self.start_s,
            duration_s=result.duration_s,
            num_tokens=result.num_tokens,
            num_prefill_tokens=result.num_prefill_tokens,
            num_decode_tokens=result.num_decode_tokens,
            num_running=result.num_running,
            num_waiting=result.num_waiting,
            num_blocks_used=result.num_blocks_used,
            num_blocks_cached=result.num_blocks_cached,
            num_tokens_stored=result.num_tokens_stored,
            num_preemptions=result.num_preemptions,
            num_swapped_blocks=result.num_swapped_blocks,
        )
        now = row.start_s + row.duration_s
        for output in result.outputs:
            self._token_times.setdefault(output.request_id, []).append(now)
        for finished in result.finished:
            self._finish(finished)
        self.num_output_tokens += len(result.outputs)
        self.num_steps += 1
        self._new_steps.append(row)
        if self.fullest_step is None or row.num_blocks_used > self.fullest_step.num_blocks_used:
            self.fullest_step = row
        self._map_blocks(row)
        return row

    def take_rows(self) -> tuple[tuple[RequestRow, ...], tuple[StepRow, ...]]:
        """Rows since the last call: requests that ended, and steps."""
        requests, self._new_requests = tuple(self._new_requests), []
        steps, self._new_steps = tuple(self._new_steps), []
        return requests, steps

    def close_open(self, reason: str) -> None:
        """End every request that has not ended, for `reason`; what they gave so far is kept."""
        for request_id in list(self._open):
            self._close(request_id, reason)

    def _map_blocks(self, row: StepRow) -> None:
        # A tenth more than the last map keeps the number of maps small however slowly the pool fills.
        if self._block_map and row.num_blocks_used > 1.1 * self._most_blocks_mapped:
            self._most_blocks_mapped = row.num_blocks_used
            self.fullest_block_map = self._block_map()

    def _finish(self, output: RequestOutput) -> None:
        offered = self._open.pop(output.request_id, None)
        if offered is None:
            return
        self._token_times.pop(output.request_id, None)
        ended = output.finish_reason in ("length", "stop")
        self.num_finished += 1
        self._new_requests.append(
            RequestRow(
                request_id=output.request_id,
                arrival_s=offered.arrival_s,
                first_token_s=None if output.first_token_s is None else output.first_token_s - self.start_s,
                finish_s=output.finish_s - self.start_s if ended and output.finish_s is not None else None,
                input_tokens=output.input_tokens,
                output_tokens=len(output.token_ids),
                num_cached_tokens=output.num_cached_tokens,
                num_preemptions=output.num_preemptions,
                finish_reason=output.finish_reason,
                token_times_s=tuple(time_s - self.start_s for time_s in output.token_times_s),
            )
        )

    def _close(self, request_id: int, reason: str) -> None:
        offered = self._open.pop(request_id)
        times = tuple(self._token_times.pop(request_id, ()))
        self.num_finished += 1
        self._new_requests.append(
            RequestRow(
                request_id=request_id,
                arrival_s=offered.arrival_s,
                first_token_s=times[0] if times else None,
                finish_s=None,
                input_tokens=offered.input_tokens,
                output_tokens=len(times),
                finish_reason=reason,
                token_times_s=times,
            )
        )
