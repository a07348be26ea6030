"""Thinning keeps extremes, ends and order, and says how much it hid."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.figures.live import LiveSeries
from labkit.figures.thinning import MAX_POINTS, thin

numbers = st.floats(-1e9, 1e9, allow_nan=False)


@given(st.lists(numbers, max_size=400), st.integers(4, 60))
def test_extremes_ends_and_order_survive(values, limit):
    thinned = thin(range(len(values)), values, limit)
    assert len(thinned.x) <= max(limit, 0)
    assert list(thinned.x) == sorted(set(thinned.x))
    assert thinned.num_points == len(values)
    if values:
        assert (thinned.x[0], thinned.x[-1]) == (0, len(values) - 1)
        assert (min(thinned.y), max(thinned.y)) == (min(values), max(values))
        assert all(values[x] == y for x, y in zip(thinned.x, thinned.y, strict=True))


def test_short_series_are_left_alone():
    assert thin([1, 2], [3.0, 4.0]).notice == ""
    assert thin([], []).x == ()
    assert thin(range(MAX_POINTS), range(MAX_POINTS)).notice == ""


def test_the_notice_says_how_many_stand_for_one():
    assert thin(range(20_000), range(20_000)).notice == "1 of 10 points shown, extremes kept"


def test_gaps_are_no_extremes():
    values = [math.nan] * 50 + [5.0] + [None] * 49
    thinned = thin(range(100), values, 10)
    assert 5.0 in thinned.y


def test_lengths_that_differ_are_an_error():
    with pytest.raises(ValueError, match="x has 2 values and y has 1"):
        thin([1, 2], [1])


@settings(max_examples=30)
@given(st.lists(numbers, min_size=1, max_size=600))
def test_a_live_series_is_bounded_and_keeps_its_extremes(values):
    series = LiveSeries(limit=40)
    for index, value in enumerate(values):
        series.add(index, value)
        assert len(series.now().x) <= 40
    now = series.now()
    assert now.num_points == len(values)
    assert (min(now.y), max(now.y), now.x[-1]) == (min(values), max(values), len(values) - 1)
