"""Verdicts on common claims about block size and the L2, computed from the kernel lab's points.

The claims are quoted from public posts (identifiers as in labkit's list of claims). A verdict holds for the card and
shapes that were looked at, and says whether these were measured or simulated.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from labkit import format as fmt
from labkit.measure.kernel_lab import LabPoint, LabResult

RECORDED_FILE = Path(__file__).with_name("h200_decode_counters.json")
# Changes below this are no effect: repeated counts of one launch differ by less.
NO_EFFECT_POINTS, NO_EFFECT_SHARE = 0.02, 0.02
UNPACKED = "one program for each query head"

Finding = Literal["supported", "contradicted", "not decided"]


@dataclass(frozen=True)
class ClaimVerdict:
    """One claim against the data; `method` begins with "measured" or "simulated"."""

    claim_id: str
    claim: str
    finding: Finding
    evidence: str
    method: str
    card: str


@functools.cache
def recorded_counters() -> Mapping[str, Any]:
    """Counters of a plain decode kernel on an H200 with their source; rows by block size."""
    return json.loads(RECORDED_FILE.read_text("utf-8"))


def judge_claims(result: LabResult) -> tuple[ClaimVerdict, ...]:
    """Verdicts on C01, C02, C03 and C28."""
    return tuple(judge(result) for judge in (_hit_rate, _miss_ratio, _cache_line, _thresholds))


def _verdict(result: LabResult, claim_id: str, claim: str, finding: Finding, evidence: str) -> ClaimVerdict:
    return ClaimVerdict(claim_id, claim, finding, evidence, result.method, result.settings.gpu.name)


def _hit_rate(result: LabResult) -> ClaimVerdict:
    claim = "Block size sets the L2 hit rate of paged attention; 16 is best (8/16/32: 82/89/76 %)"
    full, split = result.line("full"), result.line(UNPACKED)
    if len(full) < 2 or 16 not in full:
        return _verdict(result, "C01", claim, "not decided", "Block 16 and one other size are needed.")
    low, high = _range(full)
    by_block = high - low
    others = [point.counters.l2_hit_rate for point in (*split.values(), *result.heat)]
    by_sharing = max([*others, high]) - min([*others, low])
    best = full[16].counters.l2_hit_rate >= high and by_block > NO_EFFECT_POINTS
    text = (
        f"Over blocks of {_sizes(full)} tokens the hit rate of the same kernel is {_span(low, high)} "
        f"({100 * by_block:.1f} points); who shares what moves it by {100 * by_sharing:.0f} points."
    )
    peak = result.settings.gpu.mem_bandwidth_bytes_per_s
    if result.settings.gpu.name == "A10" and peak:
        text += f" The 1,240 GB/s of the claim are {1.24e12 / peak:.1f} times what an A10's memory can give."
    return _verdict(result, "C01", claim, "supported" if best else "contradicted", text)


def _miss_ratio(result: LabResult) -> ClaimVerdict:
    claim = "Block size 16 against 32 changes the L2 miss rate 3.2 times"
    full = result.line("full")
    if not {16, 32} <= full.keys():
        return _verdict(result, "C02", claim, "not decided", "Block sizes 16 and 32 are needed.")
    misses = [1 - full[size].counters.l2_hit_rate for size in (16, 32)]
    if min(misses) <= 0:
        return _verdict(result, "C02", claim, "not decided", "Nothing missed.")
    ratio = max(misses) / min(misses)
    text = f"Misses at 16 and 32: {_span(*misses)} of all reads, a ratio of {ratio:.2f}."
    return _verdict(result, "C02", claim, "supported" if ratio > 2.5 else "contradicted", text)


def _cache_line(result: LabResult) -> ClaimVerdict:
    claim = "A block must match the 128-byte cache line; block 32 spans two lines and reads 15 % slower"
    full, settings = result.line("full"), result.settings
    if not {16, 32} <= full.keys():
        return _verdict(result, "C03", claim, "not decided", "Block sizes 16 and 32 are needed.")
    row_bytes = settings.shape(16).head_bytes // 2
    small, large = full[16].counters, full[32].counters
    bytes_change = large.dram_bytes / small.dram_bytes - 1
    text = (
        f"One token's K of one head is {row_bytes} bytes ({row_bytes / 128:g} × 128) in any block size; a block "
        f"only says where the next token is. From 16 to 32 the bytes read change by {_signed(bytes_change)}"
    )
    if result.method.startswith("measured"):
        change = large.dram_bytes_per_s / small.dram_bytes_per_s - 1
        text += f" and the bandwidth by {_signed(change)}."
    else:
        # A simulated bandwidth is the roofline's, which cannot speak of a kernel's own speed.
        rates = {row["block_size"]: row["dram_read_gb"] / row["time_us"] * 1e15 for row in recorded_counters()["rows"]}
        change = rates[32] / rates[16] - 1
        text += (
            f". Counted on an H200 where the tile is the block: {fmt.bandwidth(rates[16])} to "
            f"{fmt.bandwidth(rates[32])} ({_signed(change)}), since larger tiles have more bytes in flight."
        )
    finding: Finding = "supported" if change < -0.10 or bytes_change > 0.10 else "contradicted"
    return _verdict(result, "C03", claim, finding, text)


def _thresholds(result: LabResult) -> ClaimVerdict:
    claim = "L2 hit rate < 70 % means a misaligned block size; achieved occupancy < 50 % a bad launch"
    full, split = result.line("full"), result.line(UNPACKED)
    if not full or not split:
        return _verdict(result, "C28", claim, "not decided", "Both kernels are needed.")
    below = [size for size, point in full.items() if point.counters.l2_hit_rate < 0.7]
    best = max(recorded_counters()["rows"], key=lambda row: row["dram_share_of_peak"])
    worse = [point.counters.l2_hit_rate for point in split.values()]
    text = (
        f"{len(below)} of {len(full)} block sizes are below 70 % with hit rates of {_span(*_range(full))}; reading "
        f"everything once for each query head lifts it to {_span(min(worse), max(worse))} and saves no byte of DRAM. "
        f"Counted on an H200: {fmt.share(best['warps_active'], 1)} occupancy at "
        f"{fmt.share(best['dram_share_of_peak'], 1)} of the memory's peak."
    )
    # The rule would hold if some block sizes were above and some below the line.
    finding: Finding = "supported" if 0 < len(below) < len(full) else "contradicted"
    if not below and result.settings.prefix_share > 0:
        finding = "not decided"
        text += " Here all are above it because of the shared prefix."
    return _verdict(result, "C28", claim, finding, text)


def _range(points: Mapping[int, LabPoint]) -> tuple[float, float]:
    rates = [point.counters.l2_hit_rate for point in points.values()]
    return min(rates), max(rates)


def _span(low: float, high: float) -> str:
    low_text, high_text = fmt.share(low, 1), fmt.share(high, 1)
    return low_text if low_text == high_text else f"{low_text} to {high_text}"


def _signed(change: float) -> str:
    return f"{100 * change:+.1f} %".replace("-", "−")


def _sizes(points: Mapping[int, LabPoint]) -> str:
    return ", ".join(str(size) for size in sorted(points))
