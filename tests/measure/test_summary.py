"""`percentiles` against numpy, and against nothing at all."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.measure.summary import percentiles, summarize
from tests.figures.samples import sample_record


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_percentiles_agree_with_numpy(values):
    got = percentiles(values)
    expected = np.quantile(values, [0.5, 0.95, 0.99])
    assert [got.p50, got.p95, got.p99] == pytest.approx(list(expected), rel=1e-9, abs=1e-6)
    assert got.num_values == len(values)


def test_percentiles_of_nothing_are_none_not_zero():
    assert percentiles([]) is None


def test_energy_is_shared_by_the_output_tokens():
    record = sample_record(num_requests=4)
    tokens = sum(row.output_tokens for row in record.requests)
    assert summarize(record).energy_per_token_j is None
    assert summarize(dataclasses.replace(record, energy_j=50.0)).energy_per_token_j == 50.0 / tokens
    assert summarize(dataclasses.replace(record, energy_j=50.0, requests=())).energy_per_token_j is None
