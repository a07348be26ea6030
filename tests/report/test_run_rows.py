"""Rows of the report's table of runs."""

import dataclasses

from labkit.report.run_rows import COLUMNS, run_rows
from tests.figures.samples import sample_record


def test_a_run_on_a_card_has_its_energy_for_each_token():
    record = sample_record()
    tokens = sum(row.output_tokens for row in record.requests)
    rows = run_rows([record, dataclasses.replace(record, energy_j=0.05 * tokens)], None, None)
    at = COLUMNS.index("energy per token")
    assert [row.cells[at] for row in rows] == ["–", "50.0 mJ"]
    assert {len(row.cells) for row in rows} == {len(COLUMNS)}
