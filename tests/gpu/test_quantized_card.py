"""4-bit and fp8 weights on a card: products against float64, engines against a plain forward pass, bytes of the plan;
embeddings and fp8 experts through the engine."""

from __future__ import annotations

import pytest

from labkit.engine.embedding import embed
from labkit.experiments.engine_backend import EngineBackend
from labkit.experiments.run import RunOptions
from labkit.experiments.serialise import to_plain
from labkit.memory import plan as make_plan
from labkit.memory.tensors import Sharing
from labkit.memory.weights import StageLayers, stage_weights_bytes
from labkit.models.quantization import engine_format
from labkit.specs import load_gpu, load_model, synthetic_workload
from labkit.specs.engine_config import EngineConfig
from labkit.specs.model_spec import LayerSpec, MoeSpec, WeightFormat
from tests.gpu.test_engine_cuda import NEAR_TIE, gaps, make_decoder, make_engine, make_spec, requests, serve

LAYER = LayerSpec(kind="full", num_heads=8, num_kv_heads=2, head_dim=64)
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "layers": (LAYER,) * 3}


def load(spec, dtype="bfloat16", **rest):
    import torch

    from labkit.models import load_model_weights

    decoder = load_model_weights(spec, dtype=dtype, load_format="dummy", device="cuda", **rest)
    torch.manual_seed(3)
    decoder.weights.embedding.normal_(0, 0.3)
    return decoder


@pytest.mark.parametrize("columns", [16, 1000, 8192, 20000])
def test_rows_are_rounded_as_the_reference_rounds_them(columns):
    import torch
    from labkit_kernels.quantise import quantise_rows
    from labkit_kernels.reference_ops import quantise_rows as reference

    torch.manual_seed(1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = (torch.randn(37, columns, device="cuda") * torch.logspace(-3, 3, 37, device="cuda").unsqueeze(1)).to(dtype)
        x[5] = 0
        found, scales = quantise_rows(x)
        wanted, wanted_scales = reference(x)
        torch.testing.assert_close(scales, wanted_scales, rtol=1e-6, atol=0)
        # A quotient that is off in its last place may round to the neighbour, which has the next number as its bits.
        steps = (found.view(torch.uint8).int() - wanted.view(torch.uint8).int()).abs()
        assert int(steps.max()) <= 1
        assert float((steps > 0).float().mean()) < 1e-3
        assert not found[5].float().any()


@pytest.mark.parametrize("rows", [1, 7, 32, 64, 2048])
@pytest.mark.parametrize("per_channel", [True, False])
def test_fp8_products(rows, per_channel):
    import torch
    from labkit_kernels.reference_ops import quantise_rows

    from labkit.models.quantized import FEW_ROWS, quantize_fp8

    torch.manual_seed(2)
    weight = torch.randn(768, 1024, device="cuda", dtype=torch.bfloat16) / 32
    bias, x = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((768,), (rows, 1024)))
    matrix = quantize_fp8(weight, per_channel=per_channel)
    assert matrix.multiplies_fp8 is (torch.cuda.get_device_capability() >= (8, 9))
    assert matrix.is_interleaved
    dense = matrix.dequantize(torch.float32).double()
    # Rounding to three bits moves numbers by 2.7 % in the root mean square.
    assert float((dense - weight.double()).norm() / weight.double().norm()) < 0.04
    inputs = x.double()
    if rows > FEW_ROWS:
        rounded, scales = quantise_rows(x)
        inputs = rounded.double() * scales.double()
    for given in (None, bias):
        wanted = inputs @ dense.t()
        wanted = wanted if given is None else wanted + given.double()
        torch.testing.assert_close(matrix.project(x, given).double(), wanted, atol=0.03, rtol=0.02)
    exact = x.double() @ dense.t()
    torch.testing.assert_close(matrix.project(x.half()).double(), exact, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("rows", [1, 33, 300, 1500])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_awq_products(rows, dtype):
    import torch

    decoder = load(make_spec(**WIDE), dtype, quantization="awq")
    matrix = decoder.weights.layers[0].gate_up
    x, bias = (torch.randn(*shape, device="cuda", dtype=decoder.dtype) for shape in ((rows, 512), (2048,)))
    wanted = x.double() @ matrix.dequantize(torch.float32).double().t() + bias.double()
    torch.testing.assert_close(matrix.project(x, bias).double(), wanted, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_tensor", "awq"])
def test_the_engine_takes_the_quantised_models_own_choice(quantization):
    """Against the same weights undone into 16 bit: fp8 rounds the inputs of many rows as well, 4 bit does not."""
    spec = make_spec(**WIDE)
    decoder = load(spec, quantization=quantization)
    undone = load(spec, quantization=quantization, dequantize=True)
    asked = requests()
    outputs, _ = serve(decoder, asked)
    below = gaps(undone, asked, outputs)
    assert float(below.quantile(0.9)) <= NEAR_TIE["bfloat16"]
    assert float((gaps(decoder, asked, outputs) <= NEAR_TIE["bfloat16"]).float().mean()) > 0.95
    whole = StageLayers(0, spec.num_layers, spec.num_layers)
    fmt = engine_format(spec, quantization, "dummy")
    planned = stage_weights_bytes(spec, whole, Sharing(), fmt, "bfloat16", allocator=False)
    padding = (-spec.vocab_size % 64) * spec.hidden_size * 2 * 2
    assert decoder.num_bytes == planned - padding


def test_fp8_experts_run_eagerly_and_say_why():
    layer = LayerSpec(kind="full", num_heads=8, num_kv_heads=2, head_dim=64, num_experts=4)
    spec = make_spec(**{**WIDE, "layers": (layer,)}, moe=MoeSpec(4, 2, 256), model_type="qwen3_moe")
    decoder, asked = load(spec, quantization="fp8"), requests(max_tokens=10)
    engine = make_engine(decoder)
    assert engine.executor._allocated.graphs is None
    assert "not stored in 16 bit" in engine.executor.why_eager
    engine.close()
    outputs, _ = serve(decoder, asked)
    assert float((gaps(decoder, asked, outputs) <= NEAR_TIE["bfloat16"]).float().mean()) > 0.9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embeddings_are_transformers(dtype, tmp_path):
    """A random Qwen3 body through the engine, texts whole and in chunks, beside transformers on the same card."""
    import dataclasses

    import torch
    import transformers as hf

    from labkit.models import load_model_weights

    config = hf.Qwen3Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=512, max_position_embeddings=512, architectures=["Qwen3Model"],
    )  # fmt: skip
    torch.manual_seed(5)
    model = hf.Qwen3Model(config).float().eval()
    model.save_pretrained(tmp_path)
    model = model.to("cuda", getattr(torch, dtype))
    spec = dataclasses.replace(load_model(tmp_path), is_embedding=True)
    decoder = load_model_weights(spec, tmp_path, dtype, device="cuda")
    texts = [[5], list(range(3, 40)), list(range(300)), [7] * 100, [9, 8]]
    for kind in ("last", "mean", "cls"):
        wanted = []
        for text in texts:
            with torch.inference_mode():
                hidden = model(torch.tensor([text], device="cuda")).last_hidden_state[0].float()
            row = {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[kind]
            wanted.append(torch.nn.functional.normalize(row, dim=0))
        for tokens_in_step in (64, 1024):
            engine = make_engine(decoder, max_num_batched_tokens=tokens_in_step)
            found = embed(engine, texts, pooling=kind)
            engine.close()
            assert found.device.type == "cuda"
            likeness = (found * torch.stack(wanted)).sum(1)
            assert float(likeness.min()) > (1 - 1e-5 if dtype == "float32" else 0.999)


def test_another_quantisation_reloads_only_weights():
    """Through the worker's backend: 16 bit, fp8, 4 bit and back; nothing of the others stays on the card."""
    import torch

    model = load_model("Qwen/Qwen3-0.6B")
    backend, seen = EngineBackend(), []
    workload = to_plain(synthetic_workload(4, input_lengths=64, output_lengths=8, seed=1))
    for quantization in (None, "fp8", "awq", None):
        config = EngineConfig(
            max_model_len=512, max_num_seqs=8, max_num_batched_tokens=512, gpu_memory_utilization=0.05,
            num_gpu_blocks_override=300, quantization=quantization, load_format="dummy", enforce_eager=True,
        )  # fmt: skip
        plan = make_plan(model, load_gpu("H200"), config)
        arguments = {
            "model": to_plain(model), "source": "", "dtype": "auto", "load_format": "dummy", "device": "cuda",
            "quantization": quantization,
        }  # fmt: skip
        backend.load(arguments, lambda event: None, lambda: False)
        backend.configure({"plan": to_plain(plan)}, lambda event: None, lambda: False)
        run = {"workload": workload, "options": to_plain(RunOptions())}
        answer = backend.run(run, lambda event: None, lambda: False)
        assert answer["status"] == "finished"
        weights = answer["memory_parts"]["weights"]
        # The plan counts one rotary table and what torch's allocator rounds up.
        assert weights == pytest.approx(plan.breakdown.weights_bytes, rel=0.02)
        seen.append(weights)
    backend.close()
    torch.cuda.empty_cache()
    assert seen[0] == seen[3] > seen[1] > seen[2]


def test_a_checkpoint_of_4_bits_is_refused_on_words_alone():
    spec = make_spec(weight_format=WeightFormat("gptq", 4, 128, True))
    with pytest.raises(Exception, match="gptq weights of 4 bits"):
        make_decoder(spec, "bfloat16")
