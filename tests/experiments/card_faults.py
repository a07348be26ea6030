"""Kernels that go wrong: one writes far outside any tensor, one never ends."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write_far_away(place):
    tl.store(place + tl.program_id(0).to(tl.int64) * 2**36, 1.0)


@triton.jit
def _spin(place):
    value = tl.load(place, volatile=True)
    while value == 0:
        value = tl.load(place, volatile=True)
    tl.store(place, value + 1)


def illegal_access() -> None:
    _write_far_away[(64,)](torch.zeros(1, device="cuda"))


def spin() -> None:
    _spin[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))
