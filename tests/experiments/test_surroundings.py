"""Odd surroundings of a session: few descriptors, no HOME, no TMPDIR, a clock that jumps, a model file that changes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, resource
sys.path.insert(0, {folder!r})
{before}
from example_runs import example_workload
from labkit.experiments import LabSession, LocalRunner, RunStore, Worker
runner = LocalRunner(Worker("fake_backend:FakeBackend"))
with LabSession("SmolLM2-135M-Instruct", "cpu", example_workload(), store={store!r}, runner=runner) as session:
    for _ in range(3):
        record = session.run()
    {after}
    print(record.status, len(session.store.list_runs()), session.store.location)
"""


def run(tmp_path, *, store=None, before="", after="", **environment):
    code = SCRIPT.format(folder=os.path.dirname(__file__), store=store, before=before, after=after)
    inherited = {name: value for name, value in os.environ.items() if name not in ("HOME", "LABKIT_HOME", "TMPDIR")}
    settings = {name: value for name, value in environment.items() if value is not None}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**inherited, **settings}, cwd=tmp_path, capture_output=True, text=True,
        check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split(maxsplit=2)


def test_sixty_four_descriptors_are_enough(tmp_path):
    before = "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
    assert run(tmp_path, store=str(tmp_path / "s.db"), before=before, HOME=str(tmp_path))[:2] == ["finished", "3"]


def test_home_with_a_space_and_a_letter_outside_ascii(tmp_path):
    home = tmp_path / "Heim der Zoë"
    home.mkdir()
    status, count, location = run(tmp_path, HOME=str(home), XDG_DATA_HOME=None)
    assert (status, count) == ("finished", "3")
    assert location.strip().startswith(str(home))


def test_without_home_the_store_is_where_labkit_home_says(tmp_path):
    assert run(tmp_path, HOME=None, LABKIT_HOME=str(tmp_path / "runs"))[:2] == ["finished", "3"]


def test_missing_temporary_folder(tmp_path):
    missing = str(tmp_path / "no such folder")
    assert run(tmp_path, store=str(tmp_path / "s.db"), HOME=str(tmp_path), TMPDIR=missing)[:2] == ["finished", "3"]


def test_wall_clock_set_back_an_hour_does_not_reach_the_times(tmp_path):
    before = "import time; now = time.time; time.time = lambda: now() - 3600 * (1 + (time.monotonic() % 2 > 1))"
    after = "assert all(0 < row.first_token_s <= row.finish_s < 60 for row in record.requests)"
    assert run(tmp_path, store=str(tmp_path / "s.db"), before=before, after=after, HOME=str(tmp_path))[1] == "3"


def test_model_file_that_is_cut_after_loading_kills_no_more_than_the_worker(tmp_path, smollm2_gguf):
    import labkit
    from labkit.errors import LabkitError
    from labkit.specs import synthetic_workload
    from labkit.specs.engine_config import EngineConfig

    path = Path(shutil.copy(smollm2_gguf, tmp_path / "model.gguf"))
    small = EngineConfig(cpu_memory_gib=0.7, max_model_len=64, max_num_batched_tokens=16, max_num_seqs=2)
    with labkit.Session(str(path), "cpu", synthetic_workload(1, 4, 2), store=tmp_path / "s.db") as session:
        assert session.run(small).status == "finished"
        os.truncate(path, 1000)
        assert session.run(small).status == "finished"
        session._runner.worker.kill()
        with pytest.raises(LabkitError):
            session.run(small)
        shutil.copy(smollm2_gguf, path)
        assert session.run(small).status == "finished"
