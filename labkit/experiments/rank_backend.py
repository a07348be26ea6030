"""`RankBackend`: a rank above 0 of a model that several processes share, inside a worker process of rank 0."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

from labkit.experiments.backend import Emit, IsCancelled
from labkit.experiments.frames import FrameReader
from labkit.experiments.serialise import from_plain
from labkit.memory.records import MemoryPlan
from labkit.specs.model_spec import ModelSpec

RANK_BACKEND = "labkit.experiments.rank_backend:RankBackend"
_SET_PARENT_DEATH_SIGNAL = 1
_CHUNK_BYTES = 1 << 18


class RankBackend:
    """Holds its share of the weights, and computes the steps that come through a socket of their own.

    Commands come from `RankGroup`, on every rank in the same order.
    """

    def __init__(self) -> None:
        import torch

        _die_with_parent()
        torch.set_num_threads(threads_of_environment())
        self._ranks: Any = None
        self._decoder: Any = None
        self._executor: Any = None
        self._steps: socket.socket | None = None

    def load(self, arguments: dict[str, Any], emit: Emit, is_cancelled: IsCancelled) -> dict[str, Any]:
        """Meet the other ranks, the first time, and read this rank's part of the weights."""
        from labkit.models import load_model_weights

        self._drop()
        self._decoder = None
        emit({"type": "ready"})
        if self._ranks is None:
            self._steps = socket.socket(fileno=arguments["steps"])
            self._ranks = connect(arguments)
        self._decoder = load_model_weights(
            from_plain(ModelSpec, arguments["model"]),
            arguments["source"] or None,
            arguments["dtype"],
            arguments["load_format"],
            device=rank_device(arguments["device"], arguments["rank"]),
            ranks=self._ranks,
            **arguments["settings"],
        )
        return {}

    def configure(self, arguments: dict[str, Any], emit: Emit, is_cancelled: IsCancelled) -> dict[str, Any]:
        """Make, change or give up the executor, as `arguments["how"]` says; see `OtherRanks.configure`."""
        if arguments["how"] == "drop":
            self._drop()
            return {}
        plan = from_plain(MemoryPlan, arguments["plan"])
        try:
            if arguments["how"] == "change" and self._executor is not None:
                self._executor.reconfigure(plan)
            else:
                self._drop()
                self._executor = make_executor(self._decoder, plan)
        except BaseException:
            self._drop()
            raise
        return {}

    def run(self, arguments: dict[str, Any], emit: Emit, is_cancelled: IsCancelled) -> dict[str, Any]:
        """Compute steps until told to stop."""
        from labkit.engine.tensor_parallel import StepReader

        reader, pending = StepReader(), None
        for message in self._messages():
            if message["type"] == "end":
                break
            if message["type"] == "memory":
                emit({"type": "memory_parts", "parts": self._executor.memory_parts()})
            elif hasattr(self._executor, "submit"):
                last, pending = pending, self._executor.submit(reader.batch(message))
                # No more than two steps are on the device, for which there are buffers.
                if last is not None:
                    self._executor.collect(last)
            else:
                self._executor.execute(reader.batch(message))
        if pending is not None:
            self._executor.collect(pending)
        return {}

    def close(self) -> None:
        """Give everything back."""
        self._drop()
        self._decoder = None
        if self._ranks is not None:
            self._ranks.abort()

    def _drop(self) -> None:
        if self._executor is not None:
            self._executor.close()
        self._executor = None

    def _messages(self) -> Iterator[Any]:
        """What rank 0 sends, one message after the other, until it is gone."""
        reader = FrameReader()
        while data := self._steps.recv(_CHUNK_BYTES):  # type: ignore[union-attr]
            yield from reader.feed(data)


def connect(arguments: dict[str, Any]) -> Any:
    """The ranks, of which this process is number `arguments["rank"]`."""
    from labkit.models.ranks import ProcessRanks

    device = rank_device(arguments["device"], arguments["rank"])
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)
    return ProcessRanks(
        arguments["rank"],
        arguments["size"],
        arguments["meeting"],
        device,
        timeout_s=arguments["timeout_s"],
    )


def rank_device(kind: str, rank: int) -> Any:
    """The torch device of a rank: a card for each, or the CPU for all."""
    import torch

    return torch.device(kind, rank) if kind == "cuda" else torch.device(kind)


def make_executor(decoder: Any, plan: MemoryPlan) -> Any:
    """The executor of one rank's decoder."""
    from labkit.engine.engine import default_executor

    return default_executor(decoder, plan)


def threads_of_environment() -> int:
    """Compute threads that this worker process was started with."""
    return max(1, int(os.environ.get("OMP_NUM_THREADS", "1")))


def _die_with_parent() -> None:
    """Let the kernel end this process when the thread that started it ends, even while it is stopped or hangs."""
    try:
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    except (OSError, AttributeError):
        return  # not Linux: it ends when its socket closes
