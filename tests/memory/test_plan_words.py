"""What a plan says in words: reasons with their numbers, and flags that do nothing."""

from __future__ import annotations

import pytest

from labkit.memory import Overrides, plan
from labkit.specs import load_gpu, load_model
from labkit.specs.engine_config import EngineConfig

GIB = 2**30


def planned(model, gpu, *, version="0.33.0", overrides=None, **knobs):
    return plan(
        load_model(model), load_gpu(gpu), EngineConfig(**knobs), engine="vllm", engine_version=version,
        overrides=overrides,
    )  # fmt: skip


def said(found, start):
    return [note for note in found.notes if note.startswith(start)]


def test_a_doubt_says_how_near_it_is():
    """Gemma 3 27B in one H100 at its full length: a request more or less inside the uncertainty."""
    found = planned("google/gemma-3-27b-it", "H100 SXM", max_model_len=131072)
    assert found.verdict == "may not fit"
    (doubt,) = said(found, "may not fit: ")
    assert "one request of 131,072 tokens leaves" in doubt
    assert "sure to ±" in doubt


def test_a_plan_that_is_sure_has_no_doubt():
    found = planned("Qwen/Qwen3-0.6B", "H200")
    assert found.verdict == "fits"
    assert not said(found, "may not fit")


def test_what_is_short_is_said_in_bytes():
    """15 GiB of weights in a card of 14.6."""
    found = planned("meta-llama/Llama-3.1-8B-Instruct", "T4")
    assert found.binding_limit.startswith("weights and activations leave nothing for KV: they take 2.6")
    assert "more than the budget 13.4 GiB" in found.binding_limit


def test_a_length_that_does_not_fit_is_said_with_what_it_needs():
    """Llama 3.1 8B keeps 128 KiB a token: 131,072 tokens are 16 GiB."""
    pool = Overrides(available_kv_bytes=4 * GIB)
    found = planned("meta-llama/Llama-3.1-8B-Instruct", "L4", overrides=pool)
    assert "one request needs 16.0 GiB of KV and there are" in found.binding_limit


def test_a_busy_card_is_said_with_what_is_free():
    busy = Overrides(total_bytes=80 * GIB, free_bytes=20 * GIB)
    found = planned("Qwen/Qwen3-0.6B", "H100 SXM", overrides=busy, gpu_memory_utilization=0.9)
    assert found.verdict == "does not fit"
    assert found.binding_limit == ("gpu_memory_utilization asks for 72.0 GiB, more than is free on the card: 20.0 GiB")


def test_a_stage_is_named_with_its_layers():
    found = planned(
        "meta-llama/Llama-3.1-70B-Instruct", "A100-80GB", tensor_parallel_size=2, pipeline_parallel_size=2,
        max_num_seqs=16,
    )  # fmt: skip
    assert "pipeline stage 0 of 2 (layers 0 to 39)" in found.binding_limit
    assert "max_num_seqs allows 16" in found.binding_limit


@pytest.mark.parametrize(
    ("model", "knobs", "part", "words"),
    [
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", {"tensor_parallel_size": 2}, "activation", "copies for its experts"),
        ("deepseek-ai/DeepSeek-V2-Lite", {}, "weights", "MLA's up-projections a second time"),
        ("google/gemma-3-27b-it", {}, "weights", "the vision tower"),
        ("google/gemma-3-27b-it", {}, "activation", "embeddings of images"),
        ("Qwen/Qwen3-0.6B", {"tensor_parallel_size": 2}, "workspace", "the exchange between 2 cards"),
        ("Qwen/Qwen3-0.6B", {}, "workspace", "what libraries take outside torch ="),
    ],
)
def test_a_formula_names_all_that_is_in_its_number(model, knobs, part, words):
    assert words in planned(model, "H200", **knobs).formulas[part]


def test_embeddings_are_not_sampled():
    assert "sampling" not in planned("Qwen/Qwen3-Embedding-0.6B", "L4").formulas["activation"]


def test_eager_plans_charge_no_graphs():
    assert "graphs" not in planned("Qwen/Qwen3-0.6B", "L4", enforce_eager=True).formulas["kv_cache"]


def test_swap_space_is_gone_since_0_18():
    (note,) = said(planned("Qwen/Qwen3-0.6B", "L4", swap_space=4), "vLLM 0.33.0 has no --swap-space")
    assert "computed again" in note
    assert not said(planned("Qwen/Qwen3-0.6B", "L4", version="0.17.0", swap_space=4), "vLLM 0.17")


def test_awq_weights_are_made_beforehand():
    knobs = {"quantization": "awq"}
    assert any("made beforehand" in note for note in planned("Qwen/Qwen3-8B", "L4", **knobs).notes)
    assert not any("made beforehand" in note for note in planned("Qwen/Qwen3-8B", "L4", quantization="fp8").notes)


def test_experts_are_spread_only_where_there_are_some():
    knobs = {"enable_expert_parallel": True, "tensor_parallel_size": 2}
    assert said(planned("Qwen/Qwen3-8B", "H200", **knobs), "--enable-expert-parallel changes nothing")
    assert not said(planned("Qwen/Qwen3-30B-A3B", "H200", **knobs), "--enable-expert-parallel")


def test_images_are_said_to_be_missing():
    assert said(planned("google/gemma-3-27b-it", "H200"), "what the vision tower computes")
    assert not said(planned("google/gemma-3-270m", "H200"), "what the vision tower")


def test_small_cards_without_fast_links_have_room_for_the_exchange():
    """Four T4: NCCL over PCIe takes no GiB, so 92 % of a card are there to take (cases N23, N60)."""
    found = planned("meta-llama/Llama-3.1-8B-Instruct", "T4", tensor_parallel_size=4, max_model_len=8192)
    assert found.verdict == "fits"


def test_a_model_that_labkit_does_not_run_is_named():
    spec, card = load_model("deepseek-ai/DeepSeek-V2-Lite"), load_gpu("H200")
    found = plan(spec, card, EngineConfig(), engine="labkit")
    assert found.notes[0].startswith("labkit's engine lacks mla layers")
    assert found.num_gpu_blocks == plan(spec, card, EngineConfig(), engine="vllm").num_gpu_blocks
