"""Roofline of one kernel launch (Williams et al. 2009, CACM 52(4)): bytes, operations, and the ceiling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from labkit.errors import OutOfRangeError, UnsupportedError
from labkit.measure.l2_calibration import L2Calibration, load_l2_calibration
from labkit.specs.gpu_spec import GpuSpec
from labkit.text import plain


@dataclass(frozen=True)
class Ceilings:
    """What a card can do at most.

    Attributes:
        read_bytes_per_s: DRAM reads of a kernel that only reads.
        flops_per_s: matrix products of the type in use; None where the data sheet has none.
        source: "data sheet …" or "measured …".
    """

    read_bytes_per_s: float
    flops_per_s: float | None
    source: str

    def __post_init__(self) -> None:
        if not self.read_bytes_per_s > 0 or (self.flops_per_s is not None and not self.flops_per_s > 0):
            raise OutOfRangeError("a ceiling is more than 0", knob="gpu")


@dataclass(frozen=True)
class Roofline:
    """One launch against the ceilings.

    Attributes:
        dram_bytes, flops: what the launch moves and computes.
        floor_s: shortest time that the ceilings allow.
        bound: which ceiling that is.
        share_reached: floor over the measured time, 0 to 1 and a little over; None without a time.
    """

    dram_bytes: float
    flops: float
    ceilings: Ceilings
    floor_s: float
    bound: Literal["memory", "arithmetic"]
    share_reached: float | None = None

    @property
    def intensity(self) -> float | None:
        """Operations a byte; None where nothing comes from DRAM."""
        return self.flops / self.dram_bytes if self.dram_bytes else None

    @property
    def dram_bytes_per_s(self) -> float:
        """The most bytes a second that this launch can read: all of the ceiling only when memory binds."""
        return self.dram_bytes / self.floor_s if self.floor_s else 0.0


def card_ceilings(gpu: GpuSpec, calibration: L2Calibration | None = None) -> Ceilings:
    """Ceilings from the card's data sheet, the bandwidth times the share that a reading kernel reaches.

    Raises:
        UnsupportedError: the card's bandwidth is not known.
    """
    if not gpu.mem_bandwidth_bytes_per_s:
        raise UnsupportedError(
            f"the memory bandwidth of {plain(gpu.name, 60)} is not known",
            works="a card of the catalogue, such as H100",
            knob="gpu",
        )
    known = calibration or load_l2_calibration(gpu)
    flops = gpu.bf16_flops or gpu.fp16_flops
    share = known.read_bandwidth_share
    return Ceilings(gpu.mem_bandwidth_bytes_per_s * share, flops, f"data sheet, {100 * share:.3g} % of its bandwidth")


def roofline(dram_bytes: float, flops: float, ceilings: Ceilings, time_s: float | None = None) -> Roofline:
    """The launch of `dram_bytes` and `flops` that took `time_s`.

    Raises:
        OutOfRangeError: a negative amount, or a time that is not more than 0.
    """
    if dram_bytes < 0 or flops < 0 or (time_s is not None and not time_s > 0):
        raise OutOfRangeError("bytes and operations are at least 0 and a time is more than 0 seconds")
    memory_s = dram_bytes / ceilings.read_bytes_per_s
    compute_s = flops / ceilings.flops_per_s if ceilings.flops_per_s else 0.0
    floor_s = max(memory_s, compute_s)
    bound: Literal["memory", "arithmetic"] = "arithmetic" if compute_s > memory_s else "memory"
    return Roofline(dram_bytes, flops, ceilings, floor_s, bound, None if time_s is None else floor_s / time_s)
