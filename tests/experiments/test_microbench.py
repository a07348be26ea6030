"""The microbenchmark runs its launches in Triton's interpreter, and its constants are those that made the times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from labkit.engine.step_constants import load_constants
from labkit.engine.step_cost import step_cost
from labkit.engine.step_time import StepLoad, StepTimeModel, smooth_max
from labkit.errors import FileFormatError, OutOfRangeError, UnsupportedError
from labkit.experiments.card_constants import constants_of
from labkit.experiments.card_files import (
    RunCalibration,
    base_constants,
    card_path,
    constants_for,
    keep_calibration,
    keep_microbenchmark,
    read_card,
)
from labkit.experiments.microbench import Microbenchmark, Timing, check_card
from labkit.specs import load_gpu, load_model
from labkit.specs.engine_config import EngineConfig

GPU = load_gpu("H200")
BANDWIDTH, PEAK = GPU.mem_bandwidth_bytes_per_s, GPU.bf16_flops
_SCRIPT = """
import json, torch
from labkit.experiments.microbench import Bench, Shapes, run_microbenchmark
torch.set_num_threads(1)
shapes = Shapes(
    matrices=((64, 32),), rows=(1, 4), heads=((2, 1),), decodes=((2, 40),), prefills=((1, 16, 32),), elementwise=(2,),
    hidden=64, wide=128, sampled=(2,), vocab_size=500, swapped=(3, 2), thin_layers=(1,), host_batches=(1, 2),
    host_steps=12, places=(1, 3), prompt_tokens=20,
)
found = run_microbenchmark(600, bench=Bench("cpu", shapes))
print(json.dumps([[timing.kind, dict(timing.sizes), timing.seconds] for timing in found.timings]))
print(json.dumps(dict(found.missing)))
"""


@pytest.fixture(scope="module")
def interpreted():
    if find_spec("triton") is None:
        pytest.skip("needs Triton, which interprets the kernels: pip install 'labkit[triton]'")
    root = Path(__file__).resolve().parents[2]
    paths = os.pathsep.join((str(root / "kernels"), str(root)))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, timeout=200, cwd=root
    )
    assert done.returncode == 0, done.stderr[-3000:]
    timings, missing = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    return timings, missing


def test_every_part_is_measured_but_the_ceilings_that_need_a_card(interpreted):
    timings, missing = interpreted
    kinds = {kind for kind, _, _ in timings}
    assert kinds == {
        "gemm", "decode", "prefill", "norm", "activation", "sample", "swap", "host", "prompt", "launch",
        "launch decode", "admission", "places",
    }  # fmt: skip
    assert list(missing) == ["ceilings"]
    assert all(seconds > 0 for _, _, seconds in timings)
    assert {sizes["kv"] for kind, sizes, _ in timings if kind == "decode"} == {"bfloat16", "fp8"}


def made(**changes) -> Microbenchmark:
    """Timings of a card whose constants are known: by hand, from the formulas of the step-time model."""
    truth = {
        "bandwidth": 0.9, "flops": 0.7, "kv": 0.85, "kv8": 0.6, "start": 6e-6, "floor": 3e-6, "prefill": 0.4,
        "norm": 2e-6,
        "passes": 1.5, "step": 3e-4, "request": 5e-6, "layer": 1.2e-4, "eager": 4e-4, "link": 25e9, **changes,
    }  # fmt: skip
    timings = [
        Timing(
            "gemm", {"outputs": n, "inputs": k, "rows": rows},
            float(smooth_max(2 * n * k / BANDWIDTH / truth["bandwidth"], 2 * n * k * rows / PEAK / truth["flops"])),
        )
        for n, k in ((1024, 2048), (28672, 4096), (28672, 14336)) for rows in (1, 64, 256, 8192)
    ]  # fmt: skip
    for kv, size, share in (("bfloat16", 2, truth["kv"]), ("fp8", 1, truth["kv8"])):
        for requests, context in ((1, 512), (32, 4096), (256, 512), (256, 2048)):
            num_bytes = 2 * size * requests * context * 8 * 128
            seconds = truth["start"] + float(smooth_max(num_bytes / BANDWIDTH / share, truth["floor"]))
            sizes = {"requests": requests, "context": context, "heads": 16, "kv_heads": 8, "head_dim": 128, "kv": kv}
            timings.append(Timing("decode", sizes, seconds))
    for requests, queries, context in ((1, 64, 64), (1, 512, 512), (1, 2048, 2048), (4, 512, 512), (1, 512, 4096)):
        pairs = requests * (queries * context - queries * (queries - 1) / 2)
        seconds = 8e-6 + 1e-8 * pairs / (requests * queries) + 9e-9 * requests * queries
        sizes = {"requests": requests, "queries": queries, "context": context, "heads": 16, "kv_heads": 8}
        products = 4 * 16 * 128 * pairs / PEAK / truth["prefill"]
        for kv, factor in (("bfloat16", 1.0), ("fp8", 1.6)):
            timings.append(Timing("prefill", {**sizes, "head_dim": 128, "kv": kv}, seconds + factor * products))
    timings += [Timing("places", {"places": places, "queries": 512}, 2e-5 + 6e-8 * places) for places in (1, 64)]
    for kind, width in (("norm", 8 * 4096), ("activation", 6 * 12288)):
        for rows in (1, 4096):
            seconds = max(truth["norm"], rows * width / BANDWIDTH * truth["passes"])
            timings.append(Timing(kind, {"rows": rows, "bytes": rows * width}, seconds))
    for requests in (1, 64, 256):
        timings.append(Timing("host", {"requests": requests, "layers": 2}, truth["step"] + truth["request"] * requests))
    for layers in (2, 10):
        seconds = truth["step"] + truth["request"] + truth["eager"] + layers * truth["layer"]
        timings.append(Timing("launch decode", {"layers": layers, "requests": 1}, seconds))
        timings.append(Timing("launch", {"layers": layers, "tokens": 64}, seconds + layers * 5e-5))
    timings += [Timing("swap", {"bytes": 2**28, "direction": way}, 2**28 / truth["link"]) for way in ("in", "out")]
    return Microbenchmark("H200", "2026-01-01T00:00:00+00:00", 40.0, tuple(timings))


def test_constants_are_those_that_made_the_times():
    found = constants_of(made(), GPU, load_constants(engine="labkit"))
    assert found.level == "microbenchmark"
    assert found.bandwidth_efficiency == pytest.approx(0.9, rel=0.02)
    assert found.flops_efficiency == pytest.approx(0.7, rel=0.02)
    assert found.kv_efficiency == pytest.approx(0.85, rel=0.02)
    assert found.kv_efficiency_8bit == pytest.approx(0.6, rel=0.02)
    assert found.attention_start_s + found.attention_floor_s == pytest.approx(9e-6, rel=0.05)
    assert (found.prompt_start_s, found.prompt_context_s, found.prompt_token_s) == pytest.approx((8e-6, 1e-8, 9e-9))
    assert found.attention_efficiency == pytest.approx(0.4, rel=0.02)
    assert found.prompt_place_s == pytest.approx(6e-8)
    assert found.prompt_factor_8bit == pytest.approx(1.6, rel=0.01)
    assert (found.step_s, found.request_s) == pytest.approx((3e-4, 5e-6), rel=0.01)
    assert (found.eager_step_s, found.eager_layer_s) == pytest.approx((4e-4, 1.2e-4), rel=0.01)
    assert found.eager_prompt_layer_s == pytest.approx(5e-5, rel=0.01)
    assert found.layer_s == pytest.approx(4 * 2e-6)
    assert found.elementwise_passes == pytest.approx(1.5)
    assert found.host_link_bytes_per_s == pytest.approx(25e9)


def test_products_lie_between_the_measured_ones():
    constants = constants_of(made(), GPU, load_constants(engine="labkit"))
    cost = step_cost(load_model("Qwen/Qwen3-8B"), EngineConfig())
    table, formula = (
        StepTimeModel(cost, GPU, entry)
        for entry in (constants, constants.replace(products=(), bandwidth_efficiency=0.9, flops_efficiency=0.7))
    )
    for tokens in (1.0, 64.0, 256.0, 8192.0, 20000.0):
        one = np.array([tokens])
        load = StepLoad(one, one, one, (np.zeros(1),), (np.zeros(1),))
        assert table.parts(load)["dense"][0] == pytest.approx(formula.parts(load)["dense"][0], rel=0.05)
        assert table.parts(load)["lm_head"][0] == pytest.approx(formula.parts(load)["lm_head"][0], rel=0.05)
    doubled = StepTimeModel(cost, GPU, constants.replace(product_factor=2.0))
    assert doubled.parts(load)["dense"][0] == pytest.approx(2 * table.parts(load)["dense"][0])


def test_a_disturbed_product_does_not_count():
    timings = [
        Timing("gemm", {"outputs": 1024, "inputs": 2048, "rows": rows}, seconds)
        for rows, seconds in ((1, 12e-6), (16, 6e-6), (64, 6e-6), (256, 9e-6))
    ]
    found = constants_of(Microbenchmark("H200", "", 1.0, tuple(timings)), GPU, load_constants(engine="labkit"))
    assert [seconds for *_, seconds in found.products] == pytest.approx([6e-6, 6e-6, 6e-6, 9e-6])


def test_attention_beside_its_products_by_hand():
    constants = load_constants(engine="labkit").replace(
        attention_start_s=5e-6, prompt_start_s=8e-6, prompt_context_s=1e-8, prompt_token_s=2e-9
    )
    bare = constants.replace(attention_start_s=0.0, prompt_start_s=0.0)
    cost = step_cost(load_model("Qwen/Qwen3-8B"), EngineConfig())
    one = np.array([40.0])
    # Eight requests decode, 32 prompt tokens see 100 tokens each on average; 36 layers.
    load = StepLoad(one, one, one, (np.array([800.0]),), (np.array([3200.0]),), num_prompt_tokens=np.array([32.0]))
    more = {
        name: StepTimeModel(cost, GPU, constants).parts(load)[name] - StepTimeModel(cost, GPU, bare).parts(load)[name]
        for name in ("kv", "prefill_attention")
    }
    assert more["kv"][0] == pytest.approx(36 * 5e-6)
    assert more["prefill_attention"][0] == pytest.approx(36 * (8e-6 + 100 * 1e-8 + 32 * 2e-9))


def test_what_was_not_measured_stays():
    shipped = load_constants(engine="labkit")
    only = Microbenchmark("H200", "", 1.0, tuple(entry for entry in made().timings if entry.kind == "swap"))
    found = constants_of(only, GPU, shipped)
    assert found.host_link_bytes_per_s == pytest.approx(25e9)
    assert (found.products, found.kv_efficiency, found.step_s) == ((), shipped.kv_efficiency, shipped.step_s)
    with pytest.raises(OutOfRangeError):
        constants_of(Microbenchmark("H200", "", 1.0, ()), GPU, shipped)


def test_a_machine_without_a_card_is_told_what_works(one_thread):
    if one_thread.cuda.is_available():
        pytest.skip("a card is here")
    with pytest.raises(UnsupportedError, match="labkit calibrate --run"):
        check_card()


def test_the_best_that_is_known_of_a_card_is_used(tmp_path):
    def level(engine="labkit", model="Qwen/Qwen3-8B"):
        return constants_for(GPU, model, engine=engine, folder=tmp_path).level

    assert level() == "shipped"
    keep_microbenchmark(GPU, made(), tmp_path)
    assert (level(), level("vllm")) == ("microbenchmark", "shipped")
    constants = base_constants(GPU, engine="labkit", engine_version="0.33.0", folder=tmp_path)
    tuned = constants.replace(level="calibrated", product_factor=1.07)
    keep_calibration(GPU, RunCalibration("Qwen/Qwen3-8B", "labkit", "", "now", ("run",), tuned), tmp_path)
    assert (level(), level(model="Qwen/Qwen3-0.6B"), level("vllm")) == ("calibrated", "microbenchmark", "shipped")
    keep_microbenchmark(GPU, made(kv=0.5), tmp_path)
    assert constants_for(GPU, "Qwen/Qwen3-8B", engine="labkit", folder=tmp_path) == tuned
    again = tuned.replace(product_factor=1.2)
    keep_calibration(GPU, RunCalibration("Qwen/Qwen3-8B", "labkit", "", "now", ("other",), again), tmp_path)
    assert [entry.run_ids for entry in read_card(GPU, tmp_path).calibrations] == [("other",)]
    assert base_constants(GPU, engine="labkit", engine_version="0.33.0", folder=tmp_path).kv_efficiency < 0.55


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "labkit-card-0"}', '{"format": "labkit-card-1"}'])
def test_a_damaged_file_is_named(tmp_path, content):
    path = card_path(GPU, tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(FileFormatError, match=r"h200\.json"):
        read_card(GPU, tmp_path)
