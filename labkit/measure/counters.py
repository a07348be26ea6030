"""`with counters() as c:`: counters of what runs inside, by the first method that works here.

Methods in order: CUPTI's range profiler in this process, ncu over a command that replays the same launches, the
simulation. The result names its method, and `notes` says in one line each why the better ones did not count.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from labkit.errors import LabkitError, UnsupportedError
from labkit.measure.cupti import CountersUnavailable, RangeProfiler, check_permission
from labkit.measure.ncu import NcuKernel, run_ncu
from labkit.measure.run_record import Counters
from labkit.text import plain

READ_SECTORS = "lts__t_sectors_srcunit_tex_op_read.sum"
READ_MISSES = "lts__t_sectors_srcunit_tex_op_read_lookup_miss.sum"
# What the SMs receive: counted in one pass with the misses, but of each SM, so that reads that meet count as hits.
SM_READ_SECTORS = "l1tex__m_xbar2l1tex_read_sectors.sum"
DRAM_READ, DRAM_WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
TIME = "gpu__time_duration.sum"
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
# An H200 counts reads and hits in different passes, and how many reads arrive differs from pass to pass: two passes may
# give rates above 1 (NVIDIA forum 120341). Misses hardly differ, so hits are reads less misses.
CORE_METRICS = (READ_SECTORS, READ_MISSES, DRAM_READ, TIME)
OTHER_METRICS = (DRAM_WRITE, OCCUPANCY, TENSOR)
METRICS = (*CORE_METRICS, *OTHER_METRICS)
SECTOR_BYTES = 32
# Where repeats cannot be ranges of the same passes, each costs passes of its own.
MOST_SINGLE_REPEATS = 2
# The first execution after the counters were set up runs up to twice as long as those after it, and its reads meet more
# or less often: 34 % hits of a launch that gave 38 to 43 % in the next nine.
WARM_UP_RANGES = 1


@dataclass(frozen=True)
class Replay:
    """A command that launches the same kernels again, for ncu.

    Attributes:
        command: program and arguments.
        kernel: ncu's filter of kernel names; None is every kernel.
        warm_ups: profiled launches that do not count; the values are means over the others.
        card_uuid: NVML's identity of the card to launch on; None is the first that CUDA shows.
    """

    command: tuple[str, ...]
    kernel: str | None = None
    warm_ups: int = 1
    card_uuid: str | None = None


@dataclass(frozen=True)
class Counted:
    """What was counted.

    Attributes:
        counters: hit rate, DRAM bytes and time with their method; None where no method was left.
        values: every metric by its NVIDIA name, times in seconds and shares of 1; empty when simulated.
        notes: why each better method did not count, one line each, with the cure.
    """

    counters: Counters | None = None
    values: Mapping[str, float] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    notes: tuple[str, ...] = ()


def to_counters(values: Mapping[str, float], method: str, card: str) -> Counters:
    """`Counters` from the four core metrics, in bytes and seconds; reads may be those that the SMs received.

    Raises:
        CountersUnavailable: a metric is missing or a sum is impossible.
    """
    core = _with_sm_reads(CORE_METRICS) if READ_SECTORS not in values and SM_READ_SECTORS in values else CORE_METRICS
    missing = [name for name in core if name not in values]
    if missing:
        raise CountersUnavailable(f"{method} gave no {missing[0]}", works="the next method")
    reads, misses, dram_bytes, time_s = (values[name] for name in core)
    if not (0 <= misses <= reads * 1.02 and dram_bytes >= 0 and time_s > 0):
        raise CountersUnavailable(
            f"{method} counted {misses:,.0f} misses of {reads:,.0f} reads in {time_s:g} s, which cannot be",
            works="50 µs of work on the card at least, with nothing beside it",
        )
    return Counters(
        method, card, max(0.0, 1 - misses / reads) if reads else 0.0, dram_bytes, dram_bytes / time_s, time_s,
        l2_read_bytes=reads * SECTOR_BYTES, dram_write_bytes=values.get(DRAM_WRITE),
        warps_active_share=values.get(OCCUPANCY), tensor_active_share=values.get(TENSOR),
    )  # fmt: skip


def count_replay(
    replay: Replay, metrics: Sequence[str], run_replay: Callable[..., tuple[NcuKernel, ...]] = run_ncu
) -> Mapping[str, float]:
    """Means over the launches of `replay` that count, from ncu; metrics that one of them lacks are left out.

    Raises:
        CountersUnavailable: no launch was profiled, or as `run_ncu`.
    """
    launches = run_replay(replay.command, metrics, kernel=replay.kernel, card_uuid=replay.card_uuid)
    launches = launches[replay.warm_ups :]
    if not launches:
        raise CountersUnavailable("ncu: no launch was profiled", works="a command that launches the kernel")
    return mean_metrics(launches)


def mean_metrics(launches: Sequence[NcuKernel]) -> Mapping[str, float]:
    """Means over launches of one kernel; metrics that one of them lacks are left out."""
    names = [name for name in launches[0].metrics if all(name in launch.metrics for launch in launches)]
    return MappingProxyType({name: statistics.fmean(launch.metrics[name] for launch in launches) for name in names})


class CounterScope:
    """Counts what runs in its `with` block, or one call; see `counters`."""

    def __init__(
        self, metrics: Sequence[str], *, card: str, simulated: Callable[[], Counters] | None, replay: Replay | None,
        synchronize: Callable[[], object] | None, open_profiler: Callable[..., Any],
        run_replay: Callable[..., tuple[NcuKernel, ...]],
    ) -> None:  # fmt: skip
        self.result = Counted()
        self._metrics, self._card = tuple(metrics), card
        self._simulated, self._replay = simulated, replay
        self._synchronize = synchronize or _synchronize
        self._open_profiler, self._run_replay = open_profiler, run_replay
        self._profiler: Any = None
        self._notes: list[str] = []

    def __enter__(self) -> CounterScope:
        try:
            self._profiler = self._open()
            self._profiler.configure_once()
            self._synchronize()
            self._profiler.begin()
        except LabkitError as error:
            self._give_up("CUPTI", error)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        values: Mapping[str, float] | None = None
        if self._profiler is not None:
            try:
                self._synchronize()
                self._profiler.end()
                if kind is None:
                    values = self._profiler.read()
            except LabkitError as error:
                self._notes.append(f"CUPTI: {error}")
            finally:
                self._close()
        if kind is None:
            self._finish(values)

    def count(
        self, call: Callable[[], object], before: Callable[[], object] = lambda: None, repeats: int = 1
    ) -> Counted:
        """Counts `call`, which runs again for every pass; `before` runs outside the range each time.

        The core metrics are counted by themselves, so that they come from the same pass where the card can.

        Args:
            repeats: how often to count; the values are means.
        """
        values: dict[str, float] | None = None
        try:
            values = self._means(self._core(), call, before, repeats)
        except LabkitError as error:
            self._notes.append(f"CUPTI: {error}")
        others = tuple(name for name in self._metrics if name not in CORE_METRICS)
        if values and others:
            try:
                values |= self._means(others, call, before, 1)
            except LabkitError as error:
                self._notes.append(f"CUPTI: only the core metrics; {error}")
        self._finish(values)
        return self.result

    def _means(
        self, metrics: tuple[str, ...], call: Callable[[], object], before: Callable[[], object], repeats: int
    ) -> dict[str, float]:
        check_permission()
        try:
            runs = self._runs(metrics, call, before, repeats, WARM_UP_RANGES)
        except CountersUnavailable:
            again = range(min(repeats, MOST_SINGLE_REPEATS))
            runs = [run for _ in again for run in self._runs(metrics, call, before, 1, 0)]
        return {name: statistics.fmean(run[name] for run in runs) for name in metrics}

    def _runs(
        self, metrics: tuple[str, ...], call: Callable[[], object], before: Callable[[], object], count: int,
        warm_ups: int,
    ) -> Sequence[Mapping[str, float]]:  # fmt: skip
        """`count` executions as ranges of the same passes, after `warm_ups` that do not count.

        Raises:
            CountersUnavailable: as the profiler, or the executions are not alike, as they are of one call.
        """
        self._profiler = self._open_profiler(metrics, max_ranges=count + warm_ups)
        try:
            runs = self._profiler.run(call, self._synchronize, before)[warm_ups:]
        finally:
            self._close()
        first = [run[metrics[0]] for run in runs]
        if min(first) < max(first) / 2:
            raise CountersUnavailable(f"the same call gave {min(first):g} and {max(first):g} of {metrics[0]}")
        return runs

    def _open(self) -> Any:
        """A profiler of all metrics where one pass holds them, else of the core ones; where the L2's own reads need a
        second pass, of the reads that the SMs receive.

        Raises:
            CountersUnavailable: as the profiler, or one pass holds none of these.
        """
        check_permission()
        core, notes = self._core(), ""
        for metrics in dict.fromkeys((self._metrics, core, _with_sm_reads(self._metrics), _with_sm_reads(core))):
            try:
                profiler = self._open_profiler(metrics)
            except CountersUnavailable as error:
                if "INVALID_METRIC" not in str(error):
                    raise
                notes = notes or str(error)
                continue
            if profiler.num_passes == 1:
                self._notes += _left_out(self._metrics, metrics, notes)
                return profiler
            profiler.close()
            notes = notes or f"all {len(metrics)} need {profiler.num_passes} passes"
        raise CountersUnavailable(notes, works="fewer metrics, or a call that can be repeated")

    def _core(self) -> tuple[str, ...]:
        return tuple(name for name in self._metrics if name in CORE_METRICS)

    def _give_up(self, method: str, error: Exception) -> None:
        self._notes.append(f"{method}: {error}")
        self._close()

    def _close(self) -> None:
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None

    def _finish(self, values: Mapping[str, float] | None) -> None:
        """The result by the first method that has one."""
        for method in (lambda: self._measured(values), self._replayed, self._model):
            try:
                found = method()
            except LabkitError as error:
                self._notes.append(plain(error, 400))
                continue
            if found is not None:
                self.result = dataclasses.replace(found, notes=tuple(self._notes))
                return
        self.result = Counted(notes=tuple(self._notes))

    def _measured(self, values: Mapping[str, float] | None) -> Counted | None:
        if values is None:
            return None
        scaled = {name: value * _cupti_unit(name) for name, value in values.items()}
        return Counted(to_counters(scaled, "measured (CUPTI range profiler)", self._card), MappingProxyType(scaled))

    def _replayed(self) -> Counted | None:
        if self._replay is None:
            return None
        values = count_replay(self._replay, self._metrics, self._run_replay)
        return Counted(to_counters(values, "measured (ncu on a replay)", self._card), values)

    def _model(self) -> Counted | None:
        return None if self._simulated is None else Counted(self._simulated())


def counters(
    metrics: Sequence[str] = METRICS,
    *,
    card: str = "",
    simulated: Callable[[], Counters] | None = None,
    replay: Replay | None = None,
    synchronize: Callable[[], object] | None = None,
    open_profiler: Callable[..., Any] = RangeProfiler,
    run_replay: Callable[..., tuple[NcuKernel, ...]] = run_ncu,
) -> CounterScope:
    """Counts what runs in the `with` block once (or, with `.count(call)`, a call that may be repeated), on the card of
    the thread's current CUDA context.

    The block always runs, counted or not. Afterwards `.result` is a `Counted`.

    Args:
        metrics: NVIDIA's names; the core ones alone where a card cannot collect all in one pass.
        card: its name, for the record.
        simulated: gives simulated counters of the same work, the last method.
        replay: a command for ncu, the second method.
        synchronize: waits for the card; None takes torch's.
        open_profiler, run_replay: the measuring methods, for tests.
    """
    return CounterScope(
        metrics, card=card, simulated=simulated, replay=replay, synchronize=synchronize, open_profiler=open_profiler,
        run_replay=run_replay,
    )  # fmt: skip


def _with_sm_reads(metrics: Sequence[str]) -> tuple[str, ...]:
    return tuple(SM_READ_SECTORS if name == READ_SECTORS else name for name in metrics)


def _left_out(asked: Sequence[str], counted: Sequence[str], why: str) -> list[str]:
    """Notes on what a block that runs once does not tell, and why."""
    notes = [] if len(counted) == len(asked) else [f"CUPTI: only the core metrics; {why}"]
    if SM_READ_SECTORS in counted:
        notes.append(f"CUPTI: reads are those that the SMs received, so that reads that met count as hits; {why}")
    return notes


def _cupti_unit(name: str) -> float:
    """CUPTI gives times in nanoseconds and shares in percent."""
    return 1e-9 if name.startswith("gpu__time_duration") else 1e-2 if ".pct" in name else 1.0


def _synchronize() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("no NVIDIA card here has anything to count", works="the simulation, or a card")
    torch.cuda.synchronize()
