"""How far apart two runs must be before they count as different."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Without repeats, differences under this share are not called: serving benchmarks spread by a few percent from run to
# run on one quiet machine, more on a shared one.
ASSUMED_SHARE = 0.05
# A virtual clock repeats exactly; what is left is the choice of the seed.
SIMULATED_SHARE = 0.01
# Few repeats say little about the spread: the assumed one counts as much as this many degrees of freedom.
ASSUMED_FREEDOM = 2


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


def noise_of(groups: Mapping[str, Sequence[float]], simulated: bool = False, compared: Sequence[str] = ()) -> Noise:
    """The noise of `groups`: configuration → the same metric of each of its runs.

    Twice the standard error of a difference of two means, `2 s sqrt(2 / n)`, n being the size of the smallest of the
    `compared` groups (of all when empty) and s the relative standard deviation pooled from all repeats and the assumed
    one: `s² = (2 s₀² + Σ (x/x̄ - 1)²) / (2 + degrees of freedom)`. Without repeats this is the assumed share itself.
    """
    assumed = SIMULATED_SHARE if simulated else ASSUMED_SHARE
    repeated = [values for values in groups.values() if len(values) > 1 and statistics.fmean(values) > 0]
    if not repeated:
        kind = "simulated runs repeat exactly" if simulated else "each configuration ran once"
        return Noise(assumed, 1, f"{kind}: differences under {100 * assumed:.0f} % are not called")
    squares = sum((value / statistics.fmean(group) - 1) ** 2 for group in repeated for value in group)
    freedom = sum(len(group) - 1 for group in repeated)
    variance = (ASSUMED_FREEDOM * (assumed / (2 * math.sqrt(2))) ** 2 + squares) / (ASSUMED_FREEDOM + freedom)
    smallest = min(len(groups[name]) for name in compared or groups)
    found = 2 * math.sqrt(variance * 2 / smallest)
    num_repeats = sum(map(len, repeated))
    return Noise(found, smallest, f"noise ±{100 * found:.1f} %, from {num_repeats} runs of equal settings")
