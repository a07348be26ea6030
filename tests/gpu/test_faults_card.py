"""Real faults on a card, each in a worker process of its own: illegal access, hung kernel, full card, kill, no host
memory, a card that another process fills. Each ends in advice; what was finished is kept, and the next run works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))

from fault_runs import check_a_faulty_run, mixed_workload

from labkit.errors import DoesNotFitError, WorkerError
from labkit.experiments import LabSession
from labkit.experiments.engine_backend import EngineBackend
from labkit.experiments.run import RunOptions
from labkit.experiments.runner import LocalRunner
from labkit.experiments.serialise import to_plain
from labkit.experiments.worker import Worker
from labkit.memory import plan as make_plan
from labkit.specs import load_gpu
from labkit.specs.engine_config import EngineConfig
from labkit.specs.model_spec import LayerSpec, ModelSpec

SMALL = ModelSpec(
    name="small", architecture="", model_type="llama",
    layers=(LayerSpec(kind="full", num_heads=4, num_kv_heads=2, head_dim=64),) * 2, hidden_size=256,
    intermediate_size=512, vocab_size=1024, max_position_embeddings=512, dtype="bfloat16",
)  # fmt: skip
# A fixed number of blocks, so that programs beside the tests change nothing.
CONFIG = EngineConfig(
    num_gpu_blocks_override=64, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=256,
    gpu_memory_utilization=0.03, load_format="dummy", enforce_eager=True,
)  # fmt: skip
STALL_S = 6.0


@pytest.fixture
def session(tmp_path):
    runner = LocalRunner(Worker("faulty_backend:FaultyBackend"), stall_timeout_s=STALL_S)
    with LabSession(SMALL, load_gpu("auto"), config=CONFIG, store=tmp_path / "runs", runner=runner) as session:
        yield session


FAULTS = {
    "illegal_access": (WorkerError, "a kernel read or wrote outside its tensors", "block_size", True),
    "spin": (WorkerError, f"not answered for {STALL_S:g} s during the run: a kernel hangs", "restarted", True),
    "kill": (WorkerError, r"signal 9 \(SIGKILL\)", "restarted", True),
    "fill the card": (
        DoesNotFitError,
        "ran out of memory during the run: CUDA out of memory",
        "less gpu_memory",
        False,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_run_ends_in_advice_and_the_next_run_works(session, fault):
    assert session.run(workload=mixed_workload()).status == "finished"
    check_a_faulty_run(session, fault, *FAULTS[fault])


def test_swap_space_that_the_host_lacks_is_refused_with_what_works(session):
    with pytest.raises(DoesNotFitError, match="no room for the KV of preempted requests") as caught:
        session.run(workload=mixed_workload(), swap_space=4000.0, preemption_mode="swap")
    assert caught.value.knob == "swap_space"
    assert "swap_space = " in caught.value.works
    assert session.run(workload=mixed_workload(), swap_space=0.1, preemption_mode="swap").status == "finished"


@pytest.mark.parametrize("number", [40, 150, 600])
def test_memory_that_ends_while_kernels_are_tried_and_captured(number):
    """Also inside a capture; the next attempt in the same process works."""
    from failing_memory import FailAt

    backend = EngineBackend()
    load = {"model": to_plain(SMALL), "source": "", "dtype": "auto", "load_format": "dummy", "device": "cuda"}
    plan = make_plan(SMALL, load_gpu("H200"), CONFIG.replace(enforce_eager=False))
    run = {"workload": to_plain(mixed_workload()), "options": to_plain(RunOptions())}
    backend.load(load, lambda event: None, lambda: False)
    with pytest.raises(DoesNotFitError, match="steps of this plan do not fit"), FailAt(number):
        backend.configure({"plan": to_plain(plan)}, lambda event: None, lambda: False)
    backend.configure({"plan": to_plain(plan)}, lambda event: None, lambda: False)
    answer = backend.run(run, lambda event: None, lambda: False)
    backend.close()
    assert answer["status"] == "finished"


HOLD = """
import sys, torch
kept = torch.empty(60 * 2**30, dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_card_that_another_process_fills_between_two_runs(session):
    """By now the engine keeps its pool, so the second plan needs more than is left of a card below 144 GiB."""
    whole = {"num_gpu_blocks_override": None}
    assert session.run(workload=mixed_workload()).status == "finished"
    other = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(DoesNotFitError, match="another process may hold its memory") as caught:
            session.run(workload=mixed_workload(), gpu_memory_utilization=0.6, **whole)
        works = float(caught.value.works.removeprefix("gpu_memory_utilization = "))
        assert 0.05 < works < 0.6
        assert session.run(workload=mixed_workload(), gpu_memory_utilization=0.05).status == "finished"
    finally:
        other.communicate(b"")
    assert session.run(workload=mixed_workload(), gpu_memory_utilization=0.3, **whole).status == "finished"
