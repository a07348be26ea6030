"""The engine's own backend, with a fault in the middle of a run; the workload's name orders it: `fault:<what>@<step>`.

Some faults are raised as torch words them, for machines without a card; others really happen, on a card.
"""

from __future__ import annotations

import os
import signal
import time

import torch

from labkit.experiments.engine_backend import EngineBackend

# As torch and Triton word them.
RAISED = {
    "illegal access": RuntimeError(
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"
    ),
    "triton illegal access": RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    "device assert": RuntimeError("CUDA error: device-side assert triggered"),
    "lost to another process": RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    "broken card": RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    "no memory on the card": torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.10 GiB is "
        "free. Process 4711 has 120.00 GiB memory in use."
    ),
    "no memory on the host": MemoryError("cannot allocate 8 GiB"),
}


class FaultyBackend(EngineBackend):
    """`EngineBackend` whose engine strikes at one step."""

    def run(self, arguments, emit, is_cancelled):
        what, _, step = arguments["workload"]["name"].removeprefix("fault:").partition("@")
        if step:
            self._plant(what, int(step))
        return super().run(arguments, emit, is_cancelled)

    def _plant(self, what, step):
        engine, taken = self._engine, [0]
        compute = engine.step

        def step_with_fault():
            taken[0] += 1
            if taken[0] == step:
                # The run reports what is finished eight times a second.
                time.sleep(0.2)
            result = compute()
            if taken[0] == step + 1:
                engine.step = compute
                strike(what)
            return result

        engine.step = step_with_fault


def strike(what):
    if what in RAISED:
        raise RAISED[what]
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "hang":
        time.sleep(3600)
    else:
        strike_card(what)


def strike_card(what):
    """What really happens on a card."""
    if what == "fill the card":
        fill(2**31)
    import card_faults

    getattr(card_faults, what)()
    torch.cuda.synchronize()


def fill(room_bytes):
    """torch's own refusal, `room_bytes` above what is reserved, so that other programs on the card live on."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room_bytes) / total)
    kept = []
    try:
        while True:
            kept.append(torch.empty(2**28, dtype=torch.uint8, device="cuda"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
