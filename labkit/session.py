"""`labkit.Session`: the laboratory in three lines of a notebook; the panel and the report on top of `LabSession`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from labkit.errors import StoreError
from labkit.experiments.grid_sweep import sweep
from labkit.experiments.lab_session import LabSession
from labkit.experiments.rescue import kept_elsewhere
from labkit.experiments.worker import OnEvent
from labkit.measure.run_record import RunRecord
from labkit.memory.records import MemoryPlan
from labkit.specs import name_of, preset, preset_traffic
from labkit.specs.engine_config import EngineConfig

if TYPE_CHECKING:
    from labkit.experiments.search import SearchResult
    from labkit.widgets.panel import Panel


class Session(LabSession):
    """A model, a card and a traffic, to plan, run and compare.

    ```
    traffic = labkit.load_workload("azure-2023-conv", limit=16, max_input_tokens=256, max_output_tokens=32)
    session = labkit.Session(model="SmolLM2-135M-Instruct", gpu="auto", workload=traffic)
    session.panel()
    ```

    Without the panel: `session.plan(block_size=32)`, `session.run(block_size=32)`, `session.sweep({"block_size": [8,
    16, 32]})`, `session.simulate_sweep(…)` for a card that is not here, `session.report()`; `plan`, `run`, `cancel` and
    `close` are those of `LabSession`.

    Args:
        model: catalogue name, hub id, folder, config.json or .gguf file, or a `ModelSpec`.
        gpu: catalogue name, "auto" (the card of this machine, or the CPU), "cpu", a card's .json file, or a `GpuSpec`.
        workload: name of a trace or a file, or a `Workload`; needed for runs.
        config: the knobs from which `plan` and `run` start.
        store: where runs are kept: a file or an SQLAlchemy URL; None for the user's own store.
        num_threads, memory_limit_bytes, runner: of the worker, see `LabSession`.

    Raises:
        LabkitError: something of these cannot be read; says what.
    """

    @classmethod
    def for_task(cls, task: str, model: str | Path, gpu: str = "auto", **settings: Any) -> Self:
        """A session with the flags and the traffic of a task; `labkit presets` lists them.

        Its goal is what a search takes: `task = labkit.specs.get_preset("chat")`, then
        `session.search(task.space, goal=task.goal, limits=task.limits)`.

        Args:
            settings: as for `Session`.

        Raises:
            UnknownNameError: no such task.
        """
        return cls(model, gpu, **{"workload": preset_traffic(task), "config": preset(task), **settings})

    def sweep(
        self, grid: Mapping[str, Sequence[Any]], *, on_event: OnEvent | None = None, **settings: Any
    ) -> tuple[RunRecord, ...]:
        """Run every combination of the grid's knobs; see `labkit.experiments.sweep`.

        Raises:
            UnknownNameError, OutOfRangeError: a knob or value that does not exist, before anything runs.
        """
        records, _ = sweep(self, grid, on_event=on_event, **settings)
        return records

    def simulate(
        self, config: EngineConfig | None = None, on_event: OnEvent | None = None, *, name: str = "", **changes: Any
    ) -> RunRecord:
        """Serve the traffic on a virtual card: the real scheduler and block pool, step times from a model.

        The record is kept as a run is, with origin "simulated". Arguments as for `run`; `cancel()` ends it as well.

        Raises:
            DoesNotFitError: the plan refuses the settings; says what would work.
            UnsupportedError: the session's card is a CPU.
            WorkerError: the session is running already, or has no traffic.
        """
        from labkit.experiments.session_simulate import simulate_session

        config = self._config(config, changes)
        with self._only_one():
            record = simulate_session(
                self, config, name=name or name_of(config, self.config), on_event=on_event or (lambda event: None),
                is_cancelled=lambda: self.is_cancelled,
            )  # fmt: skip
            self._keep(record)
        return record

    def simulate_sweep(
        self, grid: Mapping[str, Sequence[Any]], *, on_event: OnEvent | None = None
    ) -> tuple[RunRecord, ...]:
        """Serve the traffic on a virtual card under every combination of the grid's knobs, hundreds of them if need be.

        The records are kept as those of `simulate`; `cancel()` ends it, and what was done until then stays.

        Args:
            on_event: takes "progress" events, and a "log" event for each combination that does not fit.

        Raises:
            UnknownNameError, OutOfRangeError: a knob or value that does not exist, before anything runs.
            UnsupportedError, WorkerError, StoreError: as `simulate`.
        """
        from labkit.experiments.virtual_sweep import simulate_session_sweep

        found = []
        with self._only_one():
            for record in simulate_session_sweep(
                self, grid, on_event=on_event or (lambda event: None), is_cancelled=lambda: self.is_cancelled
            ):  # fmt: skip
                self._keep(record)
                found.append(record)
        return tuple(found)

    def _keep(self, record: RunRecord) -> None:
        self._records.append(record)
        try:
            self.store.save(record)
        except StoreError as refusal:
            raise kept_elsewhere(refusal, record) from refusal

    def recall(
        self, run_ids: str | Sequence[str] | None = None, *, limit: int = 10, on_event: OnEvent | None = None
    ) -> tuple[RunRecord, ...]:
        """Bring runs of the store into this session, as if they had been made in it.

        Args:
            run_ids: one or several; by default the newest `limit` of this model, on this card or on the machine that
                runs here.
            on_event: takes a "log" event for each run that is damaged and stays out; without it they are Python
                warnings.

        Returns:
            What came in, oldest first; empty where there is nothing more.

        Raises:
            StoreError: there is no such run, or the store cannot be read.
        """
        known = {record.run_id for record in self._records}
        if isinstance(run_ids, str):
            run_ids = [run_ids]
        if run_ids is None:
            cards = {self.gpu.name, *(() if self.runs_on_card else ("cpu",))}
            run_ids = [
                entry.run_id
                for entry in self.store.list_runs()
                if entry.record.model.name == self.model.name and entry.record.gpu.name in cards
                and entry.status != "running" and entry.run_id not in known
            ]  # fmt: skip
            direction = -1
        else:
            limit, direction = len(run_ids), 1
        tell = on_event or (lambda event: warnings.warn(event["message"], stacklevel=3))
        readable = self.store.get_readable(
            (one for one in run_ids if one not in known),
            lambda damage: tell({"type": "log", "level": "warning", "message": damage}),
        )
        # Runs of one second stay as they are given, those of the store from the oldest on.
        found = sorted([*islice(readable, limit)][::direction], key=lambda run: run.created)
        self._records[:0] = found
        return tuple(found)

    def search(self, space: Mapping[str, Sequence[Any]], **settings: Any) -> SearchResult:
        """Find the best settings in a few launches; see `labkit.experiments.session_search.search_session`.

        `session.search({"max_num_seqs": [32, 128, 512]}, limits={"ttft_p99_s": 2.0}, max_runs=8).sentence`

        Raises:
            UnsupportedError: the card is a CPU, or there is no traffic.
            UnknownNameError, OutOfRangeError: a knob, value, goal or limit that does not exist.
        """
        from labkit.experiments.session_search import search_session

        result, _ = search_session(self, space, **settings)
        return result

    def panel(self) -> Panel:
        """The panel: knobs, plan, runs and pictures, for the last line of a notebook's cell."""
        from labkit.widgets.panel import Panel

        return Panel(self)

    def report(
        self,
        path: str | Path | None = None,
        *,
        records: Sequence[RunRecord] | None = None,
        plans: Sequence[MemoryPlan] | None = None,
        created: str | None = None,
        **settings: Any,
    ) -> Path:
        """Write the report of this session's runs as one HTML file and return its path.

        Args:
            path: of the file; by default a name made of model, card and date in the current folder.
            records: runs to report instead of the session's.
            plans: plans to report; by default the session's, so that a report without a run shows the plan.
            created: date and time as the report shows them; by default now.
            settings: passed to `labkit.report.build_report`.

        Raises:
            FileFormatError: the file cannot be written.
        """
        from labkit.report import report_file_name, write_report

        created = created or datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        path = Path(path) if path else Path(report_file_name(self.model.name, self.gpu.name, created))
        records = self.records() if records is None else records
        plans = (self.plan(),) if plans is None else plans
        return write_report(path, records, plans, created=created, **settings)
