"""`ResidualGp`: what measured runs say beyond the simulation, as a small Gaussian process on log ratios."""

from __future__ import annotations

import numpy as np

# How far a simulation errs, how much of that all settings share, and over how much of a knob's range it changes;
# chosen on the grids of `search_bench`, where they need the fewest launches.
SCALE, _SHARED, _LENGTH, _FLOOR = 0.3, 0.2, 0.3, 1e-9


class ResidualGp:
    """A Gaussian process of mean zero over log(measured/simulated).

    Args:
        points: [candidates, knobs] positions of all candidates, each knob scaled to 0 … 1.
        noise: relative standard deviation of a repeated measurement.
        scale: how far the simulation errs, as the standard deviation of the log ratio.
    """

    def __init__(self, points: np.ndarray, noise: float = 0.02, scale: float = SCALE) -> None:
        distance = np.abs(points[:, None, :] - points[None, :, :])
        # A smooth trend over the knobs, and one shared error of the simulation's level.
        near = np.exp(-0.5 * (distance**2).sum(axis=2) / _LENGTH**2)
        self._prior = scale**2 * (_SHARED + (1 - _SHARED) * near)
        self._noise = noise
        self._seen: list[int] = []
        self._values: list[float] = []

    def add(self, index: int, log_ratio: float) -> None:
        """A measured candidate."""
        self._seen.append(index)
        self._values.append(log_ratio)

    def posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the log ratio of every candidate, [candidates] each."""
        variance = np.diag(self._prior).copy()
        if not self._seen:
            return np.zeros(len(variance)), np.sqrt(variance)
        seen = np.array(self._seen)
        known = self._prior[np.ix_(seen, seen)] + self._noise**2 * np.eye(len(seen))
        cross = self._prior[:, seen]
        weights = np.linalg.solve(known, cross.T)
        mean = weights.T @ np.array(self._values)
        return mean, np.sqrt(np.maximum(variance - (cross * weights.T).sum(axis=1), _FLOOR))
