"""The experiments' tests share helper modules of this folder, which child processes import as well."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def store(tmp_path):
    from labkit.experiments.store import RunStore

    return RunStore(tmp_path / "runs.sqlite3")
