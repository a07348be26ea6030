"""What a worker process holds: the interface of a backend, and how errors travel up to the notebook's process."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from labkit import errors
from labkit.text import plain

Emit = Callable[[dict[str, Any]], None]
IsCancelled = Callable[[], bool]
ENGINE_BACKEND = "labkit.experiments.engine_backend:EngineBackend"
# What a lost card says → what that means, and what to change where it comes again.
_LOST_CARD = (
    ("busy or unavailable", "another process has the card to itself", "ending that process, or nvidia-smi -c 0"),
    ("illegal memory access", "a kernel read or wrote outside its tensors",
     "another block_size or kv_cache_dtype; CUDA_LAUNCH_BLOCKING=1 names the kernel"),
    ("misaligned address", "a kernel read at an odd address", "another block_size or kv_cache_dtype"),
    ("device-side assert", "a kernel found an index out of range", "CUDA_LAUNCH_BLOCKING=1 names the kernel"),
    ("timed out", "the system's watchdog ended a kernel", "fewer max_num_batched_tokens"),
    ("ecc", "the card's memory is damaged", "labkit doctor, and another card"),
    ("", "the card or its driver failed", "labkit doctor; where nvidia-smi does not list the card, a restart"),
)  # fmt: skip
OUT_OF_MEMORY_PHRASES = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")


class Backend(Protocol):
    """Lives in the worker; arguments and answers are plain JSON values."""

    def load(self, arguments: dict[str, Any], emit: Emit, is_cancelled: IsCancelled) -> dict[str, Any]:
        """Read the weights; what was loaded before is dropped."""
        ...

    def configure(self, arguments: dict[str, Any], emit: Emit, is_cancelled: IsCancelled) -> dict[str, Any]:
        """Allocate for a plan; weights stay."""
        ...

    def run(self, arguments: dict[str, Any], emit: Emit, is_cancelled: IsCancelled) -> dict[str, Any]:
        """Serve a workload, giving rows and progress to `emit`."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


def make_backend(path: str) -> Backend:
    """The backend of the import path `module:Class`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)()


def describe_error(error: BaseException) -> dict[str, Any]:
    """`error` as an event: its class, its four parts, and for what labkit did not raise itself the last frames."""
    if is_out_of_memory(error):
        return {"type": "error", "kind": "out_of_memory", "message": plain(error) or "out of memory"}
    if isinstance(error, errors.LabkitError):
        parts = {name: getattr(error, name) for name in ("needed", "available", "works", "knob")}
        # Its share of the weights is of no use any more.
        ends = {"ends_worker": True} if isinstance(error, errors.RankError) else {}
        return {"type": "error", "kind": type(error).__name__, "message": error.message, **parts, **ends}
    if is_lost_context(error):
        said = str(error).lower()
        cause, change = next((cause, change) for phrase, cause, change in _LOST_CARD if phrase in said)
        text = f"the card's context is lost, at or before this step: {cause}: {plain(error, 500)}"
        works = f"running again: the worker restarts; where it comes again: {change}"
        return {"type": "error", "kind": "WorkerError", "message": text, "works": works, "ends_worker": True}
    frames = traceback.format_exception(type(error), error, error.__traceback__, limit=-6)
    text = f"{type(error).__name__}: {plain(error)}"
    return {"type": "error", "kind": "internal", "message": text, "traceback": "".join(frames)[-8000:]}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: Python's, or torch's on a CPU or a card."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(
        phrase in str(error).lower() for phrase in OUT_OF_MEMORY_PHRASES
    )


def is_lost_context(error: BaseException) -> bool:
    """Whether CUDA failed in a way after which every call of this process fails (illegal access, device assert, …).

    CUDA's runtime documentation: such a process must be ended. Out of memory and refused launches are not of them.
    """
    text = str(error)
    if is_out_of_memory(error) or not isinstance(error, RuntimeError):
        return False
    recoverable = ("invalid configuration", "invalid argument", "out of resource", "too many resources")
    return ("CUDA error" in text or "Triton Error [CUDA]" in text) and not any(
        phrase in text.lower() for phrase in recoverable
    )


def rebuild_error(event: Mapping[str, Any], doing: str) -> errors.LabkitError:
    """The error that `event` describes, of one of labkit's own classes whatever the event says."""
    message = plain(event.get("message", ""), 2000)
    if event.get("kind") == "out_of_memory":
        works, knob = _less_memory("CUDA" in message, doing)
        return errors.DoesNotFitError(
            f"the worker ran out of memory {doing}: {message}", works=f"{works}; the session can go on", knob=knob
        )
    cls = getattr(errors, str(event.get("kind")), None)
    if not (isinstance(cls, type) and issubclass(cls, errors.LabkitError)):
        return errors.WorkerError(f"the worker failed {doing}: {message}", works="running again")
    parts = {name: event.get(name) for name in ("needed", "available", "works", "knob")}
    return cls(message, **{name: None if part is None else plain(part, 2000) for name, part in parts.items()})


def _less_memory(is_card: bool, doing: str) -> tuple[str, str]:
    """What to change, and the first knob to turn."""
    if not is_card:
        return "less cpu_memory_gib, fewer max_num_batched_tokens or a smaller model", "cpu_memory_gib"
    if "loading" in doing:
        return "ending other programs on the card, quantization = 'fp8', or a smaller model", "quantization"
    works = "less gpu_memory_utilization, fewer max_num_batched_tokens or max_num_seqs, or a smaller model"
    return works, "gpu_memory_utilization"
