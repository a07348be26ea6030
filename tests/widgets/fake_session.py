"""A session without engine: plans by the samples' arithmetic, "runs" by sending their steps with real pauses."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from labkit.errors import LabkitError
from labkit.specs.engine_config import EngineConfig
from tests.figures import samples


def step_event(step, plan) -> dict:
    """`step` as the engine's run tells it."""
    return {"type": "step", "time_s": step.start_s + step.duration_s, "num_running": step.num_running,
            "output_tokens_per_s": step.num_decode_tokens / step.duration_s, "num_waiting": step.num_waiting,
            "num_blocks_used": step.num_blocks_used, "num_gpu_blocks": plan.num_gpu_blocks}  # fmt: skip


class FakeSession:
    """Has all that the panel asks of a session; `fail` is raised in the middle of the next run."""

    def __init__(self, *, gpu=None, model=None, records=(), pause_s: float = 0.0, num_steps: int = 40) -> None:
        self.model, self.gpu = model or samples.sample_model(), gpu or samples.sample_gpu(1.0, "cpu")
        self.workload = SimpleNamespace(name="azure-conv")
        self.fail: BaseException | None = None
        self.plan_error: LabkitError | None = None
        self.plan_calls = 0
        self._records = list(records)
        self._pause_s, self._num_steps = pause_s, num_steps
        self._cancel = threading.Event()

    def plan(self, config: EngineConfig):
        self.plan_calls += 1
        if self.plan_error is not None:
            raise self.plan_error
        return samples.sample_plan(config, gpu=self.gpu, model=self.model)

    def records(self):
        return tuple(self._records)

    def run(self, config: EngineConfig, on_event):
        self._cancel.clear()
        plan = self.plan(config)
        on_event({"type": "progress", "phase": "load", "done": 0, "total": 1, "unit": "", "remaining_s": None})
        done = []
        for index, step in enumerate(samples.sample_steps(self._num_steps, plan)):
            if self._cancel.wait(self._pause_s):
                break
            if self.fail is not None and index == self._num_steps // 2:
                raise self.fail
            done.append(step)
            on_event(step_event(step, plan))
            on_event({"type": "progress", "phase": "run", "done": index, "total": self._num_steps, "unit": "requests",
                      "remaining_s": (self._num_steps - index) * self._pause_s})  # fmt: skip
        number = len(self._records) + 1
        status = "cancelled" if self._cancel.is_set() else "finished"
        record = samples.sample_record(config, run_id=f"fake-{number}", name=f"fake {number}", status=status,
                                       gpu=self.gpu, steps=tuple(done))  # fmt: skip
        self._records.append(record)
        return record

    def cancel(self) -> None:
        self._cancel.set()
