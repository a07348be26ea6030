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
