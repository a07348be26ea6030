"""Numbers as labkit shows them: three significant digits, a unit, never a naked percentage.

Memory is in GiB, MiB and KiB (powers of two, as nvidia-smi, torch and vLLM print it); bandwidth in GB/s and TB/s
(powers of ten, as data sheets print it). Rounding is for show only: records and hovers carry the full value.
"""

from __future__ import annotations

import math

MISSING = "–"
KIB, MIB, GIB = 2**10, 2**20, 2**30


def number(value: float | None, digits: int = 3) -> str:
    """`value` with `digits` significant digits and thousands commas; "–" when there is none."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    if abs(value) < 0.01:
        return "<0.01" if value > 0 else ">-0.01"
    rounded = float(f"{value:.{digits - 1}e}")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}"


def count(value: float | None) -> str:
    """Tokens, blocks, requests: whole, with thousands commas."""
    return MISSING if value is None or not math.isfinite(value) else f"{round(value):,}"


def of(value: float, noun: str) -> str:
    """A whole number of things: "1 request", "1,200 requests"."""
    return f"{count(value)} {noun if round(value) == 1 else f'{noun}s'}"


def memory(num_bytes: float | None) -> str:
    """Bytes of memory as GiB, MiB, KiB or B."""
    if num_bytes is None or not math.isfinite(num_bytes):
        return MISSING
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{number(num_bytes / unit)} {name}"
    return f"{round(num_bytes):,} B"


def gib(value: float) -> str:
    """A setting that is stated in GiB, as it was typed: "0.58 GiB"."""
    return f"{value:g} GiB"


def memory_scale(num_bytes: float) -> tuple[int, str]:
    """Divisor and unit for an axis that reaches to `num_bytes`: plotly has no binary prefixes."""
    return (GIB, "GiB") if num_bytes >= GIB else (MIB, "MiB") if num_bytes >= MIB else (KIB, "KiB")


def count_scale(largest: float, what: str) -> tuple[int, str]:
    """Divisor and title for an axis of whole numbers that reaches to `largest`: long ones would meet each other."""
    if largest >= 1e7:
        return 1_000_000, f"million {what}"
    return (1_000, f"thousand {what}") if largest >= 1e5 else (1, what)


def bandwidth_scale(bytes_per_s: float) -> tuple[float, str]:
    """Divisor and unit for an axis of bandwidth that reaches to `bytes_per_s`."""
    return (1e12, "TB/s") if bytes_per_s >= 1e12 else (1e9, "GB/s")


def share(part: float | None, whole: float | None) -> str:
    """`part` of `whole` in percent, at most one decimal; "–" when there is no whole."""
    if part is None or not whole:
        return MISSING
    percent = 100 * part / whole
    if 0 < percent < 0.1:
        return "<0.1 %"
    return f"{percent:.1f} %" if abs(percent) < 10 else f"{percent:.0f} %"


def progress(done: float, total: float, unit: str) -> str:
    """How far something is: "1.25 GiB of 14.9 GiB (8.4 %)" for the unit "bytes", "3 of 40 requests" for others."""
    if unit == "bytes":
        return f"{memory(done)} of {memory(total)} ({share(done, total)})"
    return f"{count(done)} of {count(total)} {unit}".rstrip()


def memory_with_share(num_bytes: float, total_bytes: float) -> str:
    """An amount and its share: "12.3 GiB (15 %)"."""
    return f"{memory(num_bytes)} ({share(num_bytes, total_bytes)})"


def bandwidth(bytes_per_s: float | None) -> str:
    """Bandwidth in GB/s or TB/s (powers of ten)."""
    if bytes_per_s is None or not math.isfinite(bytes_per_s):
        return MISSING
    if abs(bytes_per_s) >= 1e12:
        return f"{number(bytes_per_s / 1e12)} TB/s"
    return f"{number(bytes_per_s / 1e9)} GB/s"


def duration(seconds: float | None) -> str:
    """A time: ms under one second, s under two minutes, then min and h."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if abs(seconds) < 1:
        return f"{number(seconds * 1e3)} ms"
    if abs(seconds) < 120:
        return f"{number(seconds)} s"
    if abs(seconds) < 7200:
        return f"{number(seconds / 60)} min"
    return f"{number(seconds / 3600)} h"


def energy(joules: float | None) -> str:
    """Joules in the unit that suits: "0.213 J", "41.5 mJ"."""
    if joules is None:
        return MISSING
    return f"{number(joules)} J" if joules >= 0.1 or joules == 0 else f"{number(1000 * joules)} mJ"


def rate(per_second: float | None, unit: str = "tok/s") -> str:
    """A rate with its unit: "1,240 tok/s"."""
    return MISSING if per_second is None else f"{number(per_second)} {unit}"


def change(before: float | None, after: float | None, unit: str = "") -> str:
    """A change with sign, percent and both values: "+18 % (1,240 → 1,460 tok/s)"."""
    if before is None or after is None or not before:
        return MISSING
    percent = 100 * (after - before) / abs(before)
    digits = (f"{percent:+.1f}" if abs(percent) < 10 else f"{percent:+,.0f}").replace("-", "−")
    span = f"{number(before)} → {number(after)}"
    return f"{digits} % ({span} {unit})" if unit else f"{digits} % ({span})"
