"""All attention layers of a step, and a run at its fullest: sums over layers, latent attention, and what is refused."""

import dataclasses

import pytest

from labkit.errors import OutOfRangeError, UnsupportedError
from labkit.measure.attention_shape import AttentionShape, BatchShape
from labkit.measure.l2_calibration import L2Calibration
from labkit.measure.l2_simulator import simulate_attention
from labkit.measure.l2_step import fullest_decode, simulate_run, simulate_step
from labkit.measure.run_record import RequestRow, RunRecord, StepRow
from labkit.memory import plan
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_catalogue import catalogue_gpu
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_catalogue import catalogue_model
from labkit.specs.model_spec import LayerSpec, ModelSpec

H200 = catalogue_gpu("H200")
FULL = LayerSpec("full", num_heads=32, num_kv_heads=8, head_dim=128)
TOKEN_BYTES = 8 * 128 * 2 * 2


def model(*layers):
    return ModelSpec("m", "A", "llama", layers or (FULL,), 4096, 14336, 128256, 131072, dtype="bfloat16")


def simulate(batch, *layers, gpu=H200, variant=None, **config):
    return simulate_step(model(*layers), gpu, EngineConfig(**config), batch, variant=variant)


def query_bytes(batch, num_heads=32, head_dim=128):
    return sum(batch.query_lens) * num_heads * head_dim * 2


def test_one_layer_is_one_launch():
    batch = BatchShape.decode(64, 4096)
    step = simulate(batch)
    assert step == simulate_attention(AttentionShape(batch), H200).counters
    assert step.dram_bytes == 64 * 4096 * TOKEN_BYTES + query_bytes(batch)


def test_layers_add_up_and_a_window_is_all_that_is_read():
    batch = BatchShape.decode(4, 4096)
    sliding = LayerSpec("sliding", num_heads=32, num_kv_heads=8, head_dim=128, window=1024)
    only, both = simulate(batch, sliding), simulate(batch, sliding, FULL, FULL)
    assert only.dram_bytes == pytest.approx(4 * 1024 * TOKEN_BYTES, rel=0.07)
    assert both.dram_bytes == pytest.approx(only.dram_bytes + 2 * simulate(batch).dram_bytes)
    assert both.kernel_time_s == pytest.approx(only.kernel_time_s + 2 * simulate(batch).kernel_time_s)


def test_latent_attention_reads_one_row_for_all_heads():
    """DeepSeek V3: 512 + 64 numbers a token and layer, whatever the number of heads."""
    layer = LayerSpec("mla", num_heads=128, num_kv_heads=128, head_dim=192, kv_lora_rank=512, qk_rope_head_dim=64)
    batch = BatchShape.decode(4, 4096)
    found = simulate(batch, layer)
    assert found.dram_bytes == 4 * 4096 * 576 * 2 + query_bytes(batch, 128, 576)
    assert simulate(batch, layer, kv_cache_dtype="fp8").dram_bytes == 4 * 4096 * 576 + query_bytes(batch, 128, 576)
    shape = AttentionShape(batch, 128, 1, 576, v_head_dim=512, is_latent=True)
    assert shape.flops == 2 * 128 * (576 + 512) * 4 * 4096
    with pytest.raises(OutOfRangeError, match="v_head_dim"):
        dataclasses.replace(shape, v_head_dim=600)


def test_latent_attention_of_the_catalogue():
    spec = catalogue_model("deepseek-ai/DeepSeek-V2-Lite")
    found = simulate_step(spec, H200, EngineConfig(), BatchShape.decode(2, 1024))
    least = len(spec.layers) * 2 * 1024 * 576 * 2
    assert least < found.dram_bytes < 1.1 * least


def test_values_of_another_size_than_keys():
    narrow = dataclasses.replace(FULL, v_head_dim=64)
    batch = BatchShape.decode(4, 1024)
    assert simulate(batch, narrow).dram_bytes == 4 * 1024 * 8 * (128 + 64) * 2 + query_bytes(batch)


def test_eight_bit_kv_halves_the_bytes():
    batch = BatchShape.decode(64, 4096)
    assert simulate(batch, kv_cache_dtype="fp8").dram_bytes == 64 * 4096 * TOKEN_BYTES // 2 + query_bytes(batch)


def test_a_program_for_each_query_head_and_prompts():
    unpacked, one_cache = "one program for each query head", L2Calibration()
    decode = simulate_step(model(), H200, EngineConfig(), BatchShape.decode(64, 4096), variant=unpacked,
                           calibration=one_cache)  # fmt: skip
    assert decode.l2_hit_rate == pytest.approx(1 - 1 / 4, abs=0.01)
    assert "each query head" in decode.method
    assert "prefill" in simulate(BatchShape((16384,), (1024,))).method


def test_what_cannot_be_simulated():
    with pytest.raises(UnsupportedError, match="L2 of cpu is not known"):
        simulate(BatchShape.decode(1, 16), gpu=GpuSpec("cpu", 2**31, origin="cpu"))
    with pytest.raises(UnsupportedError, match="keeps no KV"):
        simulate(BatchShape.decode(1, 16), LayerSpec("none"))


@pytest.mark.parametrize(("contexts", "queries"), [((), ()), ((4,), ()), ((4,), (5,)), ((4,), (0,))])
def test_shapes_that_cannot_be(contexts, queries):
    with pytest.raises(OutOfRangeError):
        BatchShape(contexts, queries)


def record(requests, steps):
    spec = catalogue_model("Qwen/Qwen3-8B")
    made = plan(spec, H200, EngineConfig())
    return RunRecord(
        "r", "n", "2026-01-01T00:00:00Z", "finished", EngineConfig(), spec, H200, {}, made, requests, steps
    )


def step(start_s, blocks):
    return StepRow(start_s, 1.0, 2, 0, 2, 2, 0, blocks, 0, 16 * blocks)


def test_a_run_at_its_fullest_moment():
    """At 2 s, the end of the fullest step: request 0 has two tokens, 1 has one, 2 has ended, 3 has none yet."""
    requests = (
        RequestRow(0, 0, 1.0, 9.0, 100, 3, 32, token_times_s=(1.0, 2.0, 9.0)),
        RequestRow(1, 0, 2.0, 9.0, 200, 2, 48, token_times_s=(2.0, 9.0)),
        RequestRow(2, 0, 0.5, 1.5, 300, 2, token_times_s=(0.5, 1.5)),
        RequestRow(3, 0, 5.0, 9.0, 400, 1, token_times_s=(5.0,)),
    )
    run = record(requests, (step(0.0, 5), step(1.0, 40), step(2.0, 40)))
    assert fullest_decode(run) == BatchShape((102, 201), (1, 1), 32)
    expected = simulate_step(run.model, H200, EngineConfig(), BatchShape((102, 201), (1, 1), 32))
    assert simulate_run(run, H200) == dataclasses.replace(expected, scope="attention of a decode step of 2 requests")


def test_runs_without_decode():
    assert simulate_run(record((), ()), H200) is None
    assert fullest_decode(record((RequestRow(0, 0, None, None, 10, 0),), (step(0.0, 1),))) is None
