"""Fits `StepConstants` to measured times: least squares on log ratios, pulled towards a prior, with few bad rows
counting little (Huber)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from labkit.engine.step_constants import StepConstants

Predict = Callable[[StepConstants], np.ndarray]
_OUTLIER, _MAX_ROUNDS, _NUDGE = 0.15, 25, 1e-3


def fit_constants(
    prior: StepConstants,
    predict: Predict,
    measured: np.ndarray,
    sigmas: Mapping[str, float],
    *,
    noise: float = 0.1,
    starts: Sequence[StepConstants] = (),
) -> StepConstants:
    """`prior` with the named constants moved so that `predict` meets `measured`.

    Args:
        measured: seconds, [rows], above zero.
        sigmas: constant → log-normal standard deviation of the prior around its value; others stay.
        noise: relative standard deviation of one measured value.
        starts: where else to begin, for times that are the longer of two: what is hidden at first moves nothing there.
    """
    found = [_fitted(prior, predict, measured, sigmas, noise, start) for start in (prior, *starts)]
    return min(found, key=lambda entry: entry[0])[1]


def _fitted(
    prior: StepConstants,
    predict: Predict,
    measured: np.ndarray,
    sigmas: Mapping[str, float],
    noise: float,
    begin: StepConstants,
) -> tuple[float, StepConstants]:
    """Loss and constants of one descent from `begin`."""
    names = tuple(sigmas)
    start = np.log([getattr(prior, name) for name in names])
    weights = np.array([noise / sigmas[name] for name in names])

    def residuals(point: np.ndarray) -> np.ndarray:
        found = prior.replace(**dict(zip(names, np.exp(point).tolist(), strict=True)))
        return np.log(predict(found) / measured)

    point, damping = np.log([getattr(begin, name) for name in names]), 1e-2
    error = residuals(point)
    best = _loss(error, weights * (point - start))
    for _ in range(_MAX_ROUNDS):
        columns = [(residuals(point + _NUDGE * unit) - error) / _NUDGE for unit in np.eye(len(names))]
        jacobian = np.stack(columns, axis=1)
        scale = np.sqrt(np.minimum(1.0, _OUTLIER / np.maximum(np.abs(error), 1e-12)))
        matrix = np.vstack([jacobian * scale[:, None], np.diag(weights)])
        right = np.concatenate([error * scale, weights * (point - start)])
        normal = matrix.T @ matrix
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), matrix.T @ right)
        moved = residuals(point - step)
        loss = _loss(moved, weights * (point - step - start))
        if loss < best:
            point, error, damping = point - step, moved, damping / 3
            gained, best = best - loss, loss
            if gained < 1e-5 * best:
                break
        else:
            damping *= 4
            if damping > 1e6:
                break
    return best, prior.replace(**dict(zip(names, np.exp(point).tolist(), strict=True)))


def _loss(error: np.ndarray, pull: np.ndarray) -> float:
    size = np.abs(error)
    huber = np.where(size < _OUTLIER, size**2, 2 * _OUTLIER * size - _OUTLIER**2)
    return float(huber.sum() + (pull**2).sum())
