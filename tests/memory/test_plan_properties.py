"""What must hold for every configuration: sums, monotony, and agreement of the plan with its inverse."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.memory import Overrides, plan
from labkit.memory.questions import Question, concurrent_requests, kv_bytes_for, layout_of, smallest_utilization
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import LayerSpec, ModelSpec, StateSpec

GIB = 2**30
CARD = GpuSpec("H100 SXM", round(79.19 * GIB))
VERSIONS = ("0.6.5", "0.8.5", "0.11.0", "0.19.0", "0.25.1", "0.28.0", "0.33.0")


@st.composite
def layers(draw):
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    dim = draw(st.sampled_from([64, 128]))
    full = LayerSpec("full", heads * 4, heads, dim)
    window = LayerSpec("sliding", heads * 4, heads, dim, window=draw(st.sampled_from([128, 1024])))
    state = StateSpec("gdn", ((3, 8192), (32, 128, 128)), ("auto", "float32"), (1, 0), 10_000_000)
    mla = LayerSpec("mla", 16, 16, 192, v_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128)
    kind = draw(st.sampled_from(["full", "window", "state", "mla"]))
    number = draw(st.integers(1, 24))
    if kind == "mla":
        return (mla,) * number
    other = {"full": full, "window": window, "state": LayerSpec("state", state=state)}[kind]
    return (full, *[other] * draw(st.integers(1, 5))) * number


@st.composite
def models(draw):
    return ModelSpec(
        "drawn", "LlamaForCausalLM", "llama", draw(layers()), draw(st.sampled_from([1024, 4096])),
        draw(st.sampled_from([3072, 14336])), draw(st.sampled_from([32000, 151936])), 131072,
    )  # fmt: skip


@st.composite
def configs(draw):
    seqs = draw(st.sampled_from([1, 64, 256, 1024]))
    return EngineConfig(
        max_model_len=draw(st.sampled_from([512, 4096, 8001, 32768])),
        max_num_seqs=seqs,
        max_num_batched_tokens=draw(st.sampled_from([2048, 8192])),
        block_size=draw(st.sampled_from([16, 32, 64])),
        kv_cache_dtype=draw(st.sampled_from(["auto", "fp8"])),
        gpu_memory_utilization=draw(st.floats(0.3, 0.97)),
        enforce_eager=draw(st.booleans()),
        tensor_parallel_size=draw(st.sampled_from([1, 2, 4])),
    )


versions = st.sampled_from(VERSIONS)
few = settings(max_examples=60, deadline=None)


def planned(model, config, version="0.33.0", **overrides):
    return plan(model, CARD, config, engine="vllm", engine_version=version, overrides=Overrides(**overrides))


@few
@given(models(), configs(), versions)
def test_parts_sum_to_the_total_and_nothing_is_negative(model, config, version):
    got = planned(model, config, version)
    parts = got.breakdown.parts()
    assert sum(parts.values()) == got.breakdown.total_bytes
    assert all(size >= 0 for part, size in parts.items() if part != "free")
    assert got.breakdown.kv_cache_bytes == got.num_gpu_blocks * got.block_bytes
    rank = got.details["ranks"][0]
    assert got.num_gpu_blocks == max(0, rank["available_kv_bytes"] // got.block_bytes)


@few
@given(models(), configs(), versions, st.integers(1, 60))
def test_capacity_falls_with_length_width_and_layers(model, config, version, pool_gib):
    pool = {"available_kv_bytes": pool_gib * GIB}
    base = planned(model, config, version, **pool)
    longer = planned(model, config.replace(max_model_len=65536), version, **pool)
    assert longer.max_concurrency <= base.max_concurrency + 1e-9
    narrow = planned(model, config.replace(kv_cache_dtype="fp8"), version, **pool)
    wide = planned(model, config.replace(kv_cache_dtype="auto"), version, **pool)
    assert wide.max_concurrency <= narrow.max_concurrency * (1 + 1e-9)
    deeper = planned(model.replace(layers=model.layers * 2), config, version, **pool)
    assert deeper.max_concurrency <= base.max_concurrency + 1e-9


@few
@given(models(), configs(), versions, st.integers(1, 60))
def test_the_longest_request_fits_and_one_token_more_does_not(model, config, version, pool_gib):
    pool = {"available_kv_bytes": pool_gib * GIB}
    longest = planned(model, config, version, **pool).max_model_len_that_fits
    if longest:
        assert planned(model, config.replace(max_model_len=longest), version, **pool).margin_bytes >= 0
    if longest < model.max_position_embeddings:
        more = planned(model, config.replace(max_model_len=longest + 1), version, **pool)
        assert more.margin_bytes < 0
        assert more.verdict == "does not fit"


@few
@given(models(), configs())
def test_the_smallest_utilization_is_enough_and_the_next_smaller_is_not(model, config):
    question = Question(model, CARD, config)
    share = smallest_utilization(question)
    if share is None:
        assert question.plan(gpu_memory_utilization=1.0).margin_bytes < 0
    else:
        assert question.plan(gpu_memory_utilization=share).margin_bytes >= 0
        if share > 0.011:
            smaller = question.plan(gpu_memory_utilization=round(share - 0.001, 3))
            assert smaller.margin_bytes < 0 or smaller.num_gpu_blocks == 0


@few
@given(models(), configs(), st.integers(1, 8))
def test_kv_bytes_for_requests_hold_them(model, config, requests):
    length = config.max_model_len
    base = planned(model, config)
    exact = planned(model, config, available_kv_bytes=kv_bytes_for(base, requests, length))
    assert exact.max_concurrency >= requests
    has_states = any(layer.kind == "state" for layer in model.layers)  # then every running request needs a block
    assert exact.verdict == "fits" or (has_states and exact.verdict == "may not fit")


@few
@given(models(), configs(), versions)
def test_requests_of_one_length_agree_with_the_printed_concurrency(model, config, version):
    got = planned(model, config, version)
    if version == "0.6.5":
        return  # V0 prints tokens over length, not whole blocks
    expected = min(config.max_num_seqs, int(got.max_concurrency + 1e-9))
    assert concurrent_requests(got, [config.max_model_len]) == expected
    assert layout_of(got).blocks_per_request(config.max_model_len) == math.ceil(
        got.details["needed_bytes"] / got.block_bytes
    )


@few
@given(models(), configs())
def test_two_cards_halve_kv_of_divisible_heads_and_never_of_mla(model, config):
    one, two = (planned(model, config.replace(tensor_parallel_size=size)) for size in (1, 2))
    layer = model.layers[0]
    if layer.kind == "mla" or layer.num_kv_heads == 1:
        assert two.block_bytes >= one.block_bytes // 2
        if layer.kind == "mla":
            assert two.block_bytes == one.block_bytes
    elif all(layer.kind in ("full", "sliding") for layer in model.layers):
        assert two.block_bytes * 2 == one.block_bytes
    assert two.breakdown.weights_bytes < one.breakdown.weights_bytes


@few
@given(models(), configs(), st.sampled_from([2, 4]))
def test_stages_split_the_layers_and_the_poorest_binds(model, config, stages):
    if model.num_layers < stages:
        return
    got = planned(model, config.replace(pipeline_parallel_size=stages))
    ranks = got.details["ranks"]
    assert [rank["first_layer"] for rank in ranks][1:] == [rank["last_layer"] + 1 for rank in ranks][:-1]
    assert ranks[-1]["last_layer"] == model.num_layers - 1
    with_cache = [rank["num_blocks"] for rank in ranks if rank["block_bytes"]]
    assert got.num_gpu_blocks == min(with_cache, default=0)
