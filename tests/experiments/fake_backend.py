"""A backend without a model, for tests of everything around it: serves any workload on a small clock of its own.

Faults are ordered by the workload's name or the model's source: `fault:<what>@<where>`, for example
`fault:segv@step`. It is the test double of `labkit.experiments.engine_backend.EngineBackend`.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import struct
import sys
import time

from labkit.errors import DoesNotFitError

STEP_S = 0.004


class FakeBackend:
    """Gives every running request one token a step; up to `max_num_seqs` run at once."""

    def __init__(self):
        self._loaded = 0
        self._configured = None

    def load(self, arguments, emit, is_cancelled):
        strike(arguments.get("source", ""), "load")
        self._loaded += 1
        emit({"type": "progress", "phase": "load", "done": 1, "total": 1, "elapsed_s": 0.0, "remaining_s": 0.0})
        return {"weights_bytes": 1000, "times_loaded": self._loaded, "pid": os.getpid()}

    def configure(self, arguments, emit, is_cancelled):
        strike(arguments["plan"]["model"]["source"], "configure")
        self._configured = arguments["plan"]
        return {"memory_parts": {"weights": 1000, "kv_cache": 64 * 4096}}

    def run(self, arguments, emit, is_cancelled):
        if self._configured is None:
            raise DoesNotFitError("nothing is configured", works="configure first")
        workload, fault = arguments["workload"], arguments["workload"]["name"]
        strike(fault, "run")
        lengths = [request["output_tokens"] for request in workload["requests"]]
        inputs = [request["input_tokens"] for request in workload["requests"]]
        times = [[] for _ in lengths]
        start, num_steps, status = time.monotonic(), 0, "finished"
        while any(len(done) < length for done, length in zip(times, lengths, strict=True)):
            if is_cancelled() and "deaf" not in fault:
                status = "cancelled"
                break
            time.sleep(STEP_S)
            num_steps += 1
            if num_steps == 3:
                strike(fault, "step")
            now = time.monotonic() - start
            running = [i for i, length in enumerate(lengths) if len(times[i]) < length][:8]
            for index in running:
                times[index].append(now)
            finished = [i for i in running if len(times[i]) == lengths[i]]
            step = [now - STEP_S, STEP_S, len(running), 0, len(running), len(running), 0, len(running), 0, 10, 0, 0]
            rows = [_request(i, inputs[i], times[i]) for i in finished]
            emit({"type": "rows", "requests": rows, "steps": [step]})
            emit(
                {
                    "type": "progress",
                    "phase": "run",
                    "done": 0,
                    "total": len(lengths),
                    "elapsed_s": now,
                    "remaining_s": 1.0,
                }
            )
            step_event = {"type": "step", "num_running": len(running), "time_s": now, "num_blocks_used": len(running)}
            emit({**step_event, "num_output_tokens": sum(map(len, times))})
        return {
            "status": status,
            "requests": [
                _request(i, inputs[i], done, "cancelled") for i, done in enumerate(times) if len(done) < lengths[i]
            ],
            "steps": [],
            "duration_s": time.monotonic() - start,
            "memory_parts": {"weights": 1000, "kv_cache": 64 * 4096, "activation": 77},
            "block_map": [-1, 0],
            "energy_j": 2.5,
            "versions": {"fake": "1"},
        }

    def close(self):
        pass


def _request(index, input_tokens, times, reason="length"):
    first, last = (times[0], times[-1]) if times else (None, None)
    return [index, 0.0, first, last if reason == "length" else None, input_tokens, len(times), 0, 0, reason, times]


def strike(order, here):
    """Do the fault that `order` names, when it is for this place."""
    what, _, where = order.removeprefix("fault:").partition("@")
    if not order.startswith("fault:") or where != here:
        return
    if what in ("kill", "stop"):
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what])
    elif what == "segv":
        ctypes.string_at(0)
    elif what == "exit":
        os._exit(3)
    elif what == "memory":
        raise MemoryError("no more")
    elif what == "address space":
        _hoard()
    elif what == "context":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    elif what == "error":
        raise RuntimeError("broken \x1b[31mthing")
    elif what == "panic":
        raise type("PanicException", (BaseException,), {})("rust panicked")
    elif what == "hang":
        time.sleep(3600)
    else:
        _send_nonsense(what)


def _hoard():
    kept = []
    while True:
        kept.append(bytearray(64 * 2**20))


def _send_nonsense(what):
    descriptor = int(sys.argv[1])
    body = pickle.dumps(_Touches())
    data = {
        "pickle": struct.pack(">I", len(body)) + body,
        "long": struct.pack(">I", 2**31) + b"x" * 100,
        "half": struct.pack(">I", 1000) + b'{"type":',
        "header": b"\0\0",
        "list": struct.pack(">I", 2) + b"[]",
    }[what]
    os.write(descriptor, data)
    if what == "header":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)


class _Touches:
    def __reduce__(self):
        return open, ("/tmp/labkit-pickle-was-loaded", "w")
