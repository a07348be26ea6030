"""Logits of every family against transformers on the same random tiny model, float32."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
import torch
import transformers as hf

from labkit.models import DenseAttention, load_model_weights
from labkit.specs.model_loading import load_model

_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_MSCALE = {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0 + 0.05 * index for index in range(8)], "long_factor": [2.0 + index for index in range(8)],
}  # fmt: skip
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

CASES = {
    "llama": (hf.LlamaConfig, {}),
    "llama-tied": (hf.LlamaConfig, {"tie_word_embeddings": True}),
    "llama-head-dim": (hf.LlamaConfig, {"head_dim": 24}),
    "llama-biases": (hf.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": (hf.LlamaConfig, {"rope_parameters": _LLAMA3}),
    "llama-rope-linear": (hf.LlamaConfig, {"rope_parameters": _LINEAR}),
    "llama-rope-yarn": (hf.LlamaConfig, {"rope_parameters": _YARN}),
    "llama-rope-yarn-mscale": (hf.LlamaConfig, {"rope_parameters": _MSCALE}),
    "llama-rope-dynamic": (hf.LlamaConfig, {"rope_parameters": _DYNAMIC}),
    "llama-multi-query": (hf.LlamaConfig, {"num_key_value_heads": 1}),
    "qwen2": (hf.Qwen2Config, {}),
    "qwen2-window": (hf.Qwen2Config, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": (hf.Qwen3Config, {"head_dim": 32}),
    "qwen3-moe": (
        hf.Qwen3MoeConfig,
        {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
         "norm_topk_prob": True},
    ),
    "mistral": (hf.MistralConfig, {"sliding_window": None}),
    "mistral-window": (hf.MistralConfig, {"sliding_window": 7}),
    "phi3": (hf.Phi3Config, {"pad_token_id": 0, "partial_rotary_factor": 0.5}),
    "phi3-longrope": (
        hf.Phi3Config,
        {"pad_token_id": 0, "original_max_position_embeddings": 32, "rope_parameters": _LONGROPE},
    ),
    "gemma2": (hf.Gemma2Config, {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 6}),
    "gemma3": (
        hf.Gemma3TextConfig,
        {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 6, "rope_parameters": _GEMMA3_ROPE,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}  # fmt: skip


def save_random_model(name: str, folder) -> torch.nn.Module:
    """A tiny model of case `name` whose every weight, norms and biases too, is random; saved as safetensors."""
    config_class, changes = CASES[name]
    torch.manual_seed(len(name))
    config = config_class(**{**_TINY, **changes}, attn_implementation="eager")
    model = hf.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name, tmp_path, one_thread):
    model = save_random_model(name, tmp_path)
    spec = load_model(tmp_path)
    decoder = load_model_weights(spec, tmp_path, "float32")
    tokens = torch.randint(0, 128, (50,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = model(tokens.unsqueeze(0)).logits[0]
    decoder.reserve_positions(50)
    hidden = decoder.forward(tokens, torch.arange(50), DenseAttention(spec, [50]))
    logits = decoder.logits(hidden)
    assert logits.dtype == torch.float32
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))
    assert sum(p.numel() for p in model.parameters()) * 4 == _published_bytes(decoder, spec)


def test_longrope_is_short_until_more_positions_are_planned(tmp_path, one_thread):
    """transformers switches by the length at hand; labkit, as vLLM, by the longest that is planned."""
    model = save_random_model("phi3-longrope", tmp_path)
    spec = load_model(tmp_path)
    decoder = load_model_weights(spec, tmp_path, "float32")
    tokens = torch.arange(32)
    with torch.inference_mode():
        short = model(tokens.unsqueeze(0)).logits[0]
    before = decoder.logits(decoder.forward(tokens, tokens, DenseAttention(spec, [32])))
    torch.testing.assert_close(before, short, atol=1e-3, rtol=1e-4)
    decoder.reserve_positions(33)
    after = decoder.logits(decoder.forward(tokens, tokens, DenseAttention(spec, [32])))
    assert (after - short).abs().max() > 0.01


def _published_bytes(decoder, spec) -> int:
    """Bytes as published: labkit repeats head norms for each head, for one multiplication."""
    repeated = 0
    for layer, weights in zip(spec.layers, decoder.weights.layers, strict=True):
        if weights.head_norm is not None:
            repeated += (layer.num_heads + layer.num_kv_heads - 2) * layer.head_dim * weights.head_norm.element_size()
    return decoder.num_bytes - repeated


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window", "gemma2", "gemma3"])
def test_several_sequences_in_steps_equal_each_alone(name, tmp_path, one_thread):
    """Flat batches, chunks and single tokens give what one whole pass gives: the form in which the engine calls."""
    model = save_random_model(name, tmp_path)
    spec = load_model(tmp_path)
    decoder = load_model_weights(spec, tmp_path, "float32")
    lengths, steps = (17, 9, 30), [(5, 9, 20), (1, 0, 9), (11, 0, 1)]
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(0, 128, (length,), generator=generator) for length in lengths]
    backend, done = DenseAttention(spec, [0, 0, 0]), [0, 0, 0]
    found = [[], [], []]
    for step in steps:
        backend.begin(step)
        spans = [(start, start + count) for start, count in zip(done, step, strict=True)]
        tokens = torch.cat([sequence[a:b] for sequence, (a, b) in zip(sequences, spans, strict=True)])
        positions = torch.cat([torch.arange(a, b) for a, b in spans])
        logits = decoder.logits(decoder.forward(tokens, positions, backend))
        for index, rows in enumerate(logits.split(step)):
            found[index].append(rows)
        done = [end for _, end in spans]
    for sequence, rows in zip(sequences, found, strict=True):
        with torch.inference_mode():
            expected = model(sequence.unsqueeze(0)).logits[0]
        torch.testing.assert_close(torch.cat(rows), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_half_precision_stays_near_float32(name, dtype, tmp_path, one_thread):
    save_random_model(name, tmp_path)
    spec = load_model(tmp_path)
    tokens = torch.arange(40)
    results = []
    for kind in ("float32", dtype):
        decoder = load_model_weights(spec, tmp_path, kind)
        assert decoder.weights.embedding.dtype == getattr(torch, kind)
        hidden = decoder.forward(tokens, tokens, DenseAttention(spec, [40]))
        results.append(decoder.logits(hidden))
    error = (results[0] - results[1]).norm() / results[0].norm()
    assert error < (0.05 if dtype == "bfloat16" else 0.01)
