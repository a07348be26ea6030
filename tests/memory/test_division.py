"""What cards and pipeline stages get of a model, against what vLLM's layers assert and its planner groups."""

from __future__ import annotations

import pytest

from labkit.errors import OutOfRangeError
from labkit.memory import Overrides, plan
from labkit.memory.questions import layout_of
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_catalogue import catalogue_model
from labkit.specs.model_spec import LayerSpec, ModelSpec, StateSpec, WeightFormat

GIB = 2**30
H200 = GpuSpec("H200", round(139.8 * GIB), compute_capability="9.0")
BLOCK_FP8 = WeightFormat("fp8", 8, 128 * 128, scale_bytes=4, method="fp8")
AWQ = WeightFormat("awq", 4, 128, True, method="awq")
FULL, WINDOW = LayerSpec("full", 32, 8, 128), LayerSpec("sliding", 32, 8, 128, window=1024)


def planned(model, version="0.33.0", **knobs):
    pool = Overrides(available_kv_bytes=40 * GIB)
    return plan(model, H200, EngineConfig(**knobs), engine="vllm", engine_version=version, overrides=pool)


def of_layers(*layers):
    return ModelSpec("hybrid", "Gemma3ForCausalLM", "gemma3_text", layers, 4096, 14336, 128256, 131072)


@pytest.mark.parametrize(
    ("name", "knobs", "says", "works", "knob"),
    [
        # 24 query heads divide by all of these, 8 KV heads do not: LlamaAttention asserts one way or the other.
        ("meta-llama/Llama-3.2-3B-Instruct", {"tensor_parallel_size": 3}, "8 KV heads", "2", "tensor_parallel_size"),
        ("meta-llama/Llama-3.2-3B-Instruct", {"tensor_parallel_size": 12}, "8 KV heads", "8", "tensor_parallel_size"),
        # 4 KV heads cannot be repeated on 7 cards although 28 query heads divide.
        ("Qwen/Qwen2.5-7B-Instruct", {"tensor_parallel_size": 7}, "4 KV heads", "4", "tensor_parallel_size"),
        # 9 heads, 3 KV heads and 1,536 columns.
        ("HuggingFaceTB/SmolLM2-135M-Instruct", {"tensor_parallel_size": 9}, "1,536 columns", "3",
         "tensor_parallel_size"),
        ("Qwen/Qwen3-0.6B", {"pipeline_parallel_size": 29}, "28 layers", "28", "pipeline_parallel_size"),
        # Without expert parallelism data-parallel ranks cut the experts' 768 columns.
        ("Qwen/Qwen3-30B-A3B", {"data_parallel_size": 5}, "768 expert columns",
         "--enable-expert-parallel", "data_parallel_size"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused_with_what_works(name, knobs, says, works, knob):
    with pytest.raises(OutOfRangeError, match=says) as refused:
        planned(catalogue_model(name), **knobs)
    assert (refused.value.works, refused.value.knob) == (works, knob)


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("Qwen/Qwen3-30B-A3B", {"tensor_parallel_size": 8}),  # 4 KV heads, each on two cards
        ("HuggingFaceTB/SmolLM2-135M-Instruct", {"tensor_parallel_size": 3}),
        ("deepseek-ai/DeepSeek-V3", {"tensor_parallel_size": 16}),  # MLA has no KV heads to divide
        ("openai/gpt-oss-20b", {"tensor_parallel_size": 64}),  # MXFP4's 2,880 columns are padded
        ("Qwen/Qwen3-30B-A3B", {"data_parallel_size": 5, "enable_expert_parallel": True}),
        ("Qwen/Qwen3-0.6B", {"pipeline_parallel_size": 28}),
    ],
)
def test_what_can_be_divided_is_planned(name, knobs):
    assert planned(catalogue_model(name), max_model_len=2048, **knobs).num_gpu_blocks > 0


@pytest.mark.parametrize(
    ("name", "weights", "cards", "columns", "works"),
    [
        # vllm-project/vllm 25292: Qwen3-30B-A3B-FP8 does not start on 4 cards; on 2 it does.
        ("Qwen/Qwen3-30B-A3B", BLOCK_FP8, 4, "768 expert columns over 4 cards are 192", "2"),
        # vllm-project/vllm 12256: DeepSeek-V3 does not start on 32 cards.
        ("deepseek-ai/DeepSeek-V3", BLOCK_FP8, 32, "18,432 columns over 32 cards are 576", "16"),
        # vllm-project/vllm 21695: 29,568 columns are 231 groups of 128, so AWQ takes one card.
        ("Qwen/Qwen2.5-72B-Instruct", AWQ, 2, "29,568 columns over 2 cards are 14784", "1"),
    ],
)
def test_cards_that_would_split_a_block_of_weights_are_noted(name, weights, cards, columns, works):
    model = catalogue_model(name).replace(weight_format=weights)

    def refusals(**knobs):
        notes = planned(model, max_model_len=2048, **knobs).notes
        return [note for note in notes if note.startswith("vLLM refuses tensor_parallel_size")]

    (note,) = refusals(tensor_parallel_size=cards)
    assert columns in note
    assert f"; {works}" in note
    assert refusals(tensor_parallel_size=int(works)) == []
    if "expert" in columns:
        assert refusals(tensor_parallel_size=cards, enable_expert_parallel=True) == []


def test_a_stage_keeps_its_layers_of_the_whole_models_groups():
    """Sliding, sliding, full, four times: sliding layers 0 3 6 9 and 1 4 7 10 are groups, and four full ones a third.

    Of layers 0 to 3 these hold 2, 1 and 1, so a block is two pages and two are padding; layers 0 to 3 by themselves
    would make four groups of one page.
    """
    model = of_layers(*(WINDOW, WINDOW, FULL) * 4)
    got = planned(model, pipeline_parallel_size=3, max_model_len=8192)
    rank = got.details["ranks"][0]
    assert [(group["kind"], group["num_layers"]) for group in rank["groups"]] == [
        ("full", 1), ("sliding", 2), ("sliding", 1)
    ]  # fmt: skip
    page = 16 * 2 * 8 * 128 * 2
    assert (rank["block_bytes"], rank["padding_layers"]) == (2 * page, 2)
    # One stage: every group has four layers.
    assert planned(model).block_bytes == 4 * page


@pytest.mark.parametrize(
    ("version", "architecture", "stages", "batches"),
    [
        ("0.33.0", "Gemma3ForCausalLM", 1, 2),
        ("0.33.0", "Gemma3ForCausalLM", 3, 4),  # second runner: one batch a stage and one more
        ("0.28.0", "Qwen3NextForCausalLM", 3, 3),  # first runner: one batch a stage
        ("0.28.0", "Qwen3NextForCausalLM", 1, 2),  # one stage, scheduled ahead
        ("0.25.1", "Gemma3ForCausalLM", 3, 1),
    ],
)
def test_windows_hold_the_tokens_of_every_batch_in_flight(version, architecture, stages, batches):
    """`max_concurrent_batches` of vLLM's config times max_num_batched_tokens, beside the window."""
    state = LayerSpec("state", state=StateSpec("gdn", ((3, 64), (4, 16, 16)), ("auto", "float32"), (1, 0), 1_000_000))
    extra = (state,) * 6 if architecture == "Qwen3NextForCausalLM" else ()
    model = of_layers(*(FULL, WINDOW) * 6, *extra).replace(architecture=architecture)
    got = planned(
        model, version, pipeline_parallel_size=stages, max_model_len=131072, max_num_batched_tokens=2048,
        max_num_seqs=64,
    )  # fmt: skip
    layout = layout_of(got)
    window = next(group.page for group in layout.groups if group.page.kind == "sliding")
    assert window.blocks_needed(131072, layout.in_flight_tokens, 1) == -(-(1023 + batches * 2048) // 16) + 1


def test_pages_that_do_not_divide_the_largest_are_padded_and_keep_their_tokens():
    """8 and 3 heads: vLLM pads 3 up to 8, and doubles only what doubles exactly."""
    got = planned(of_layers(FULL, LayerSpec("sliding", 33, 3, 128, window=1024)))
    pages = {group["kind"]: group for group in got.details["ranks"][0]["groups"]}
    assert (pages["sliding"]["block_tokens"], pages["full"]["block_tokens"]) == (16, 16)
    assert pages["sliding"]["page_bytes"] == pages["full"]["page_bytes"] == 16 * 2 * 8 * 128 * 2
    even = planned(of_layers(FULL, LayerSpec("sliding", 32, 4, 128, window=1024)))
    assert [group["block_tokens"] for group in even.details["ranks"][0]["groups"]] == [16, 32]


def test_switching_the_hybrid_manager_off_changes_only_what_is_mixed():
    """`unify_hybrid_kv_cache_specs` leaves a model whose layers all have one window as it is."""
    uniform, mixed = of_layers(*(WINDOW,) * 8), of_layers(*(FULL, WINDOW) * 4)
    off = {"disable_hybrid_kv_cache_manager": True}
    assert planned(uniform, **off).max_concurrency == planned(uniform).max_concurrency
    assert planned(mixed, **off).max_concurrency < planned(mixed).max_concurrency
    state = LayerSpec("state", state=StateSpec("gdn", ((3, 64),), ("auto",), (1,), 1_000_000))
    notes = planned(of_layers(FULL, state), **off).notes
    assert any(note.startswith("vLLM refuses disable_hybrid_kv_cache_manager") for note in notes)


@pytest.mark.parametrize("engine", ["vllm", "labkit"])
@pytest.mark.parametrize(
    ("knobs", "verdict"),
    [
        ({"kv_cache_memory_bytes": 60 * GIB}, "fits"),
        # 15.3 GiB of weights and 130 of pool are more than the card's 139.8.
        ({"kv_cache_memory_bytes": 130 * GIB}, "does not fit"),
        ({"num_gpu_blocks_override": 60 * GIB // (36 * 2**16)}, "fits"),
        ({"num_gpu_blocks_override": 130 * GIB // (36 * 2**16)}, "does not fit"),
    ],
)
def test_a_pool_of_stated_size_must_fit_beside_the_other_parts(engine, knobs, verdict):
    got = plan(catalogue_model("Qwen/Qwen3-8B"), H200, EngineConfig(max_num_seqs=64, **knobs), engine=engine)
    assert got.verdict == verdict
    if verdict == "does not fit":
        assert got.breakdown.free_bytes < 0
        assert next(iter(knobs)) in got.binding_limit
        assert "more than the card has" in got.binding_limit
