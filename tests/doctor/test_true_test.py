"""The true test computes: a wrong kernel, a wrong pool and a failing torch are each caught."""

from __future__ import annotations

import pytest

from labkit.doctor import card_test, true_test
from labkit.doctor.true_test import run_true_test


def test_all_is_well_here(one_thread):
    checks = {check.name: check for check in run_true_test()}
    assert set(checks) == {"paged-attention", "pool", "copy"}
    assert {check.status for name, check in checks.items() if name != "copy"} == {"ok"}
    assert checks["copy"].status in ("ok", "warning")
    # 64 blocks of 16 tokens, 2 heads of 32, K and V, 4 bytes.
    assert "planned 512 KiB, taken 512 KiB in 64 blocks" in checks["pool"].evidence


@pytest.mark.parametrize("error", [1e-3, float("nan"), float("inf")])
def test_a_wrong_kernel_is_caught(one_thread, monkeypatch, error):
    from labkit.engine.paged_attention import PagedAttention

    right = PagedAttention.attend

    def wrong(self, *arguments):
        out = right(self, *arguments)
        out[0, 0, 0] += error
        return out

    monkeypatch.setattr(PagedAttention, "attend", wrong)
    assert true_test.check_attention().status == "problem"


def test_a_wrong_block_table_is_caught(one_thread, monkeypatch):
    placed = true_test._placed

    def shifted(*arguments):
        spans, slots = placed(*arguments)
        return spans, slots.flip(0)

    monkeypatch.setattr(true_test, "_placed", shifted)
    assert true_test.check_attention().status == "problem"


def test_a_pool_of_another_size_is_caught(one_thread, monkeypatch):
    cache = true_test._cache
    monkeypatch.setattr(true_test, "_cache", lambda spec, num_blocks: cache(spec, num_blocks + 1))
    assert true_test.check_pool(8).status == "problem"


def test_a_torch_that_fails_is_a_problem_and_no_crash(one_thread, monkeypatch):
    def fails(*arguments, **keywords):
        raise RuntimeError("illegal instruction")

    monkeypatch.setattr(one_thread, "randn", fails)
    (first, *_) = run_true_test()
    assert first.status == "problem"
    assert "illegal instruction" in first.evidence


def test_no_torch_is_unknown(monkeypatch):
    monkeypatch.setattr(true_test, "find_spec", lambda name: None)
    (check,) = run_true_test()
    assert check.status == "unknown"
    assert check.fix == "pip install torch"


def test_the_cards_kernel_in_the_interpreter(one_thread):
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("Triton compiles in this process")
    check = card_test.check_card_attention("cpu")
    assert check.status == "ok", check


def test_a_wrong_kernel_on_the_card_is_caught(one_thread, monkeypatch):
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("Triton compiles in this process")
    from labkit_kernels import paged_decode

    right = paged_decode.paged_decode
    monkeypatch.setattr(paged_decode, "paged_decode", lambda *a, **k: right(*a, **k) * 1.01)
    assert card_test.check_card_attention("cpu").status == "problem"


def test_no_triton_is_unknown(monkeypatch):
    monkeypatch.setattr(card_test, "find_spec", lambda name: None)
    assert card_test.check_card_attention().status == "unknown"


def test_on_a_card_the_card_is_tested_and_a_failing_one_is_a_problem(one_thread, monkeypatch):
    def fails(*arguments):
        raise one_thread.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(one_thread.cuda, "is_available", lambda: True)
    monkeypatch.setattr(true_test, "check_card_attention", fails)
    monkeypatch.setattr(one_thread.cuda, "mem_get_info", fails)
    found = [check for check in run_true_test() if check.name == "true-test"]
    assert [check.status for check in found] == ["problem"] * 3
    assert "CUDA out of memory" in found[0].evidence


class FakeCard:
    """torch.cuda of a card of `total` bytes with `free` bytes, whose allocations end at `free`."""

    def __init__(self, monkeypatch, torch, free, total):
        self.taken = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, total))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Fake")

        def empty(num_bytes, **keywords):
            self.taken.append(num_bytes)
            if sum(self.taken) > free:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return object()

        monkeypatch.setattr(torch, "empty", empty)


@pytest.fixture
def planned():
    from labkit.memory import plan
    from labkit.specs import load_gpu, load_model
    from labkit.specs.engine_config import EngineConfig

    return plan(load_model("Qwen/Qwen3-0.6B"), load_gpu("H200"), EngineConfig(gpu_memory_utilization=0.5))


def test_the_planned_pool_is_taken_as_one_server_would(one_thread, monkeypatch, planned):
    card = FakeCard(monkeypatch, one_thread, planned.gpu.total_bytes, planned.gpu.total_bytes)
    assert card_test.check_planned_pool(planned).status == "ok"
    assert card.taken == [planned.breakdown.weights_bytes, planned.num_gpu_blocks * planned.block_bytes]


def test_memory_that_is_not_free_names_the_utilization_that_is(one_thread, monkeypatch, planned):
    total = planned.gpu.total_bytes
    FakeCard(monkeypatch, one_thread, total // 4, total)
    check = card_test.check_planned_pool(planned)
    assert check.status == "problem"
    assert "--gpu-memory-utilization 0.24" in check.fix


def test_a_plan_for_another_card_takes_nothing(one_thread, monkeypatch, planned):
    card = FakeCard(monkeypatch, one_thread, 80 * 2**30, 80 * 2**30)
    check = card_test.check_planned_pool(planned)
    assert check.status == "unknown"
    assert "H200" in check.cause
    assert card.taken == []


def test_preflight_without_a_card_says_that_the_pool_was_not_taken(one_thread):
    from labkit.doctor.machine import Machine
    from labkit.doctor.preflight import preflight_of

    found = preflight_of("Qwen/Qwen3-0.6B", "H200", {}, Machine(), test=True)
    check = next(check for check in found.checks if check.name == "planned-pool")
    assert check.status in ("unknown", "ok")
