"""`summarize` against values worked out by hand and against numpy's quantiles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.measure.run_record import RequestRow
from labkit.measure.summary import inter_token_s, quantiles


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_quantiles_agree_with_numpy(values):
    got = quantiles(values)
    expected = np.quantile(values, [0.5, 0.95, 0.99])
    assert [got.p50, got.p95, got.p99] == pytest.approx(list(expected), rel=1e-9, abs=1e-6)
    assert got.count == len(values)


def test_quantiles_of_nothing_are_none_not_zero():
    got = quantiles([])
    assert (got.p50, got.p99, got.mean, got.count) == (None, None, None, 0)


def test_inter_token_gaps_start_after_the_first_token():
    row = RequestRow(0, 0.0, 1.0, 2.0, 8, 3, token_times_s=(1.0, 1.25, 2.0))
    assert inter_token_s(row) == [0.25, 0.75]
    assert inter_token_s(RequestRow(1, 0.0, 1.0, 1.0, 8, 1, token_times_s=(1.0,))) == []
