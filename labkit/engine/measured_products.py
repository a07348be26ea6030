"""`MeasuredProducts`: seconds of matrix products of any shape, from those that a microbenchmark timed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray


class MeasuredProducts:
    """Times between measured ones, linear in the logarithms.

    Shapes are looked up in a grid of outputs and inputs, since a narrow matrix leaves multiprocessors idle that a wide
    one of as many elements fills. A corner of the grid that was not measured is filled in by its number of elements.

    Args:
        products: (outputs, inputs, rows, seconds) of each timing; at least one.

    Attributes:
        rows: the numbers of rows that were measured, smallest first, [rows].
    """

    def __init__(self, products: Sequence[tuple[float, float, float, float]]) -> None:
        table = np.array(products, dtype=float)
        self._outputs, self._inputs, self.rows = (np.unique(table[:, column]) for column in range(3))
        self._grid = np.full((len(self.rows), len(self._outputs), len(self._inputs)), np.nan)
        places = (
            np.searchsorted(known, table[:, column])
            for column, known in ((2, self.rows), (0, self._outputs), (1, self._inputs))
        )
        self._grid[tuple(places)] = np.log(table[:, 3])
        elements = np.log(self._outputs)[:, None] + np.log(self._inputs)[None, :]
        for values in self._grid:
            is_known = ~np.isnan(values)
            order = np.argsort(elements[is_known])
            sizes, known = elements[is_known][order], values[is_known][order]
            # Beyond the largest in proportion to the elements, below the smallest constant.
            filled = np.interp(elements, sizes, known) + np.maximum(0.0, elements - sizes[-1])
            values[~is_known] = filled[~is_known]

    def seconds(self, outputs: float, inputs: float) -> Array:
        """Seconds of one product at each of `rows`, [rows]; beyond the grid in proportion to the elements."""
        by_outputs = np.stack([_at(np.log(inputs), np.log(self._inputs), values.T) for values in self._grid])
        found = _at(np.log(outputs), np.log(self._outputs), by_outputs.T)
        return np.exp(found)


def _at(place: float, places: Array, values: Array) -> Array:
    """`values` [places, …] at one place, linear between its neighbours; rising with slope 1 beyond the last."""
    right = int(np.clip(np.searchsorted(places, place), 1, max(1, len(places) - 1)))
    if len(places) == 1:
        return values[0] + max(0.0, place - places[0])
    left = right - 1
    share = np.clip((place - places[left]) / (places[right] - places[left]), 0.0, 1.0)
    return values[left] * (1 - share) + values[right] * share + max(0.0, place - places[-1])
