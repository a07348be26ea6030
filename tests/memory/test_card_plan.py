"""The plan of labkit's engine on a card: parts that were measured, and the engine's own arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.errors import OutOfRangeError
from labkit.memory import Overrides, plan
from labkit.memory.caching_allocator import CachingAllocator, PeakMeter
from labkit.memory.card_parts import (
    activation_bytes,
    captures_largest,
    card_constants,
    card_layout,
    card_parts,
    card_weights_bytes,
    graphs_bytes,
    staged_bytes,
)
from labkit.memory.kernel_settings import attention_settings
from labkit.memory.resolve import resolve_config
from labkit.memory.rules import vllm_rules
from labkit.memory.step_buffers import step_model
from labkit.memory.step_shapes import graph_shapes
from labkit.specs import load_gpu, load_model
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec

MIB, GIB = 2**20, 2**30
CARD = load_gpu("H200")
ROWS = json.loads((Path(__file__).parent / "data" / "labkit_parts.json").read_text(encoding="utf-8"))["rows"]
FACTS = ("num_layers", "captures_largest", "model")


def resolved(model, gpu=CARD, **knobs):
    return resolve_config(model, gpu, EngineConfig(**knobs), vllm_rules("0.33.0"))


def case(row):
    """Model and configuration of a measured row."""
    spec = load_model(row["model"])
    spec = spec.replace(layers=spec.layers[: row["num_layers"]])
    knobs = {name: value for name, value in row.items() if name not in FACTS and not name.endswith("_bytes")}
    return spec, resolved(spec, **knobs)


def name_of(row):
    return f"{row['model'].split('/')[1]}-{row['max_num_batched_tokens']}-{row['max_num_seqs']}-{row['quantization']}"


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_measured_parts_are_foretold(row):
    """Weights and tables to the byte; the peak but for pieces of segments that earlier engines left free; segments of
    graphs but for one."""
    spec, config = case(row)
    parts = card_parts(spec, CARD, config)
    assert parts.weights_bytes == row["weights_bytes"]
    assert parts.tables_bytes == row["tables_bytes"]
    assert abs(parts.activation_bytes - row["activation_bytes"]) <= 1.5 * MIB
    held, charged = segments(step_model(spec, CARD, config), row["captures_largest"])
    assert abs(charged - row["first_graphs_bytes"]) <= 4 * MIB
    if "graphs_bytes" in row:
        assert abs(held - row["graphs_bytes"]) <= 16 * MIB


def segments(facts, largest):
    """What graphs hold and what the engine charges, without the driver's constant for each graph."""
    each = card_constants().graph_driver_bytes
    shapes = graph_shapes(facts.config, largest=largest)
    count, first = sum(map(len, shapes)), sum(min(2, len(kind)) for kind in shapes)
    held, charged = graphs_bytes(facts, largest)
    return held - count * each, charged - (count - first) * each


def test_most_measured_parts_are_exact():
    """Of 37 rows; the others are off by rests."""
    peaks = exact = 0
    for row in ROWS:
        spec, config = case(row)
        facts = step_model(spec, CARD, config)
        peaks += activation_bytes(facts) == row["activation_bytes"]
        charged = segments(facts, row["captures_largest"])[1]
        exact += abs(charged - row["first_graphs_bytes"]) <= 2 * MIB
    assert peaks >= 35
    assert exact >= len(ROWS) - 1


class TestExactly:
    """The pool from parts that were measured is the engine's own arithmetic."""

    @settings(max_examples=60, deadline=None)
    @given(
        st.integers(1, 140 * GIB), st.integers(0, 4 * GIB), st.integers(0, 4 * GIB), st.integers(0, 200 * MIB),
        st.integers(0, 200 * MIB), st.sampled_from([0.02, 0.1, 0.37, 0.9]),
        st.sampled_from(["auto", "fp8", "int8_per_token_head"]),
    )  # fmt: skip
    def test_blocks_are_those_of_the_executor(self, weights, activation, graphs, tables, workspace, share, kv):
        import torch

        from labkit.engine.cuda_cache import cache_format
        from labkit.engine.cuda_memory import CardMemory, StepCosts, pool_of
        from labkit.errors import DoesNotFitError

        measured = Overrides(
            weights_bytes=weights, activation_bytes=activation, cuda_graphs_bytes=graphs, tables_bytes=tables,
            non_torch_bytes=workspace,
        )  # fmt: skip
        spec = load_model("Qwen/Qwen3-0.6B")
        config = EngineConfig(gpu_memory_utilization=share, kv_cache_dtype=kv)
        found = plan(spec, CARD, config, overrides=measured)
        form = cache_format(spec, 16, kv, torch.bfloat16)
        costs = StepCosts(activation, graphs, tables, False)
        card = CardMemory(CARD.total_bytes, CARD.total_bytes, 0, 0)
        try:
            blocks, _ = pool_of(found, form, card, costs, weights=weights, workspace=workspace)
        except DoesNotFitError:
            blocks = 0
        assert found.num_gpu_blocks == blocks

    def test_the_parts_sum_to_the_card(self):
        found = plan(load_model("Qwen/Qwen3-0.6B"), CARD, EngineConfig(max_num_seqs=64))
        assert sum(found.breakdown.parts().values()) == CARD.total_bytes


@pytest.mark.parametrize("kv", ["auto", "fp8", "int8_per_token_head", "fp8_per_token_head"])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-0.6B", "google/gemma-3-4b-text", "Qwen/Qwen3-30B-A3B", "google/gemma-2-2b-it"]
)
def test_a_block_is_the_cache_s(name, block_size, kv):
    import torch

    from labkit.engine.cuda_cache import cache_format

    spec = load_model(name)
    config = resolved(spec, kv_cache_dtype=kv, block_size=block_size, dtype="bfloat16")
    assert card_layout(spec, config).block_bytes == cache_format(spec, block_size, kv, torch.bfloat16).block_bytes


@pytest.mark.parametrize("swap_gib", [0.0, 0.001, 0.01, 4.0])
def test_staged_blocks_are_the_cache_s(swap_gib):
    """16 tokens of 8 KV heads of 128 in 28 layers: parts of whole 4 KiB, so rows are as long as blocks."""
    import torch

    from labkit.engine.cuda_cache import cache_format

    spec = load_model("Qwen/Qwen3-0.6B")
    form = cache_format(spec, 16, "auto", torch.bfloat16)
    swapped = int(swap_gib * GIB) // form.block_bytes
    expected = form.staged_bytes(swapped) if swapped else 0
    assert staged_bytes(resolved(spec, swap_space=swap_gib), form.block_bytes) == expected


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0", "7.5"])
def test_settings_are_read_as_the_kernels_read_them(kernel, capability):
    pytest.importorskip("triton")
    from dataclasses import asdict

    from labkit_kernels.heuristics import DecodeConfig, PrefillConfig, decode_config, prefill_config

    card, arch = GpuSpec("any", GIB, compute_capability=capability), round(10 * float(capability))
    for kv, kind in (("auto", "native"), ("int8_per_token_head", "int8"), ("fp8_e5m2", "fp8")):
        for head_dim in (64, 128, 256):
            for rows in (1, 4, 16, 64, 8192):
                if kernel == "decode":
                    theirs = asdict(decode_config(arch, kind, head_dim, rows, 200))
                    ours = asdict(DecodeConfig(**attention_settings(card, kernel, kv, head_dim, rows, 200)))
                else:
                    theirs = asdict(prefill_config(arch, kind, head_dim, rows))
                    ours = asdict(PrefillConfig(**attention_settings(card, kernel, kv, head_dim, rows)))
                assert ours == theirs


class TestLargestStep:
    """Launching 28 or 32 layers takes 7 to 8 ms on the machine of the measured steps."""

    @pytest.mark.parametrize(
        ("name", "tokens", "expected"),
        [
            ("Qwen/Qwen3-0.6B", 2048, True),
            ("Qwen/Qwen3-0.6B", 4096, False),
            ("Qwen/Qwen3-0.6B", 16384, False),
            ("meta-llama/Llama-3.1-8B-Instruct", 2048, False),
            ("meta-llama/Llama-3.1-8B-Instruct", 512, False),
            ("meta-llama/Llama-3.1-8B-Instruct", 128, True),
        ],
    )
    def test_small_steps_wait_for_the_host(self, name, tokens, expected):
        spec = load_model(name)
        config = resolved(spec, max_num_batched_tokens=tokens, max_num_seqs=64, max_model_len=4096)
        assert captures_largest(spec, CARD, config) is expected

    def test_ranks_have_none(self):
        spec = load_model("Qwen/Qwen3-0.6B")
        config = resolved(spec, max_num_batched_tokens=2048, max_num_seqs=64, tensor_parallel_size=2)
        assert not captures_largest(spec, CARD, config)

    def test_it_is_in_the_plan(self):
        found = plan(load_model("Qwen/Qwen3-0.6B"), CARD, EngineConfig(max_num_batched_tokens=2048, max_num_seqs=64))
        assert found.details["captures_largest"] is True
        assert "steps of up to 2,048 tokens" in found.formulas["cuda_graphs"]


class TestAllocator:
    """torch's rules by hand."""

    def test_small_ones_share_two_mib(self):
        pool = CachingAllocator()
        first = pool.take(1)
        for _ in range(4095):
            pool.take(512)
        assert pool.segment_bytes == 2 * MIB
        pool.take(1)
        assert pool.segment_bytes == 4 * MIB
        pool.give(first)
        pool.take(512)
        assert pool.segment_bytes == 4 * MIB

    def test_middle_ones_share_twenty(self):
        pool = CachingAllocator()
        pool.take(9 * MIB)
        pool.take(9 * MIB)
        assert pool.segment_bytes == 20 * MIB
        pool.take(3 * MIB)
        assert pool.segment_bytes == 40 * MIB

    def test_large_ones_are_rounded_to_two(self):
        pool = CachingAllocator()
        pool.take(11 * MIB)
        assert pool.segment_bytes == 12 * MIB
        # The rest of 1 MiB is not split off, so it serves nobody.
        pool.take(MIB)
        assert pool.segment_bytes == 14 * MIB

    def test_free_neighbours_become_one_block(self):
        pool = CachingAllocator()
        parts = [pool.take(5 * MIB) for _ in range(4)]
        for part in (parts[1], parts[3], parts[2]):
            pool.give(part)
        pool.take(15 * MIB)
        assert pool.segment_bytes == 20 * MIB

    def test_the_best_fit_is_taken(self):
        pool = CachingAllocator()
        large = pool.take(40 * MIB)
        middle = pool.take(30 * MIB)
        pool.give(large)
        pool.give(middle)
        pool.take(29 * MIB)
        pool.take(40 * MIB)
        assert pool.segment_bytes == 70 * MIB

    def test_the_best_fit_may_cost_a_segment_the_second_time(self):
        """The first of three calls takes the segment of 10 MiB, which the last one then lacks."""
        pool, sizes, held = CachingAllocator(), (MIB + 1, 10 * MIB + 1, 10 * MIB), []
        for expected in (30 * MIB, 40 * MIB):
            held = [pool.take(size) for size in sizes]
            assert pool.segment_bytes == expected
            for handle in held:
                pool.give(handle)

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(0, 9)), max_size=60))
    def test_what_is_free_again_is_used_again(self, calls):
        """Once all is given back, segments are whole again: any one of the calls finds room in them."""
        pool, held = CachingAllocator(), []
        for size, which in calls:
            held.append(pool.take(size))
            if which < len(held):
                pool.give(held.pop(which))
        for handle in held:
            pool.give(handle)
        segment_bytes = pool.segment_bytes
        assert pool.bytes == 0
        for size, _ in calls:
            pool.give(pool.take(size))
        assert (pool.segment_bytes, pool.bytes) == (segment_bytes, 0)

    def test_the_meter_rounds_to_512(self):
        meter = PeakMeter()
        first = meter.take(1)
        meter.take(513)
        meter.give(first)
        assert (meter.bytes, meter.peak_bytes) == (1024, 1536)


class TestWords:
    """Errors and empty cases."""

    def test_ranks_that_do_not_divide_are_refused(self):
        with pytest.raises(OutOfRangeError, match="3 cards"):
            plan(load_model("Qwen/Qwen3-0.6B"), CARD, EngineConfig(tensor_parallel_size=3))

    def test_a_card_too_small_has_no_block(self):
        found = plan(load_model("meta-llama/Llama-3.1-8B-Instruct"), load_gpu("T4"), EngineConfig())
        assert (found.num_gpu_blocks, found.verdict) == (0, "does not fit")
        assert "leave nothing for KV" in found.binding_limit

    def test_eager_plans_have_no_graphs(self):
        found = plan(load_model("Qwen/Qwen3-0.6B"), CARD, EngineConfig(enforce_eager=True))
        assert found.breakdown.cuda_graphs_bytes == 0
        assert found.formulas["cuda_graphs"] == "no graphs: enforce_eager"

    def test_experts_without_graphs_say_why(self):
        found = plan(load_model("Qwen/Qwen3-30B-A3B"), load_gpu("A100-80GB"), EngineConfig())
        assert "capability 9.0" in found.formulas["cuda_graphs"]

    def test_a_card_of_unknown_speed_captures_no_largest_step(self):
        card = GpuSpec("new", 80 * GIB)
        found = plan(load_model("Qwen/Qwen3-0.6B"), card, EngineConfig(max_num_batched_tokens=2048))
        assert found.details["captures_largest"] is False
        assert found.num_gpu_blocks > 0


def test_weights_are_those_of_the_decoder(tiny_decoders):
    for decoder, spec in tiny_decoders:
        config = resolved(spec, dtype="float32", max_model_len=64)
        assert card_weights_bytes(spec, config) == decoder.num_bytes + decoder.table_bytes


@pytest.fixture(scope="module")
def tiny_decoders():
    import torch

    from labkit.models import load_model_weights
    from labkit.specs.model_spec import LayerSpec, ModelSpec, MoeSpec

    torch.set_num_threads(1)
    layer = LayerSpec(kind="full", num_heads=4, num_kv_heads=2, head_dim=8)
    expert = LayerSpec(kind="full", num_heads=4, num_kv_heads=2, head_dim=8, num_experts=4)
    fields = {
        "name": "tiny", "architecture": "LlamaForCausalLM", "model_type": "llama", "layers": (layer, layer),
        "hidden_size": 32, "intermediate_size": 48, "vocab_size": 101, "max_position_embeddings": 64,
        "dtype": "float32", "eos_token_ids": (0,),
    }  # fmt: skip
    changes = [
        {}, {"qk_norm": True}, {"norm_offset": True, "qk_norm": True, "sandwich_norms": True, "norms_per_layer": 4},
        {"tie_word_embeddings": False}, {"layers": (expert,) * 2, "moe": MoeSpec(4, 2, 16), "model_type": "qwen3_moe"},
    ]  # fmt: skip
    specs = [ModelSpec(**{**fields, **change}) for change in changes]
    return [
        (load_model_weights(spec, dtype="float32", load_format="dummy", pack_weights=False), spec) for spec in specs
    ]


def test_models_with_fused_kernels_are_the_engine_s():
    pytest.importorskip("triton")
    from labkit.engine.cuda_forward import _GATED
    from labkit.memory.step_buffers import FUSED_ACTIVATIONS

    assert set(_GATED) == set(FUSED_ACTIVATIONS)


@pytest.mark.parametrize(
    ("name", "weights", "activation", "blocks"),
    [
        ("Qwen/Qwen3-0.6B", 600381440, 195002368, 63999),
        ("meta-llama/Llama-3.1-8B-Instruct", 8034721792, 671088640, 48447),
    ],
)
def test_parts_of_a_rank_of_two(name, weights, activation, blocks):
    """Measured on two H200 at 40 % of each; what NCCL takes in graphs hides in a pool of whole 64 MiB."""
    config = EngineConfig(
        tensor_parallel_size=2, max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=8192,
        gpu_memory_utilization=0.4,
    )  # fmt: skip
    found = plan(load_model(name), CARD, config, overrides=Overrides(total_bytes=150109880320))
    sizes = found.breakdown
    assert (sizes.weights_bytes, sizes.block_tables_bytes) == (weights, 16391984)
    assert sizes.activation_bytes == activation
    assert found.num_gpu_blocks == blocks


@pytest.mark.parametrize(
    ("capability", "quantization", "dtype", "width", "captures"),
    [
        ("9.0", None, "bfloat16", 768, True), ("10.0", None, "bfloat16", 768, True),
        ("8.9", None, "bfloat16", 768, False), ("9.0", None, "float16", 768, False),
        ("9.0", "fp8", "bfloat16", 768, False), ("9.0", None, "bfloat16", 764, False),
        # Formats of files that the engine undoes while loading are tensors in 16 bit, as the others.
        ("9.0", "gguf", "bfloat16", 768, True),
    ],
)  # fmt: skip
def test_the_virtual_engine_captures_experts_where_the_plan_does(capability, quantization, dtype, width, captures):
    """As `labkit.models.moe.reads_on_host` decides over the tensors themselves."""
    from dataclasses import replace

    from labkit.engine.step_constants import load_constants
    from labkit.experiments.virtual_run import step_time_model
    from labkit.memory import plan
    from labkit.memory.card_parts import why_eager
    from labkit.specs import load_gpu, load_model
    from labkit.specs.model_spec import WeightFormat

    model = load_model("Qwen/Qwen3-30B-A3B")
    model = model.replace(moe=replace(model.moe, intermediate_size=width))
    if quantization == "gguf":
        model, quantization = model.replace(weight_format=WeightFormat("gguf", bits=16)), None
    gpu = replace(load_gpu("H200"), compute_capability=capability)
    config = EngineConfig(max_model_len=2048, dtype=dtype, quantization=quantization)
    found = plan(model, gpu, config, engine="labkit")
    assert bool(why_eager(model, gpu, found.config)) != captures
    assert bool(step_time_model(found, load_constants()).launch.graph_sizes) == captures
