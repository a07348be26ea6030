"""Bad input at every public entry point: labkit's own error with what works, on one line, and no file is touched."""

from __future__ import annotations

import gzip
import json
import shutil
import sqlite3
from pathlib import Path

import pytest

import labkit
from labkit.advice import export_command
from labkit.doctor import examine_folder
from labkit.errors import (
    FileFormatError,
    LabkitError,
    OutOfRangeError,
    StoreError,
    UnknownNameError,
)
from labkit.experiments import import_json
from labkit.memory.log_explanation import explain_log_file
from labkit.models import load_model_weights, load_tokenizer
from labkit.report import write_report
from labkit.session import Session
from labkit.specs import synthetic_workload
from labkit.specs.gguf import read_gguf
from labkit.tune import tune

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD_ROW = "2023-11-16 18:15:46.6805900,374,44\n"


@pytest.fixture
def folder(tmp_path, smollm2_gguf):
    """Broken files of every kind."""
    with smollm2_gguf.open("rb") as file:
        (tmp_path / "cut.gguf").write_bytes(file.read(100_000))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": -1}')
    (tmp_path / "corrupt.csv").write_text(HEADER + GOOD_ROW + "yesterday,many,-3\n")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress((HEADER + 999 * GOOD_ROW).encode())[:60])
    (tmp_path / "run.json").write_text(json.dumps({"format": "labkit-run", "version": 99, "record": {}}))
    (tmp_path / "file").write_text("not a folder")
    labkit.RunStore(tmp_path / "newer.sqlite3").close()
    with sqlite3.connect(tmp_path / "newer.sqlite3") as database:
        database.execute("UPDATE labkit_meta SET value = '999' WHERE key = 'schema_version'")
    database.close()
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


CASES = {
    "unknown knob": (UnknownNameError, lambda at: labkit.EngineConfig(blok_size=16)),
    "knob below its range": (OutOfRangeError, lambda at: labkit.EngineConfig(block_size=-16)),
    "knob of another kind": (OutOfRangeError, lambda at: labkit.EngineConfig(block_size="many")),
    "unknown saved knob": (UnknownNameError, lambda at: labkit.EngineConfig.from_dict({"novelty": 1})),
    "unknown model": (LabkitError, lambda at: labkit.load_model("smollm9")),
    "missing model": (LabkitError, lambda at: labkit.load_model(at / "none.gguf")),
    "cut GGUF": (FileFormatError, lambda at: labkit.load_model(at / "cut.gguf")),
    "cut GGUF, read": (FileFormatError, lambda at: read_gguf(at / "cut.gguf")),
    "impossible config": (LabkitError, lambda at: labkit.load_model(at / "config.json")),
    "unknown card": (UnknownNameError, lambda at: labkit.load_gpu("H10O")),
    "unknown trace": (LabkitError, lambda at: labkit.load_workload("azure-2032")),
    "missing trace": (LabkitError, lambda at: labkit.load_workload(at / "none.csv")),
    "corrupt row": (FileFormatError, lambda at: labkit.load_workload(at / "corrupt.csv")),
    "cut trace": (FileFormatError, lambda at: labkit.load_workload(at / "cut.csv.gz")),
    "negative limit": (OutOfRangeError, lambda at: labkit.load_workload("azure-2023-conv", limit=-1)),
    "negative requests": (OutOfRangeError, lambda at: synthetic_workload(-1, 8, 8)),
    "unknown engine": (
        UnknownNameError,
        lambda at: labkit.plan(labkit.load_model(MODEL), labkit.load_gpu("cpu"), engine="vlm"),
    ),
    "session without traffic": (LabkitError, lambda at: Session(MODEL, "cpu", store=at / "new.sqlite3").run()),
    "store of a newer schema": (StoreError, lambda at: labkit.RunStore(at / "newer.sqlite3").list_runs()),
    "store that is no store": (StoreError, lambda at: labkit.RunStore(at / "file").list_runs()),
    "store in no folder": (StoreError, lambda at: labkit.RunStore(at / "file" / "runs.sqlite3").list_runs()),
    "run of a newer labkit": (FileFormatError, lambda at: import_json(at / "run.json")),
    "missing run": (FileFormatError, lambda at: import_json(at / "none.json")),
    "report nowhere": (LabkitError, lambda at: write_report(at / "file" / "r.html", created="2026-11-30")),
    "budget of nothing": (OutOfRangeError, lambda at: tune(MODEL, "cpu", budget_s=0)),
    "no version": (OutOfRangeError, lambda at: export_command("m", labkit.EngineConfig(), "latest")),
    "missing log": (LabkitError, lambda at: explain_log_file(at / "none.log")),
    "no tokenizer": (LabkitError, lambda at: load_tokenizer(at / "none")),
    "no weights": (
        LabkitError,
        lambda at: load_model_weights(labkit.load_model(MODEL), at, "float32", "auto"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_a_clear_error_and_nothing_is_lost(folder, case):
    kind, call = CASES[case]
    before = contents(folder)
    with pytest.raises(kind) as refused:
        call(folder)
    error = refused.value
    assert isinstance(error, LabkitError)
    assert error.works or error.needed or error.knob, f"says no way out: {error}"
    assert "\n" not in str(error)
    assert "Traceback" not in str(error)
    assert {name: data for name, data in contents(folder).items() if name in before} == before


FOUR_PARTS = {
    "config": lambda: labkit.EngineConfig(block_size=0),
    "length": lambda: labkit.plan(
        labkit.load_model(MODEL),
        labkit.load_gpu("cpu"),
        labkit.EngineConfig(max_model_len=4096, max_num_batched_tokens=64, enable_chunked_prefill=False),
    ),
}


@pytest.mark.parametrize("case", FOUR_PARTS)
def test_a_value_that_does_not_work_comes_with_one_that_does(case):
    with pytest.raises(LabkitError) as refused:
        FOUR_PARTS[case]()
    assert refused.value.knob
    assert refused.value.works


def test_a_broken_model_folder_is_examined_not_run(folder):
    shutil.copy(folder / "cut.gguf", folder / "model.safetensors")
    before = contents(folder)
    assert examine_folder(folder).exit_code != 0
    assert contents(folder) == before
