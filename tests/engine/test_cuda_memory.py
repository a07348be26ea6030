"""What the GPU engine allocates, by arithmetic alone: no card and no kernel is needed."""

from __future__ import annotations

import pytest

from labkit.errors import DoesNotFitError, UnsupportedError
from labkit.specs.model_spec import LayerSpec

GIB = 2**30


def card(total_gib, free_gib, reserved_gib=0):
    from labkit.engine.cuda_memory import CardMemory

    return CardMemory(total_gib * GIB, free_gib * GIB, reserved_gib * GIB, reserved_gib * GIB)


@pytest.fixture
def form(tiny_spec, one_thread):
    """Two layers of 2 KV heads of width 8 in float16: a block of 4 tokens is 2 · 2 · 4 · 2 · 8 · 2 bytes."""
    from labkit.engine.cuda_cache import cache_format

    return cache_format(tiny_spec(), 4, "auto", one_thread.float16)


def test_a_block_has_the_bytes_of_its_keys_and_values(form, tiny_spec, one_thread):
    from labkit.engine.cuda_cache import cache_format

    assert form.block_bytes == 512
    assert cache_format(tiny_spec(), 4, "fp8", one_thread.float16).block_bytes == 256
    # A float32 scale for each of 4 tokens, 2 heads, keys and values, 2 layers.
    assert cache_format(tiny_spec(), 4, "int8_per_token_head", one_thread.float16).block_bytes == 256 + 128
    assert cache_format(tiny_spec(), 4, "auto", one_thread.float16, tp_size=4).block_bytes == 256


@pytest.mark.parametrize("kind", ["auto", "fp8", "fp8_e5m2", "int8_per_token_head"])
@pytest.mark.parametrize("num_blocks", [0, 1, 7])
def test_views_cover_the_pool_without_overlap(tiny_spec, one_thread, kind, num_blocks):
    from labkit.engine.cuda_cache import CudaKVCache, cache_format

    form = cache_format(tiny_spec(), 4, kind, one_thread.float16)
    memory = one_thread.zeros(form.pool_bytes(num_blocks), dtype=one_thread.uint8)
    cache = CudaKVCache(form, num_blocks, 0, memory)
    for layer in cache.layers:
        for view in layer.tensors():
            assert view.data_ptr() % 16 == 0 or not view.numel()
            if view.numel():
                view.view(one_thread.uint8).add_(1)
    assert set(memory.tolist()) <= {0, 1}
    assert int(memory.sum()) == num_blocks * form.block_bytes


def test_swap_brings_blocks_back(form, one_thread):
    from labkit.engine.cuda_cache import CudaKVCache

    cache = CudaKVCache(form, 3, 2, one_thread.zeros(form.pool_bytes(3), dtype=one_thread.uint8))
    values = one_thread.randn(4, 2, 8).half()
    cache.layers[1].v[2] = values
    cache.swap([(2, 1)], [])
    cache.layers[1].v[2] = 0
    cache.swap([], [(0, 1)])
    assert bool((cache.layers[1].v[0] == values).all())


def test_as_many_blocks_fit_as_are_said_to(form):
    for num_bytes in (0, 511, 5000, 10**6 + 3):
        blocks = form.blocks_in(num_bytes)
        assert form.pool_bytes(blocks) <= max(num_bytes, 0)
        assert blocks >= num_bytes // 512 - 4


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": (LayerSpec(kind="chunked", num_heads=4, num_kv_heads=2, head_dim=8, window=4),)},
        {"layers": (LayerSpec(kind="full", num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=4),)},
    ],
)
def test_layers_that_the_kernels_lack_are_refused(tiny_spec, one_thread, changes):
    from labkit.engine.cuda_cache import cache_format

    with pytest.raises(UnsupportedError, match="kernels lack"):
        cache_format(tiny_spec(**changes), 4, "auto", one_thread.float16)


def test_kv_types_that_the_kernels_lack_are_refused(tiny_spec, one_thread):
    from labkit.engine.cuda_cache import cache_format

    with pytest.raises(UnsupportedError, match="does not store KV as nvfp4") as caught:
        cache_format(tiny_spec(), 4, "nvfp4", one_thread.float16)
    assert caught.value.knob == "kv_cache_dtype"


class TestPool:
    """A card of 10 GiB at 50 %: the budget is 5 GiB."""

    def pool(self, make_plan, form, costs=(0, 0, 0), memory=(10, 9), weights=GIB, others=0, **config):
        from labkit.engine.cuda_memory import StepCosts, pool_of

        plan = make_plan(gpu_memory_utilization=0.5, **config)
        facts = {"weights": weights, "workspace": GIB // 4, "others": others}
        return pool_of(plan, form, card(*memory), StepCosts(*costs), **facts)

    def test_it_takes_what_the_other_parts_leave(self, make_plan, form):
        """5 - 1 - 0.25 - 0.5 - 0.125 - 0.125 GiB."""
        blocks, num_bytes = self.pool(make_plan, form, (GIB // 2, GIB // 8, GIB // 8))
        assert num_bytes == 3 * GIB
        assert blocks == (3 * GIB - 4 * 256) // 512

    def test_a_large_one_is_a_multiple_of_64_mib(self, make_plan, form):
        _, num_bytes = self.pool(make_plan, form, weights=GIB // 2 - 7)
        assert num_bytes == 4 * GIB + 256 * 2**20

    def test_a_number_of_blocks_that_was_asked_for_is_taken(self, make_plan, form):
        assert self.pool(make_plan, form, num_gpu_blocks_override=77) == (77, form.pool_bytes(77))

    def test_the_budget_must_be_free(self, make_plan, form):
        """Free, what torch has already, and libraries' workspace: 3 + 1 + 0.25 GiB."""
        with pytest.raises(DoesNotFitError, match="another process") as caught:
            self.pool(make_plan, form, memory=(10, 3, 1))
        assert "gpu_memory_utilization = 0.42" in str(caught.value)

    def test_what_another_engine_of_the_process_holds_is_not_within_reach(self, make_plan, form):
        """Of 3 GiB that torch has, 2 are another engine's: 2 + 1 + 0.25 GiB are left for a budget of 5."""
        assert self.pool(make_plan, form, memory=(10, 2, 3)) == self.pool(make_plan, form)
        with pytest.raises(DoesNotFitError, match=r"this one holds 2\.00 GiB for something else") as caught:
            self.pool(make_plan, form, memory=(10, 2, 3), others=2 * GIB)
        assert (caught.value.needed, caught.value.available) == ("5.00 GiB", "3.25 GiB")
        assert (caught.value.works, caught.value.knob) == ("gpu_memory_utilization = 0.32", "gpu_memory_utilization")

    def test_no_block_left_is_refused(self, make_plan, form):
        with pytest.raises(DoesNotFitError, match="no KV block"):
            self.pool(make_plan, form, weights=5 * GIB)


class TestRoom:
    """Steps that are tried on a card with 1 GiB free."""

    def tried(self, monkeypatch, one_thread, error, tokens=8192):
        from labkit.engine import cuda_memory
        from labkit.memory import plan
        from labkit.specs import load_gpu, load_model
        from labkit.specs.engine_config import EngineConfig

        config = EngineConfig(max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=tokens)
        monkeypatch.setattr(cuda_memory, "give_back", lambda device: None)
        monkeypatch.setattr(cuda_memory, "look_at", lambda device: card(80, 1))

        def call():
            if error:
                raise error

        made = plan(load_model("meta-llama/Llama-3.1-8B"), load_gpu("H200"), config)
        cuda_memory.in_room(made, one_thread.device("cuda"), call)

    def test_memory_that_ends_is_the_lab_s_own_error(self, monkeypatch, one_thread):
        """A step of 8,192 tokens needs more than 1 GiB for activations: gate and up alone have 8,192 · 28,672 · 2."""
        with pytest.raises(DoesNotFitError, match="do not fit beside what this process and others hold") as caught:
            self.tried(monkeypatch, one_thread, one_thread.OutOfMemoryError("CUDA out of memory"))
        assert (caught.value.needed, caught.value.available) == ("more than 1.00 GiB", "1.00 GiB")
        assert caught.value.knob == "max_num_batched_tokens"
        assert int(caught.value.works.removeprefix("max_num_batched_tokens = ")) in (512, 1024, 2048, 4096)
        assert caught.value.__context__ is None

    def test_a_step_that_cannot_shrink_needs_another_card(self, monkeypatch, one_thread):
        with pytest.raises(DoesNotFitError, match="a card with more room"):
            self.tried(monkeypatch, one_thread, one_thread.OutOfMemoryError("CUDA out of memory"), tokens=64)

    def test_other_errors_and_none_are_left_alone(self, monkeypatch, one_thread):
        self.tried(monkeypatch, one_thread, None)
        with pytest.raises(RuntimeError, match="illegal"):
            self.tried(monkeypatch, one_thread, RuntimeError("an illegal memory access"))


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (30, [1, 2, 4, 8, 16, 24, 30])],
)
def test_capture_sizes_end_at_what_may_run(one_thread, max_num_seqs, expected):
    from labkit.memory.step_shapes import capture_sizes

    assert capture_sizes(max_num_seqs) == expected
    assert capture_sizes(10**6)[-1] == 512


@pytest.mark.parametrize(
    ("max_num_seqs", "max_tokens", "expected"),
    [
        (1, 8, [(8, 1, 1, 1)]),
        (4, 32, [(32, 4, 4, 4)]),
        (40, 100, [(32, 32, 8, 40), (64, 40, 8, 40), (100, 40, 12, 40)]),
    ],
)
def test_steps_with_prompts_have_places_for_what_may_run(one_thread, max_num_seqs, max_tokens, expected):
    from labkit.memory.step_shapes import StepShape, mixed_shapes

    assert mixed_shapes(max_num_seqs, max_tokens, largest=True) == [StepShape(*shape) for shape in expected]


def test_the_largest_step_has_a_graph_where_the_card_waits_for_the_host(one_thread):
    from labkit.memory.step_shapes import StepShape, mixed_shapes

    few = mixed_shapes(256, 8192, largest=False)
    assert few[-1] == StepShape(1024, 256, 64, 256)
    assert mixed_shapes(256, 8192, largest=True) == [*few, StepShape(8192, 256, 64, 256)]
    assert mixed_shapes(256, 1024, largest=True) == few


def test_a_graph_has_a_place_for_every_eight_tokens_of_prompts_from_8_up_to_64(one_thread):
    from labkit.memory.step_shapes import mixed_shapes

    places = [(shape.num_tokens, shape.num_prompts) for shape in mixed_shapes(256, 8192, largest=False)]
    assert places == [
        (32, 8), (64, 8), (128, 16), (192, 24), (256, 32), (384, 48), (512, 64), (768, 64), (1024, 64)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("filled", "expected"),
    [((1, 0, 1), 32), ((32, 5, 8), 32), ((33, 30, 2), 64), ((64, 0, 1), 64), ((33, 0, 9), None), ((65, 0, 1), None)],
)
def test_a_step_runs_in_the_next_larger_graph_with_room_for_its_prompts(one_thread, filled, expected):
    from labkit.engine.cuda_graphs import next_larger
    from labkit.memory.step_shapes import StepShape

    shapes = [StepShape(32, 32, 8, 40), StepShape(64, 40, 8, 40)]
    shape = next_larger(shapes, StepShape(*filled, filled[1] + filled[2]))
    assert (shape and shape.num_tokens) == expected


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"), [(1, [1]), (2, [1, 2]), (16, [1, 16]), (17, [1, 16, 17]), (64, [1, 16, 32, 64])]
)
def test_decode_is_compiled_for_one_row_and_each_power_of_two_that_may_run(one_thread, max_num_seqs, expected):
    from labkit.engine.cuda_profile import decode_sizes

    assert decode_sizes(max_num_seqs) == expected
