"""Long series made short enough to draw, with every extreme kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

MAX_POINTS = 2000


@dataclass(frozen=True)
class Thinned:
    """A series of at most the asked number of points, and how many it had."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    num_points: int

    @property
    def notice(self) -> str:
        """What a reader must be told: "1 of 12 points shown, extremes kept"; empty where all are shown."""
        if len(self.x) == self.num_points:
            return ""
        return f"1 of {round(self.num_points / len(self.x))} points shown, extremes kept"


def thin(x: Sequence[float], y: Sequence[float], limit: int = MAX_POINTS) -> Thinned:
    """At most `limit` points of the series: of each of limit / 2 equal runs of points, the lowest and the highest.

    The first and last points and both extremes of the whole series are always kept. A `y` that is None or not a
    number is a gap and never an extreme.
    """
    if len(x) != len(y):
        raise ValueError(f"x has {len(x)} values and y has {len(y)}; a series has as many of both")
    if len(x) <= limit:
        return Thinned(tuple(x), tuple(y), len(x))
    values = np.asarray([np.nan if value is None else value for value in y], dtype=float)
    edges = np.linspace(1, len(values) - 1, (limit - 2) // 2 + 1).astype(int)
    keep = {0, len(values) - 1}
    for start, stop in pairwise(edges):
        part = values[start:stop]
        if np.isnan(part).all():
            keep.add(int(start))
            continue
        keep.update((int(start + np.nanargmin(part)), int(start + np.nanargmax(part))))
    order = sorted(keep)
    return Thinned(tuple(x[i] for i in order), tuple(y[i] for i in order), len(x))
