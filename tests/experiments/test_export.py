"""Runs as files: what is written is read back equal, and what cannot be read says why."""

import dataclasses
import json

import pandas as pd
import pytest
from example_runs import example_record
from hypothesis import given
from hypothesis import strategies as st

from labkit.errors import FileFormatError
from labkit.experiments.export import export_json, export_parquet, import_json, to_json
from labkit.experiments.serialise import from_plain, to_plain
from labkit.measure.run_record import RequestRow, RunRecord


def test_json_round_trip_and_equal_bytes(tmp_path):
    path = export_json(example_record(), tmp_path / "new folder" / "run.json")
    assert import_json(path) == example_record()
    assert path.read_text() == to_json(example_record())


def test_run_without_measurements_round_trips(tmp_path):
    record = example_record(num_requests=0, num_steps=0, measured=None, counters=None, block_map=(), status="failed")
    assert import_json(export_json(record, tmp_path / "run.json")) == record


def test_parquet_holds_the_tables(tmp_path):
    requests, steps, complete = export_parquet(example_record(), tmp_path / "out")
    frame = pd.read_parquet(requests)
    assert list(frame.columns) == [field.name for field in dataclasses.fields(RequestRow)]
    assert frame["output_tokens"].tolist() == [3, 3, 3]
    assert list(frame["token_times_s"][0]) == [0.5, 1.0, 1.5]
    assert len(pd.read_parquet(steps)) == 5
    assert import_json(complete) == example_record()


def test_parquet_of_an_empty_run(tmp_path):
    requests, steps, _ = export_parquet(example_record(num_requests=0, num_steps=0), tmp_path)
    assert len(pd.read_parquet(requests)) == len(pd.read_parquet(steps)) == 0


def broken(**changes):
    data = json.loads(to_json(example_record()))
    for place, value in changes.items():
        *parents, last = place.split("__")
        target = data
        for parent in parents:
            target = target[int(parent)] if parent.isdigit() else target[parent]
        target[last] = value
    return data


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("9" * 5000, "not valid JSON"),
        ('{"x": NaN}', "not valid JSON"),
        ("[]", "not a labkit run"),
        ("{}", "not a labkit run"),
        (broken(version=2), "format version 2, this labkit reads up to 1"),
        (broken(version="1"), "format version 1"),
        (broken(record=None), "must be an object"),
        (broken(record__novelty=1), "does not know: 'novelty'"),
        (broken(record__statuss="x"), "the field status"),
        (broken(record__status="great"), "must be one of running, finished"),
        (broken(record__seed="7"), r"RunRecord|run\.json.seed must be int"),
        (broken(record__seed=True), "seed must be int"),
        (broken(record__duration_s="1"), "duration_s must be float"),
        (broken(record__config__block_size=-1), "block_size cannot be -1"),
        (broken(record__config__blok_size=1), "blok_size"),
        (broken(record__requests__0__arrival_s=None), "arrival_s must be float"),
        (broken(record__gpu=3), "gpu must be an object"),
        (broken(record__steps={}), "steps must be a list"),
        (broken(record__gpu={"name": "x"}), "lacks a field"),
    ],
)
def test_broken_files_say_what_is_wrong(tmp_path, data, words):
    path = tmp_path / "run.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(FileFormatError, match=words):
        import_json(path)


def test_missing_and_too_large_files(tmp_path, monkeypatch):
    with pytest.raises(FileFormatError, match="cannot read"):
        import_json(tmp_path / "missing.json")
    with pytest.raises(FileFormatError, match="cannot read"):
        import_json(tmp_path)
    path = export_json(example_record(), tmp_path / "run.json")
    monkeypatch.setattr("labkit.experiments.export.MAX_JSON_BYTES", path.stat().st_size)
    assert import_json(path) == example_record()
    monkeypatch.setattr("labkit.experiments.export.MAX_JSON_BYTES", path.stat().st_size - 1)
    with pytest.raises(FileFormatError, match="too large"):
        import_json(path)


def test_unwritable_target(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileFormatError, match="cannot write"):
        export_json(example_record(), tmp_path / "file" / "run.json")
    with pytest.raises(FileFormatError, match="cannot write"):
        export_parquet(example_record(), tmp_path / "file")


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner).map(tuple) | st.dictionaries(st.text().filter(lambda key: key != "$float"), inner),
    max_leaves=10,
)


@given(plain_values, st.text(), st.floats(allow_nan=False, allow_infinity=True))
def test_anything_plain_survives(details, text, number):
    plan = dataclasses.replace(example_record().plan, details={"x": details}, max_concurrency=number)
    record = dataclasses.replace(example_record(), plan=plan, note=text)
    data = json.loads(json.dumps(to_plain(record), allow_nan=False))
    assert from_plain(RunRecord, data) == record


def test_a_value_that_is_no_data_is_refused():
    with pytest.raises(FileFormatError, match="cannot store a value of type object"):
        to_plain({"x": object()})
