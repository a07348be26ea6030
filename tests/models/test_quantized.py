"""AWQ and fp8 weights: logits of transformers over the same rounded weights, bytes of the plan, refusals by name."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from labkit.errors import FileFormatError, LabkitError, OutOfRangeError, UnsupportedError
from labkit.memory import plan as make_plan
from labkit.memory.tensors import Sharing
from labkit.memory.weights import StageLayers, stage_weights_bytes
from labkit.models import DenseAttention, load_model_weights
from labkit.models.quantization import engine_format
from labkit.models.quantized import FEW_ROWS, AwqMatrix, Fp8Matrix, quantize_fp8
from labkit.specs import load_gpu
from labkit.specs.engine_config import EngineConfig
from labkit.specs.model_loading import load_model
from labkit.specs.model_spec import WeightFormat
from tests.models.test_tensor_parallel import ThreadRanks

TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
MOE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
CASES = {
    "llama": (hf.LlamaConfig, {}),
    "qwen2": (hf.Qwen2Config, {"tie_word_embeddings": True}),
    "phi3": (hf.Phi3Config, {"pad_token_id": 0}),
    "qwen3-moe": (hf.Qwen3MoeConfig, MOE),
}
TOKENS = torch.arange(3, 35)


def random_model(name: str) -> torch.nn.Module:
    config_class, changes = CASES[name]
    torch.manual_seed(len(name))
    model = hf.AutoModelForCausalLM.from_config(config_class(**{**TINY, **changes}, attn_implementation="eager"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.float().eval()


def matrices(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The weights that both formats shrink, by name; experts are stacked in transformers' classes."""
    kept = ("embed", "lm_head", "norm", "mlp.gate.weight")
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and not any(word in name for word in kept)
    }


# AutoAWQ's order of the eight columns in a word, lowest bits first, written down by hand.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def packed(values: np.ndarray) -> torch.Tensor:
    words = np.zeros((values.shape[0], values.shape[1] // 8), np.uint32)
    for place, column in enumerate(ORDER):
        words |= values[:, column::8].astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32).copy())


def awq(weight: torch.Tensor, group: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Stored tensors of `weight` [out, in], and the weight that they stand for."""
    columns = weight.detach().t().double().numpy()
    inputs, outputs = columns.shape
    grouped = columns.reshape(inputs // group, group, outputs)
    low, high = grouped.min(1), grouped.max(1)
    scales = ((high - low) / 15).astype(np.float16)
    zeros = np.clip(np.round(-low / scales.astype(np.float64)), 0, 15)
    ratio = grouped / scales[:, None].astype(np.float64) + zeros[:, None]
    numbers = np.clip(np.round(ratio), 0, 15)
    rounded = ((numbers - zeros[:, None]) * scales[:, None].astype(np.float64)).reshape(inputs, outputs)
    tensors = {
        "qweight": packed(numbers.reshape(inputs, outputs)),
        "qzeros": packed(zeros),
        "scales": torch.from_numpy(np.ascontiguousarray(scales)),
    }
    return tensors, torch.from_numpy(rounded).t().float()


def save_awq(model: torch.nn.Module, folder, group: int) -> None:
    """Save `model` as AutoAWQ does and give it the weights that were stored."""
    tensors = {}
    shrunk = matrices(model)
    for name, parameter in shrunk.items():
        for part, rows in one_by_one(name, parameter):
            stored, rounded = awq(rows, group or rows.shape[1])
            tensors |= {f"{part}.{kind}": tensor for kind, tensor in stored.items()}
            with torch.no_grad():
                rows.copy_(rounded)
    tied = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        if name not in shrunk and not (tied and name == "lm_head.weight"):
            tensors[name] = parameter.detach().clone()
    save_file(tensors, folder / "model.safetensors")
    config = model.config.to_dict()
    config["quantization_config"] = {
        "quant_method": "awq", "bits": 4, "group_size": group or -1, "zero_point": True, "version": "gemm",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def one_by_one(name: str, parameter: torch.Tensor):
    """The module name and rows of each stored matrix of a parameter."""
    if parameter.ndim == 2:
        yield name.removesuffix(".weight"), parameter.data
        return
    room, _, kind = name.rpartition(".")
    for index, expert in enumerate(parameter.data):
        parts = zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True) if kind == "gate_up_proj" else ()
        for part, rows in [*parts] or [("down_proj", expert)]:
            yield f"{room}.{index}.{part}", rows


def logits_of(decoder) -> torch.Tensor:
    hidden = decoder.forward(TOKENS, torch.arange(len(TOKENS)), DenseAttention(decoder.spec, [len(TOKENS)]))
    return decoder.logits(hidden)


def expected_logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKENS.unsqueeze(0)).logits[0]


def planned_bytes(spec, fmt: WeightFormat, dtype: str = "float32") -> int:
    whole = StageLayers(0, spec.num_layers, spec.num_layers)
    return stage_weights_bytes(spec, whole, Sharing(), fmt, dtype, allocator=False)


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert wanted.std() > 0.1
    torch.testing.assert_close(found, wanted, atol=1e-4 * max(1.0, float(wanted.abs().max())), rtol=0)


@pytest.mark.parametrize(("name", "group"), [("llama", 32), ("qwen2", 64), ("phi3", 0), ("qwen3-moe", 32)])
def test_awq_logits_equal_transformers_over_the_stored_weights(name, group, tmp_path, one_thread):
    model = random_model(name)
    before = expected_logits(model)
    save_awq(model, tmp_path, group)
    wanted = expected_logits(model)
    assert (wanted - before).abs().max() > 1e-2
    spec = load_model(tmp_path)
    assert_near(logits_of(load_model_weights(spec, tmp_path, "float32")), wanted)
    kept = load_model_weights(spec, tmp_path, "float32", quantization="awq", dequantize=False)
    assert_near(logits_of(kept), wanted)
    assert isinstance(kept.weights.layers[0].qkv, AwqMatrix)
    if name != "qwen3-moe":  # its norms of heads are kept once for each head
        assert kept.num_bytes == planned_bytes(spec, spec.weight_format)


@pytest.mark.parametrize(("name", "group"), [("llama", 32), ("phi3", 0)])
def test_awq_ranks_together_equal_one(name, group, tmp_path, one_thread):
    model = random_model(name)
    save_awq(model, tmp_path, group)
    spec, ranks = load_model(tmp_path), ThreadRanks(2)
    decoders = [
        load_model_weights(spec, tmp_path, "float32", ranks=ranks.of(rank), dequantize=False) for rank in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        for logits in pool.map(logits_of, decoders):
            assert_near(logits, expected_logits(model))


def test_modules_that_awq_leaves_alone_are_read_plain(tmp_path, one_thread):
    model = random_model("llama")
    save_awq(model, tmp_path, 32)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    plain = "model.layers.0.mlp.down_proj"
    for kind in ("qweight", "qzeros", "scales"):
        del tensors[f"{plain}.{kind}"]
    tensors[f"{plain}.weight"] = model.get_submodule(plain).weight.detach().clone()
    save_file(tensors, path)
    decoder = load_model_weights(load_model(tmp_path), tmp_path, "float32", dequantize=False)
    assert not isinstance(decoder.weights.layers[0].down, AwqMatrix)
    assert isinstance(decoder.weights.layers[1].down, AwqMatrix)
    assert_near(logits_of(decoder), expected_logits(model))


# Every finite e4m3 number by its bits: sign, four of exponent (bias 7), three of mantissa; 0x7f is NaN.
E4M3 = np.array(
    [(m / 8 * 2.0**-6) if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:-1]
)


def fp8_rounded(weight: torch.Tensor, *, per_channel: bool) -> torch.Tensor:
    """The nearest numbers that e4m3 has, by search; ties go to the even mantissa."""
    rows = weight.detach().double().numpy()
    largest = np.abs(rows).max(1, keepdims=True) if per_channel else np.abs(rows).max()
    scale = (np.asarray(largest, np.float32) / np.float32(448)).astype(np.float64)
    ratio = np.abs((rows.astype(np.float32) / scale.astype(np.float32)).astype(np.float64))
    upper = np.clip(np.searchsorted(E4M3, ratio), 1, len(E4M3) - 1)
    below, above = E4M3[upper - 1], E4M3[upper]
    nearer_above = (above - ratio < ratio - below) | ((above - ratio == ratio - below) & (upper % 2 == 0))
    return torch.from_numpy(np.sign(rows) * np.where(nearer_above, above, below) * scale).float()


@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_tensor", "fp8_per_channel"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3-moe"])
def test_fp8_logits_equal_transformers_over_rounded_weights(name, quantization, tmp_path, one_thread):
    model = random_model(name)
    model.save_pretrained(tmp_path)
    before = expected_logits(model)
    spec = load_model(tmp_path)
    fmt = engine_format(spec, quantization)
    with torch.no_grad():
        for stored, parameter in matrices(model).items():
            if fmt.group_size < 0 and "self_attn.o_proj" not in stored:
                continue
            parts = [rows for _, rows in one_by_one(stored, parameter)]
            for rows in parts:
                rows.copy_(fp8_rounded(rows, per_channel=fmt.group_size == 0))
        if fmt.group_size < 0:
            round_fused(model)
    wanted = expected_logits(model)
    assert (wanted - before).abs().max() > 1e-3
    assert_near(logits_of(load_model_weights(spec, tmp_path, "float32", quantization=quantization)), wanted)
    kept = load_model_weights(spec, tmp_path, "float32", quantization=quantization, dequantize=False)
    assert_near(logits_of(kept), wanted)
    assert isinstance(kept.weights.layers[0].qkv, Fp8Matrix)
    assert not isinstance(kept.weights.head, Fp8Matrix)
    if name != "qwen3-moe":
        assert kept.num_bytes == planned_bytes(spec, fmt)


def round_fused(model: torch.nn.Module) -> None:
    """One scale for Q, K and V together, and one for gate and up, as the engine and vLLM keep them."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        groups = [[attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]]
        if hasattr(mlp, "experts"):
            groups += [[expert] for expert in (*mlp.experts.gate_up_proj.data, *mlp.experts.down_proj.data)]
        else:
            groups += [[mlp.gate_proj.weight, mlp.up_proj.weight], [mlp.down_proj.weight]]
        for group in groups:
            rounded = fp8_rounded(torch.cat([weight.data for weight in group]), per_channel=False)
            for weight, rows in zip(group, rounded.split([weight.shape[0] for weight in group]), strict=True):
                weight.data.copy_(rows)


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("per_channel", [True, False])
def test_fp8_product_is_the_product_of_what_was_rounded(rows, per_channel, one_thread):
    """The product of a card with fp8 units, which torch computes on a CPU too."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(48, 64, generator=generator).bfloat16()
    bias = torch.randn(48, generator=generator).bfloat16()
    matrix = quantize_fp8(weight, per_channel=per_channel)
    matrix = Fp8Matrix(matrix.weight, matrix.scale, multiplies_fp8=True)
    x = torch.randn(rows, 64, generator=generator).bfloat16()
    wanted = fp8_rounded(x, per_channel=True).double() @ matrix.dequantize(torch.float32).double().t() + bias.double()
    found = matrix.project(x, bias)
    assert found.shape == (rows, 48)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), wanted, atol=0.03, rtol=0.01)


@pytest.mark.parametrize("per_channel", [True, False])
def test_fp8_weights_in_the_order_of_the_few_rows_product(per_channel, one_thread):
    """Few rows are multiplied as they are, more of them rounded to fp8 first; the weight itself is the same."""
    few_rows = pytest.importorskip("labkit_kernels.few_rows")
    if not pytest.importorskip("labkit_kernels.ops").interpreting():
        pytest.skip("needs a card or Triton's interpreter")
    weight, x = torch.randn(48, 256).bfloat16(), torch.randn(FEW_ROWS + 1, 256)
    plain = quantize_fp8(weight, per_channel=per_channel)
    matrix = Fp8Matrix(few_rows.interleave(plain.weight), plain.scale, multiplies_fp8=True, is_interleaved=True)
    dense = plain.dequantize(torch.float32)
    assert torch.equal(matrix.dequantize(torch.float32), dense)
    for rows in (1, FEW_ROWS):
        found = matrix.project(x[:rows].half()).double()
        torch.testing.assert_close(found, x[:rows].half().double() @ dense.double().t(), atol=0.02, rtol=1e-3)
    wanted = fp8_rounded(x.bfloat16(), per_channel=True).double() @ dense.double().t()
    torch.testing.assert_close(matrix.project(x.bfloat16()).double(), wanted, atol=0.3, rtol=0.01)
    assert torch.equal(matrix.project(x[:0].half()), torch.empty(0, 48).half())


def test_fp8_of_zeros_and_of_wide_ranges(one_thread):
    weight = torch.tensor([[0.0] * 16, [1e30] * 16, [1e-30] * 16, [448.0, -448.0] * 8])
    matrix = quantize_fp8(weight, per_channel=True)
    back = matrix.dequantize(torch.float32)
    assert torch.isfinite(back).all()
    torch.testing.assert_close(back[[0, 1, 3]], weight[[0, 1, 3]], rtol=1e-6, atol=0)


def test_random_weights_in_both_formats_are_as_wide_as_in_16_bit(tmp_path, one_thread):
    hf.LlamaConfig(**{**TINY, "intermediate_size": 256, "hidden_size": 128}).save_pretrained(tmp_path)
    spec = load_model(tmp_path)
    for quantization in (None, "awq", "fp8"):
        decoder = load_model_weights(spec, None, "float32", "dummy", quantization=quantization, pack_weights=False)
        width = decoder.weights.layers[1].down.std()
        assert float(width) == pytest.approx(256**-0.5, rel=0.1)
        assert torch.isfinite(logits_of(decoder)).all()
    kept = load_model_weights(spec, None, "float32", "dummy", quantization="awq", dequantize=False)
    assert kept.num_bytes == planned_bytes(spec, engine_format(spec, "awq", "dummy"))


@pytest.mark.parametrize("quantization", [None, "fp8", "awq"])
def test_a_cpu_holds_what_the_plan_of_a_cpu_says(quantization, tmp_path, one_thread):
    """Formats are undone there, in the plan as in the engine."""
    hf.LlamaConfig(**{**TINY, "intermediate_size": 256, "hidden_size": 128}).save_pretrained(tmp_path)
    spec = load_model(tmp_path)
    config = EngineConfig(quantization=quantization, cpu_memory_gib=0.5, max_model_len=64, load_format="dummy")
    decoder = load_model_weights(spec, None, "float32", "dummy", quantization=quantization)
    decoder.reserve_positions(64)
    planned = make_plan(spec, load_gpu("cpu"), config).breakdown.weights_bytes
    assert decoder.num_bytes + decoder.table_bytes == planned


REFUSED = {
    "gptq": (None, "gptq", UnsupportedError, "no gptq weights"),
    "bitsandbytes": (None, "bitsandbytes", UnsupportedError, "no bitsandbytes weights"),
    "fp8_per_block": (None, "fp8_per_block", UnsupportedError, "no fp8_per_block weights"),
    "awq of a plain folder": (None, "awq", OutOfRangeError, "AutoAWQ"),
    "fp8 of an AWQ folder": (WeightFormat("awq", 4, 128, True), "fp8", OutOfRangeError, "stored as awq"),
    "fp8 of a GGUF file": (WeightFormat("gguf"), "fp8", OutOfRangeError, "stored as gguf"),
    "a GPTQ folder": (WeightFormat("gptq", 4, 128, True), None, UnsupportedError, "gptq weights of 4 bits"),
    "an MXFP4 folder": (WeightFormat("mxfp4", 4, 32), None, UnsupportedError, "mxfp4 weights"),
    "an fp8 folder": (WeightFormat("fp8", 8, -1), None, UnsupportedError, "fp8 weights of 8 bits"),
    "AWQ without zeros": (WeightFormat("awq", 4, 128, False), None, UnsupportedError, "awq weights"),
    "AWQ of 8 bits": (WeightFormat("awq", 8, 128, True), None, UnsupportedError, "awq weights of 8 bits"),
    "AWQ in odd groups": (WeightFormat("awq", 4, 48, True), "awq", UnsupportedError, "groups of 48"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_formats_that_the_engine_lacks_are_refused_by_name(case, tmp_path):
    fmt, quantization, error, text = REFUSED[case]
    random_model("llama").save_pretrained(tmp_path)
    spec = load_model(tmp_path)
    if fmt is not None:
        spec = spec.replace(weight_format=fmt)
    with pytest.raises(LabkitError, match=text) as caught:
        load_model_weights(spec, tmp_path, quantization=quantization)
    assert type(caught.value) is error
    assert caught.value.knob == "quantization"
    assert caught.value.works


def test_broken_awq_files_are_named(tmp_path, one_thread):
    model = random_model("llama")
    save_awq(model, tmp_path, 32)
    spec = load_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj"
    for broken, text in (
        ({**tensors, f"{name}.qzeros": tensors[f"{name}.qzeros"][:1].clone()}, rf"{name}.qzeros.* has shape \(1, 4\)"),
        ({key: tensor for key, tensor in tensors.items() if key != f"{name}.scales"}, f"{name}.scales.* is missing"),
        ({**tensors, f"{name}.qweight": tensors[f"{name}.qweight"].float()}, "has type F32, allowed are I32"),
        ({**tensors, f"{name}.g_idx": torch.zeros(64, dtype=torch.int32)}, "has type I32"),
    ):
        save_file(broken, tmp_path / "model.safetensors")
        with pytest.raises(FileFormatError, match=text):
            load_model_weights(spec, tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    wide = spec.replace(weight_format=WeightFormat("awq", 4, 128, True))
    with pytest.raises(OutOfRangeError, match="no multiples of 128"):
        load_model_weights(wide, tmp_path)
