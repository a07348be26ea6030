"""Rules by version: what is said to change, and when."""

from __future__ import annotations

import pytest

from labkit.errors import OutOfRangeError
from labkit.memory import Overrides, plan, vllm_rules
from labkit.memory.budget import capture_sizes
from labkit.memory.rules import parse_version
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_catalogue import catalogue_model
from labkit.specs.model_spec import LayerSpec, ModelSpec, StateSpec

GIB = 2**30
H100 = GpuSpec("H100 SXM", round(79.19 * GIB))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0.19.0", (0, 19, 0)), ("v0.6.4.post1", (0, 6, 4)), ("0.11", (0, 11, 0)), ("0.19.1rc1", (0, 19, 1))],
)
def test_versions_are_read(text, numbers):
    assert parse_version(text) == numbers


@pytest.mark.parametrize("text", ["", "newest", "-1", "ν0.3"])
def test_what_is_no_version_is_refused(text):
    with pytest.raises(OutOfRangeError) as refused:
        parse_version(text)
    assert refused.value.works == "0.33.0"


def test_every_minor_version_of_the_range_is_known():
    for minor in range(6, 34):
        assert vllm_rules(f"0.{minor}.0").note is None
    assert vllm_rules("0.5.3").is_older_than_known
    assert "0.6.0" in vllm_rules("0.5.3").note
    assert "0.33.0" in vllm_rules("0.40.0").note


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("utilization", ("0.20.1", 0.9), ("0.21.0", 0.92)),  # case D02
        ("graphs_in_budget", ("0.20.1", "none"), ("0.21.0", "runner1")),  # vLLM's issue 45178
        ("printed_tokens", ("0.20.0", "groups"), ("0.21.0", "concurrency")),  # case D15
        ("batches_in_flight", ("0.25.1", 1), ("0.26.0", 2)),  # case N35
        ("charges_others", ("0.8.0", True), ("0.10.0", False)),  # case D03
    ],
)
def test_when_a_rule_changed(name, before, after):
    for version, value in (before, after):
        assert getattr(vllm_rules(version), name) == value


@pytest.mark.parametrize(
    ("version", "length", "tokens"),
    [
        ("0.6.4", 32769, 512),  # chunked prefill by itself beyond 32,768 tokens
        ("0.6.5", 32769, 2048),  # vLLM's pull request 10544
        ("0.7.3", 131072, 2048),
        ("0.6.4", 32768, 32768),  # whole prompts, at least 2,048 tokens
        ("0.7.3", 1024, 2048),
    ],
)
def test_tokens_of_a_step_before_v1(version, length, tokens):
    found = plan(
        catalogue_model("meta-llama/Llama-3.1-8B-Instruct"), H100, EngineConfig(max_model_len=length), engine="vllm",
        engine_version=version,
    )  # fmt: skip
    assert found.config.max_num_batched_tokens == tokens


def test_an_older_versions_default_utilization_is_noted():
    model, config = catalogue_model("Qwen/Qwen3-8B"), EngineConfig(max_model_len=8192)
    assert any("0.9" in note for note in plan(model, H100, config, engine="vllm", engine_version="0.19.0").notes)
    assert not plan(model, H100, config, engine="vllm", engine_version="0.25.0").notes
    stated = config.replace(gpu_memory_utilization=0.9)
    assert not plan(model, H100, stated, engine="vllm", engine_version="0.19.0").notes


def test_graphs_move_into_the_budget_with_0_21():
    model = catalogue_model("Qwen/Qwen3-30B-A3B")
    config = EngineConfig(max_model_len=8192)
    pools = [
        plan(model, H100, config, engine="vllm", engine_version=version).details["ranks"][0]["available_kv_bytes"]
        for version in ("0.20.0", "0.21.0")
    ]
    eager = plan(model, H100, config.replace(enforce_eager=True), engine="vllm", engine_version="0.21.0")
    assert pools[0] > pools[1]
    assert eager.details["ranks"][0]["available_kv_bytes"] == pools[0]


def test_the_second_runner_samples_in_less_memory():
    qwen, moe = catalogue_model("Qwen/Qwen3-8B"), catalogue_model("Qwen/Qwen3-30B-A3B")
    assert [vllm_rules("0.25.1").model_runner(model) for model in (qwen, moe)] == [2, 1]
    assert vllm_rules("0.30.0").model_runner(moe) == 2
    assert vllm_rules("0.33.0").model_runner(catalogue_model("Qwen/Qwen3-Embedding-0.6B")) == 1
    peaks = [
        plan(qwen, H100, EngineConfig(max_model_len=8192), engine="vllm", engine_version=version).breakdown
        for version in ("0.19.0", "0.25.1")
    ]
    assert peaks[0].activation_bytes > 1.5 * peaks[1].activation_bytes


def test_an_occupied_card_is_said():
    model = catalogue_model("Qwen/Qwen2-0.5B")
    busy = Overrides(total_bytes=round(22.05 * GIB), free_bytes=round(19.77 * GIB))
    config = EngineConfig(gpu_memory_utilization=0.9)
    got = plan(model, GpuSpec("A10G", 1), config, engine="vllm", engine_version="0.10.0", overrides=busy)
    assert (got.verdict, "more than is free" in got.binding_limit) == ("does not fit", True)
    enough = plan(
        model, GpuSpec("A10G", 1), config.replace(gpu_memory_utilization=0.85), engine="vllm", engine_version="0.10.0",
        overrides=busy,
    )  # fmt: skip
    assert enough.verdict == "fits"


def test_more_requests_than_state_blocks_may_not_start():
    from labkit.memory.public_cases import case_file, case_model

    case = next(case for case in case_file()["cases"] if case["id"] == "N33")
    pool = Overrides(available_kv_bytes=round(31.24 * GIB))
    for seqs, verdict in ((256, "fits"), (1024, "may not fit")):  # 652 blocks, case D25
        config = EngineConfig(max_model_len=8192, max_num_seqs=seqs)
        card = GpuSpec("H100 SXM", 400 * GIB)
        got = plan(case_model(case), card, config, engine="vllm", engine_version="0.21.0", overrides=pool)
        assert got.verdict == verdict


def test_graphs_of_the_second_runner_come_into_the_budget_with_0_29():
    qwen = catalogue_model("Qwen/Qwen3-8B")  # vllm threads 49224 (its estimate was 0) and 53306 (merged August 2026)
    config = EngineConfig(max_model_len=8192)
    inside = {
        version: plan(qwen, H100, config, engine="vllm", engine_version=version).details["ranks"][0]["graphs_inside"]
        for version in ("0.20.0", "0.22.0", "0.25.1", "0.28.0", "0.29.0", "0.33.0")
    }
    assert list(inside.values()) == [False, True, False, False, True, True]


def test_the_estimate_for_hybrids_grows_with_batched_tokens_from_0_26_to_0_29():
    # vllm thread 50780: 4.2 GiB at 32,768 tokens with 0.26, 0.56 GiB with 0.23.
    state = StateSpec("gdn", ((3, 8192), (32, 128, 128)), ("auto", "float32"), (1, 0), 10_000_000)
    layers = (LayerSpec("state", state=state), LayerSpec("state", state=state), LayerSpec("full", 16, 2, 256)) * 12
    model = ModelSpec("hybrid", "Qwen3_5MoeForCausalLM", "qwen3_5_moe", layers, 2048, 5120, 151936, 262144)
    config = EngineConfig(max_model_len=8192, max_num_seqs=16, max_num_batched_tokens=32768)
    reserved = {
        version: plan(model, H100, config, engine="vllm", engine_version=version).details["ranks"][0]
        for version in ("0.24.0", "0.26.0", "0.30.0")
    }
    sizes = [rank["graphs_reserved_bytes"] / GIB for rank in reserved.values()]
    assert sizes[1] == pytest.approx(3.5, abs=0.1)
    assert max(sizes[0], sizes[2]) < 1


def test_graphs_are_captured_up_to_larger_batches_on_blackwell():
    sizes = capture_sizes(EngineConfig(max_num_seqs=1024))
    # Log of a 0.21 server with 128 requests: "PIECEWISE=35 (largest=256)"; H200 default: 51 sizes.
    assert (len(sizes), sizes[-1]) == (51, 512)
    assert len(capture_sizes(EngineConfig(max_num_seqs=128))) == 35
    assert capture_sizes(EngineConfig(enforce_eager=True)) == []
    model = catalogue_model("Qwen/Qwen3-8B")
    cards = [GpuSpec(name, 180 * GIB, compute_capability=version) for name, version in (("H", "9.0"), ("B200", "10.0"))]
    graphs = [
        plan(model, card, EngineConfig(max_num_seqs=1024), engine="vllm", engine_version="0.33.0").breakdown
        for card in cards
    ]
    assert graphs[1].cuda_graphs_bytes > 1.3 * graphs[0].cuda_graphs_bytes


def test_heads_that_cannot_be_divided_are_refused_with_what_works():
    model = catalogue_model("Qwen/Qwen2.5-7B-Instruct")  # 28 heads, and 4 KV heads that 7 cards cannot share
    with pytest.raises(OutOfRangeError) as refused:
        plan(model, H100, EngineConfig(tensor_parallel_size=8), engine="vllm")
    assert (refused.value.works, refused.value.knob) == ("4", "tensor_parallel_size")


def test_what_the_cards_generation_lacks_is_noted():
    model = catalogue_model("Qwen/Qwen3-8B")
    volta, ampere, ada = (GpuSpec("card", 40 * GIB, compute_capability=version) for version in ("7.0", "8.0", "8.9"))
    fp8 = EngineConfig(kv_cache_dtype="fp8", max_model_len=8192)

    def notes(card, config):
        return " ".join(plan(model, card, config, engine="vllm").notes)

    assert "bfloat16" in notes(volta, fp8)
    assert "bfloat16" not in notes(volta, fp8.replace(dtype="float16"))
    assert "fp8" in notes(ampere, fp8)  # case D21
    assert "fp8" not in notes(ada, fp8)
    assert "VLLM_ALLOW_LONG" in notes(ada, EngineConfig(max_model_len=50000))


def test_sparse_attention_has_an_fp8_format_of_its_own():
    layer = LayerSpec(
        "mla", 128, 1, 192, v_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128,
        index_head_dim=128, index_num_heads=64,
    )  # fmt: skip
    model = ModelSpec("v3.2", "DeepseekV32ForCausalLM", "deepseek_v32", (layer,) * 61, 7168, 18432, 129280, 163840)
    got = plan(model, H100, EngineConfig(block_size=64), engine="vllm")
    # 656 bytes of latent and 132 of the indexer's key (128 fp8 and a scale) for each token and layer.
    assert got.block_bytes == 61 * 64 * (656 + 132)


@pytest.mark.parametrize(
    ("version", "knobs", "seqs", "tokens"),
    [
        ("0.33.0", {"max_num_batched_tokens": 512}, 512, 512),  # 1,024 requests are the card's default
        ("0.33.0", {"max_num_batched_tokens": 4096}, 1024, 4096),
        ("0.33.0", {"max_num_seqs": 1, "max_model_len": 4096}, 1, 4096),  # 8,192 tokens are
        ("0.33.0", {"max_num_seqs": 4, "max_model_len": 4096}, 4, 8192),
        ("0.33.0", {"max_num_seqs": 1, "max_model_len": 1}, 1, 1),
        ("0.33.0", {"max_num_seqs": 1, "enable_chunked_prefill": False}, 1, 40960),
        ("0.10.0", {"max_num_seqs": 1, "max_model_len": 4096}, 1, 8192),
    ],
)
def test_defaults_are_bounded_by_what_the_other_knobs_allow(version, knobs, seqs, tokens):
    """`min(max_num_seqs · max_model_len, default)` tokens, and requests up to a stated number of tokens."""
    found = plan(catalogue_model("Qwen/Qwen3-8B"), H100, EngineConfig(**knobs), engine="vllm", engine_version=version)
    assert (found.config.max_num_seqs, found.config.max_num_batched_tokens) == (seqs, tokens)


def test_fewer_tokens_than_the_default_of_requests_were_refused_before():
    config = EngineConfig(max_num_batched_tokens=512)
    with pytest.raises(OutOfRangeError, match="max_num_batched_tokens"):
        plan(catalogue_model("Qwen/Qwen3-8B"), H100, config, engine="vllm", engine_version="0.10.0")
