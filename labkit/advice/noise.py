"""How far apart two runs must be before they count as different."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Without repeats, differences under this share are not called: run-to-run spread of serving benchmarks on one machine
# is a few percent (measured on shared machines: more, so repeat).
ASSUMED_SPREAD = 0.05
# A virtual clock repeats exactly; what is left is the choice of the seed.
SIMULATED_SPREAD = 0.01


@dataclass(frozen=True)
class Noise:
    """The relative difference from which on two means count as different.

    Attributes:
        share: 0.05 for 5 %.
        repeats: smallest number of runs per configuration that it rests on; 1 when it is assumed.
        sentence: where it comes from.
    """

    share: float
    repeats: int
    sentence: str


def noise_of(groups: Mapping[str, Sequence[float]], simulated: bool = False) -> Noise:
    """The noise of `groups`: configuration → the same metric of each of its runs.

    With repeats: twice the standard error of a difference of two means, `2 s sqrt(2 / n)`, where s is the pooled
    relative standard deviation of all groups with two or more runs and n the smallest group's size.
    """
    repeated = [values for values in groups.values() if len(values) > 1 and statistics.fmean(values) > 0]
    if not repeated:
        assumed = SIMULATED_SPREAD if simulated else ASSUMED_SPREAD
        kind = "simulated runs repeat exactly" if simulated else "each configuration ran once"
        return Noise(assumed, 1, f"{kind}: differences under {100 * assumed:.0f} % are not called")
    squares = sum((value / statistics.fmean(group) - 1) ** 2 for group in repeated for value in group)
    freedom = sum(len(group) - 1 for group in repeated)
    spread = math.sqrt(squares / freedom)
    smallest = min(len(group) for group in groups.values())
    found = 2 * spread * math.sqrt(2 / max(smallest, 1))
    text = f"±{100 * found:.1f} % from {sum(map(len, repeated))} repeated runs (at least {smallest} per configuration)"
    return Noise(found, smallest, text)
