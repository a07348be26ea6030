"""Products between measured ones by hand: on the grid, between its points, beyond it, where a corner is missing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from labkit.engine.measured_products import MeasuredProducts


def grid(seconds, outputs=(1000, 4000), inputs=(1000, 2000), rows=(1, 100)):
    return [(o, i, r, seconds(o, i, r)) for o, i, r in itertools.product(outputs, inputs, rows)]


def test_a_measured_shape_has_its_own_time_and_between_two_lies_their_geometric_mean():
    products = MeasuredProducts(grid(lambda o, i, r: 1e-9 * o**0.5 * i * r))
    assert products.rows.tolist() == [1, 100]
    assert products.seconds(4000, 2000) == pytest.approx([1e-9 * 4000**0.5 * 2000 * rows for rows in (1, 100)])
    assert products.seconds(2000, 1000)[0] == pytest.approx(1e-9 * 2000**0.5 * 1000)
    assert products.seconds(1000, 2**0.5 * 1000)[0] == pytest.approx(1e-9 * 1000**0.5 * 2**0.5 * 1000)


def test_a_narrow_matrix_is_not_a_wide_one_of_as_many_elements():
    # Narrow: as slow as its inputs are many. Wide: by its elements.
    products = MeasuredProducts(grid(lambda o, i, r: max(3e-9 * i, 1e-12 * o * i), inputs=(1000, 4000)))
    assert products.seconds(1000, 4000)[0] == pytest.approx(12e-6)
    assert products.seconds(4000, 1000)[0] == pytest.approx(4e-6)


def test_beyond_the_grid_time_goes_with_the_elements_and_below_it_stays():
    products = MeasuredProducts(grid(lambda o, i, r: 1e-12 * o * i))
    assert products.seconds(40_000, 2000) == pytest.approx(10 * products.seconds(4000, 2000))
    assert products.seconds(4000, 6000) == pytest.approx(3 * products.seconds(4000, 2000))
    assert products.seconds(10, 10) == pytest.approx(products.seconds(1000, 1000))


def test_a_missing_corner_is_filled_by_its_elements():
    known = [entry for entry in grid(lambda o, i, r: 1e-12 * o * i) if entry[:2] != (1000, 2000)]
    # Two million elements lie halfway between one and four in the logarithm: 2 µs between 1 and 4.
    assert MeasuredProducts(known).seconds(1000, 2000) == pytest.approx([2e-6, 2e-6])


def test_one_timing_is_enough():
    found = MeasuredProducts([(1000, 1000, 16, 5e-6)])
    assert found.seconds(1000, 1000) == pytest.approx([5e-6])
    assert found.seconds(2000, 3000) == pytest.approx([30e-6])
    assert np.all(found.seconds(1, 1) > 0)
