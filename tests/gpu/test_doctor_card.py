"""The doctor on a machine with a card: its true tests compute, the planned pool is taken, nothing stays behind."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def examined():
    """`labkit doctor --json` in a process of its own: exit code and document."""
    call = "import sys; sys.argv[1:] = ['doctor', '--json']; from labkit.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr[-2000:]
    return done.returncode, json.loads(done.stdout)


def statuses(document):
    return {check["name"]: check["status"] for check in document["checks"]}


def test_the_true_tests_pass_on_this_card(examined):
    _, document = examined
    found = statuses(document)
    for name in ("paged-attention", "pool", "card-attention", "card-pool", "card-copy"):
        assert found[name] in ("ok", "warning"), document


def test_exit_code_says_the_worst_status(examined):
    code, document = examined
    worst = set(statuses(document).values())
    assert code == (2 if "problem" in worst else 1 if "warning" in worst else 0)


def test_the_card_is_named_with_driver_and_capability(examined):
    import torch

    evidence = " ".join(check["evidence"] for check in examined[1]["checks"])
    assert torch.cuda.get_device_name() in evidence
    assert "{}.{}".format(*torch.cuda.get_device_capability()) in evidence


def test_the_planned_pool_is_given_back():
    import torch

    from labkit.doctor.card_test import check_planned_pool
    from labkit.memory import plan
    from labkit.specs import load_gpu, load_model
    from labkit.specs.engine_config import EngineConfig

    free = torch.cuda.mem_get_info()[0]
    found = plan(load_model("Qwen/Qwen3-0.6B"), load_gpu("auto"), EngineConfig(gpu_memory_utilization=0.3))
    assert check_planned_pool(found).status == "ok"
    assert abs(torch.cuda.mem_get_info()[0] - free) < 2**28


def test_a_pool_beyond_what_is_free_names_the_utilization():
    import torch

    from labkit.doctor.card_test import check_planned_pool
    from labkit.memory import plan
    from labkit.specs import load_gpu, load_model
    from labkit.specs.engine_config import EngineConfig

    free, total = torch.cuda.mem_get_info()
    other_server = torch.empty(int(0.6 * free), dtype=torch.uint8, device="cuda")
    found = plan(load_model("Qwen/Qwen3-0.6B"), load_gpu("auto"), EngineConfig(gpu_memory_utilization=0.9))
    check = check_planned_pool(found)
    del other_server
    torch.cuda.empty_cache()
    assert check.status == "problem"
    share = float(check.fix.split()[-1])
    assert 0.3 < share < (0.4 * free) / total + 0.01
