"""Each claim has a verdict that follows from its numbers; some numbers are worked out here by hand."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from labkit.advice.claims import claim_ids, judge, judge_all, limits, on_card, speed
from labkit.advice.claims.on_card import excess_percent
from labkit.errors import UnknownNameError

ROOT = Path(__file__).parents[2]
GIB = 2**30
SMALL, SEVEN = "Qwen/Qwen2-0.5B", "Qwen/Qwen2-7B"


@pytest.fixture(scope="module")
def verdicts():
    return {verdict.claim: verdict for verdict in judge_all()}


def test_all_thirty_in_order_each_with_numbers_and_a_way_back(verdicts):
    assert tuple(verdicts) == claim_ids() == tuple(f"C{number:02d}" for number in range(1, 31))
    for verdict in verdicts.values():
        assert verdict.numbers
        assert verdict.conditions.endswith(".")
        assert verdict.how_to_rerun == f"labkit claims {verdict.claim}"
        assert verdict.verdict in ("holds", "wrong", "depends", "not tested")


def test_none_is_left_untested_and_what_was_measured_says_where(verdicts):
    assert [verdict.claim for verdict in verdicts.values() if verdict.verdict == "not tested"] == []
    runs = on_card.card_runs()
    small = runs["rows"]["reserved, small"]
    assert verdicts["C19"].numbers["measured on"].startswith(runs["card"])
    assert small["made"][:10] in verdicts["C19"].numbers["measured on"]
    # Bytes as torch counted them: reserved less allocated over allocated.
    excess = 100 * (small["reserved_bytes"] - small["allocated_bytes"]) / small["allocated_bytes"]
    assert small["at the peak"] == pytest.approx(excess)


def test_kv_bytes_by_hand(verdicts):
    # Qwen2-0.5B: 24 layers, 2 KV heads of 64; Qwen3-Embedding-0.6B: 28 layers, 8 KV heads of 128.
    assert verdicts["C10"].numbers["real, GiB"] == pytest.approx(64 * 4096 * 24 * 2 * 64 * 2 * 2 / GIB)
    assert verdicts["C10"].numbers["formula over real"] == pytest.approx(896 / 128)
    assert verdicts["C11"].numbers["real, GB"] == pytest.approx(32768 * 28 * 8 * 128 * 2 * 2 / 1e9, rel=1e-3)
    assert (verdicts["C10"].verdict, verdicts["C11"].verdict) == ("wrong", "wrong")


def test_block_tables_by_hand(verdicts):
    # 256 requests of 4,096 entries of 4 bytes.
    assert verdicts["C04"].numbers["block tables at block 8, MiB"] == 4.0


def test_smaller_blocks_waste_less(verdicts):
    shares = list(verdicts["C05"].numbers.values())
    assert shares == sorted(shares, reverse=True)
    assert min(shares) > 90


def test_fp8_halves_and_awq_does_not_touch_kv(verdicts):
    assert verdicts["C07"].verdict == "holds"
    assert set(list(verdicts["C07"].numbers.values())[:2]) == {0.5}
    assert verdicts["C08"].numbers["bytes of a KV block, 16 bit"] == verdicts["C08"].numbers["bytes of a KV block, AWQ"]


def test_graphs_matter_where_steps_are_short(verdicts):
    numbers = verdicts["C24"].numbers
    lost = {name: numbers[f"lost by eager mode, 8 requests, {name}, A10, %"] for name in (SMALL, SEVEN)}
    assert lost[SMALL] > 5 > lost[SEVEN] >= 0
    assert numbers["graphs of vLLM, Qwen2-7B, GiB"] > 0


def test_what_eager_mode_lost_on_a_card_is_worked_out_of_the_measured_rates(verdicts):
    for key, name in (("eager", SMALL), ("eager, seven", SEVEN)):
        row = on_card.card_runs()["rows"][key]
        lost = 100 * (row["graphs"] - row["eager"]) / row["graphs"]
        shown = verdicts["C24"].numbers[f"the same, measured with labkit's engine, 8 requests, {name}, %"]
        assert shown == pytest.approx(lost, rel=1e-3)
        assert row["details"]["graphs"]["graphs_bytes"] > 0 == row["details"]["eager"]["graphs_bytes"]
    assert verdicts["C24"].method == "measured on a card"


@pytest.mark.parametrize(("rates", "verdict"), [((100, 90, 50), "depends"), ((100, 95, 90), "wrong"),
                                                ((100, 80, 50), "holds")])  # fmt: skip
def test_the_verdict_on_logging_follows_the_measurement(monkeypatch, rates, verdict):
    row = {f"{which}{ending}": rate for which, rate in zip(("none", "a step", "a request"), rates, strict=True)
           for ending in ("", ", nothing overlaps")}  # fmt: skip
    monkeypatch.setattr(speed, "card_row", lambda key: row)
    found = speed.c30()
    assert (found.verdict, found.method) == (verdict, "measured on a card")
    assert found.numbers["throughput lost, a line in each step, %"] == pytest.approx(100 - rates[1])


def test_without_a_card_logging_is_timed_here(monkeypatch):
    monkeypatch.setattr(speed, "card_row", lambda key: None)
    found = speed.c30()
    assert (found.verdict, found.method) == ("depends", "timing on this CPU")
    assert found.numbers["lines in every step that make 15 %"] > 0


def test_counted_launches_say_what_the_simulated_ones_do(verdicts):
    launches = on_card.card_runs()["rows"]["counters"]["launches"]
    for launch in launches.values():
        # KV is read once, from DRAM: 128 requests of 8,192 tokens.
        assert launch["dram_bytes"] == pytest.approx(launch["kv_bytes"], rel=0.02)
    small = launches[f"{SMALL}, full, block 16"]
    assert small["kv_bytes"] == 128 * 8192 * 2 * 64 * 2 * 2
    assert verdicts["C28"].numbers["occupancy, % of that kernel, measured"] < 50
    assert verdicts["C28"].numbers["GB/s from DRAM of that kernel, measured"] > 0.8 * 4800


def test_more_requests_than_the_budget_allows_run_at_once(verdicts):
    assert all(count > 8 for count in verdicts["C16"].numbers.values())


def test_a_knob_that_vllm_lost_is_named(verdicts):
    for claim in ("C21", "C25"):
        assert "no" in verdicts[claim].numbers.values()


def test_unknown_claims_are_refused_with_the_nearest():
    with pytest.raises(UnknownNameError, match="C31"):
        judge("C31")
    assert judge(" c06 ").claim == "C06"


def test_verdicts_repeat():
    assert judge("C05") == judge("C05")


def test_results_and_page_are_what_the_code_gives(verdicts):
    stored = json.loads((ROOT / "results" / "claims.json").read_text(encoding="utf-8"))
    for row in stored["rows"]:
        assert row["verdict"] == verdicts[row["claim"]].verdict
        assert row["numbers"].keys() == verdicts[row["claim"]].numbers.keys()
        if row["method"] != "timing on this CPU":
            for name, value in verdicts[row["claim"]].numbers.items():
                assert row["numbers"][name] == (value if isinstance(value, str) else pytest.approx(value, rel=0.02))
    spec = importlib.util.spec_from_file_location("make_claims_page", ROOT / "tools" / "make_claims_page.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert (ROOT / "docs" / "claims.md").read_text(encoding="utf-8") == tool.page(stored)


def test_what_is_reserved_beyond_what_is_allocated():
    # Peaks: 1,150 of 1,000 bytes; ratios of the moments 50, 15 and 20 %.
    found = excess_percent([(100, 150), (1000, 1150), (0, 1150), (500, 600)])
    assert (found["at the peak"], found["median"], found["largest"]) == pytest.approx((15, 20, 50))
    assert excess_percent([]) == excess_percent([(0, 5)]) == {"at the peak": None, "median": None, "largest": None}


def test_without_a_measurement_on_a_card_a_claim_says_so(monkeypatch):
    monkeypatch.setattr(limits, "card_runs", lambda: {"card": "", "made": "", "rows": {}})
    assert limits.c19().verdict == "not tested"
    monkeypatch.setattr(on_card, "FILE", "no-such-file.json")
    on_card.card_runs.cache_clear()
    assert on_card.card_runs()["rows"] == {}
    on_card.card_runs.cache_clear()


@pytest.mark.parametrize(("excess", "verdict"), [((12, 14), "holds"), ((0.5, 12), "depends"), ((0.5, 40), "wrong")])
def test_the_verdict_on_reserved_memory_follows_the_measurement(monkeypatch, excess, verdict):
    rows = {f"reserved, {at}": {"what": str(at), "at the peak": value, "median": value}
            for at, value in enumerate(excess)}  # fmt: skip
    monkeypatch.setattr(limits, "card_runs", lambda: {"card": "X", "made": "2026-11-30T00", "rows": rows})
    monkeypatch.setattr(limits, "measured_on", lambda *keys: "X, 2026-11-30")
    found = limits.c19()
    assert found.verdict == verdict
    assert found.numbers["measured on"] == "X, 2026-11-30"


def test_measured_bandwidth_and_paging_are_worked_out_of_the_rows(verdicts):
    row = on_card.card_runs()["rows"]["max-num-seqs"]["details"]
    # Qwen2-7B: weights but the embedding table that a step does not read whole, 28 layers of 4 KV heads of 128.
    weights, token = 2 * (7_615_616_512 - 152_064 * 3584), 28 * 4 * 128 * 2 * 2
    use = {
        name: (found["num_steps"] * weights + token * found["tokens_read"]) / found["steps_s"]
        for name, found in row.items()
    }
    shown = verdicts["C18"].numbers["change when 300 requests come at once, measured, %"]
    assert shown == pytest.approx(100 * (use["256"] / use["64"] - 1), abs=0.5)
    paged = on_card.card_runs()["rows"]["paged"]
    assert verdicts["C26"].numbers["requests at once, contiguous, measured"] == 11
    gain = verdicts["C26"].numbers["throughput, paged over contiguous, measured"]
    assert gain == pytest.approx(paged["paged"] / paged["contiguous"], rel=1e-3)


@pytest.mark.parametrize(("longest_ms", "verdict"), [(51.0, "wrong"), (100.0, "depends")])
def test_the_verdict_on_first_tokens_follows_the_measurement_too(monkeypatch, longest_ms, verdict):
    row = {"4096": 50.0, "8192": 50.0, "32768": longest_ms}
    row["details"] = {name: {"alone": 5.0} for name in ("4096", "8192", "32768")}
    monkeypatch.setattr(limits, "card_row", {"max-model-len": row}.get)
    monkeypatch.setattr(limits, "measured_on", lambda *keys: "X, 2026-11-30")
    found = limits.c14()
    assert (found.verdict, found.method) == (verdict, "measured on a card")
    assert found.numbers["64 prompts of 1,000 tokens at once, measured, at 32768, ms"] == longest_ms
    monkeypatch.setattr(limits, "card_row", lambda key: None)
    assert (limits.c14().verdict, limits.c14().method) == ("wrong", "simulation")


@pytest.mark.parametrize(("rate", "verdict"), [(1020.0, "wrong"), (1040.0, "depends")])
def test_the_verdict_on_the_token_budget_follows_the_measurement_too(monkeypatch, rate, verdict):
    row = {"2048": 900.0, "8192": 1000.0, "49152": rate}
    row["details"] = {name: {"between_tokens_p99_ms": 7.0} for name in ("2048", "8192", "49152")}
    monkeypatch.setattr(limits, "card_row", {"step tokens": row}.get)
    monkeypatch.setattr(limits, "measured_on", lambda *keys: "X, 2026-11-30")
    found = limits.c17()
    assert (found.verdict, found.method) == (verdict, "measured on a card")
    assert found.numbers["p99 between tokens at 49152, measured, ms"] == 7.0
    monkeypatch.setattr(limits, "card_row", lambda key: None)
    assert limits.c17().method == "simulation"


@pytest.mark.parametrize(("light_s", "verdict"), [(1.0, "depends"), (0.5, "holds")])
def test_the_verdict_on_max_num_seqs_follows_the_measurement_too(monkeypatch, light_s, verdict):
    steps = {"num_steps": 200, "tokens_read": 0}
    rows = {
        "max-num-seqs": {"details": {"64": {**steps, "steps_s": 1.0}, "256": {**steps, "steps_s": 1.6}}},
        "max-num-seqs, light": {"details": {"64": {**steps, "steps_s": 1.0}, "256": {**steps, "steps_s": light_s}}},
    }
    monkeypatch.setattr(limits, "card_row", rows.get)
    monkeypatch.setattr(limits, "measured_on", lambda *keys: "X, 2026-11-30")
    found = limits.c18()
    assert (found.verdict, found.method) == (verdict, "measured on a card")
    assert found.numbers["change when 32 requests come at once, measured, %"] == pytest.approx(100 * (1 / light_s - 1))
    assert found.numbers["change when 300 requests come at once, measured, %"] == pytest.approx(-37.5)


def test_no_claim_that_a_card_decides_rests_on_simulation_alone(verdicts):
    for claim in ("C01", "C14", "C17", "C18", "C19", "C22", "C24", "C26", "C28", "C30"):
        assert verdicts[claim].method == "measured on a card"


def test_a_seven_b_reserves_little_more_than_it_hands_out():
    row = on_card.card_runs()["rows"]["reserved, seven"]
    # 7,615,616,512 parameters of 2 bytes are the least that can be allocated.
    assert row["allocated_bytes"] > 2 * 7_615_616_512
    assert row["at the peak"] == pytest.approx(100 * (row["reserved_bytes"] / row["allocated_bytes"] - 1))
    assert 0 < row["at the peak"] < 10
