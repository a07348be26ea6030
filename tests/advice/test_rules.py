"""Which changes are tried under which limit; whether one helps is decided by planning it (`test_advise.py`)."""

from __future__ import annotations

import dataclasses

import pytest
from samples import sample_gpu, sample_plan, sample_record

from labkit.advice.limit import BindingLimit
from labkit.advice.rules import RULES
from labkit.measure.run_record import RequestRow
from labkit.specs.engine_config import EngineConfig

CONFIG = EngineConfig(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=4096)
GIVE_ROOM = {"fewer-seqs", "smaller-token-budget", "eager"}


def proposed(limit="kv_blocks", record=None, **changes):
    """Rule → the knobs it would set."""
    plan = sample_plan(CONFIG, gpu=sample_gpu(24.0))
    plan = dataclasses.replace(
        plan, breakdown=dataclasses.replace(plan.breakdown, cuda_graphs_bytes=2**29),
        **{"verdict": "fits", "config": CONFIG, **changes},
    )  # fmt: skip
    found = BindingLimit(limit, "it binds", None, (), "predicted")
    return {one.rule: one.changes for rule in RULES for one in rule(plan, record, found)}


@pytest.mark.parametrize("limit", ["kv_blocks", "weights"])
@pytest.mark.parametrize("verdict", ["fits", "may not fit", "does not fit"])
def test_where_memory_binds_what_takes_it_from_the_cache_is_made_smaller(limit, verdict):
    found = proposed(limit, verdict=verdict)
    assert found["fewer-seqs"] == {"max_num_seqs": 64}
    assert found["smaller-token-budget"] == {"max_num_batched_tokens": 1024}
    assert found["eager"] == {"enforce_eager": True}


def test_a_plan_in_doubt_is_given_room_whatever_binds_and_a_sure_one_is_not():
    assert proposed("max_num_seqs", verdict="may not fit").keys() >= GIVE_ROOM - {"fewer-seqs"}
    assert not proposed("max_num_seqs").keys() & GIVE_ROOM
    assert not proposed("traffic").keys() & GIVE_ROOM


def test_more_places_only_where_a_step_has_a_token_for_each():
    assert proposed("max_num_seqs")["more-seqs"] == {"max_num_seqs": 512}
    for budget, is_proposed in ((512, True), (511, False)):
        config = CONFIG.replace(max_num_batched_tokens=budget)
        assert ("more-seqs" in proposed("max_num_seqs", config=config)) == is_proposed


@pytest.mark.parametrize(("seqs", "fewer"), [(1024, 256), (257, 64), (65, 64), (64, None)])
def test_places_are_quartered_down_to_sixty_four(seqs, fewer):
    found = proposed(config=CONFIG.replace(max_num_seqs=seqs)).get("fewer-seqs")
    assert found == (None if fewer is None else {"max_num_seqs": fewer})


@pytest.mark.parametrize(("budget", "seqs", "halved"), [(1024, 256, 512), (1023, 256, None), (2048, 1025, None)])
def test_steps_are_halved_down_to_512_tokens_and_to_one_for_each_request(budget, seqs, halved):
    found = proposed(config=CONFIG.replace(max_num_batched_tokens=budget, max_num_seqs=seqs))
    assert found.get("smaller-token-budget") == (None if halved is None else {"max_num_batched_tokens": halved})


@pytest.mark.parametrize(("longest", "length"), [(500, 512), (512, 512), (513, 1024), (2049, None), (5000, None)])
def test_a_run_shortens_max_model_len_to_the_power_of_two_that_holds_its_longest_request(longest, length):
    rows = (RequestRow(0, 0.0, 1.0, 2.0, 10, 10), RequestRow(1, 0.0, 1.0, 2.0, longest - 100, 100))
    record = dataclasses.replace(sample_record(CONFIG), requests=rows)
    found = proposed("traffic", record).get("model-length")
    assert found == (None if length is None else {"max_model_len": length})
