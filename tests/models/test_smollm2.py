"""The real model: weights, logits and greedy tokens against transformers' (fixtures of make_smollm2_fixtures.py)."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import pytest
import torch

from labkit.models import DenseAttention, load_model_weights
from labkit.specs.gguf_spec import model_from_gguf

DATA = Path(__file__).with_name("data")


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf, one_thread):
    """Plain weights; the test of batched greedy decoding loads packed ones too."""
    return load_model_weights(model_from_gguf(smollm2_gguf), smollm2_gguf, "float32", pack_weights=False)


def fixture(name: str) -> dict:
    return json.loads((DATA / name).read_text())


def named_weights(decoder) -> dict[str, torch.Tensor]:
    """The fused weights taken apart again, under transformers' names."""
    weights = {"model.embed_tokens.weight": decoder.weights.embedding, "model.norm.weight": decoder.weights.final_norm}
    for index, (spec, layer) in enumerate(zip(decoder.spec.layers, decoder.weights.layers, strict=True)):
        prefix = f"model.layers.{index}."
        rows = [spec.num_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]
        for name, part in zip("qkv", layer.qkv.split(rows), strict=True):
            weights[f"{prefix}self_attn.{name}_proj.weight"] = part
        for name, part in zip(("gate", "up"), layer.gate_up.chunk(2), strict=True):
            weights[f"{prefix}mlp.{name}_proj.weight"] = part
        weights[f"{prefix}mlp.down_proj.weight"] = layer.down
        weights[f"{prefix}self_attn.o_proj.weight"] = layer.output
        weights[f"{prefix}input_layernorm.weight"] = layer.attention_norm
        weights[f"{prefix}post_attention_layernorm.weight"] = layer.mlp_norm
    return weights


def test_weights_load_in_under_two_seconds_of_cpu_time(smollm2_gguf, one_thread):
    """0.5 s here; transformers takes 25 to 50 s for the same file."""
    spent = []
    for _ in range(3):
        start = time.process_time()
        load_model_weights(model_from_gguf(smollm2_gguf), smollm2_gguf, "float32")
        spent.append(time.process_time() - start)
    assert min(spent) < 2.0


def test_weights_are_bit_identical_to_transformers_dequantised(smollm2):
    found = {
        name: hashlib.sha256(weight.contiguous().numpy().tobytes()).hexdigest()
        for name, weight in named_weights(smollm2).items()
    }
    assert found == fixture("smollm2_tensors.json")["sha256"]
    assert smollm2.num_bytes == 134_515_008 * 4
    assert smollm2.weights.head is smollm2.weights.embedding


def test_bfloat16_is_the_rounded_float32(smollm2, smollm2_gguf):
    half = load_model_weights(smollm2.spec, smollm2_gguf, "auto", pack_weights=False)
    assert half.dtype == torch.bfloat16
    for mine, full in zip(half.weights.tensors(), smollm2.weights.tensors(), strict=True):
        assert torch.equal(mine, full.to(torch.bfloat16))


def test_logits_equal_transformers(smollm2):
    for sample in fixture("smollm2_logits.json")["samples"]:
        tokens = torch.tensor(sample["prompt"])
        backend = DenseAttention(smollm2.spec, [len(tokens)])
        logits = smollm2.logits(smollm2.forward(tokens, torch.arange(len(tokens)), backend))
        assert logits.argmax(-1).tolist() == sample["best"]
        expected = torch.tensor(sample["every_4096th"])
        torch.testing.assert_close(logits[:, ::4096], expected, atol=5e-4, rtol=1e-4)
        torch.testing.assert_close(logits.logsumexp(-1), torch.tensor(sample["logsumexp"]), atol=5e-4, rtol=1e-4)


def test_all_greedy_tokens_are_the_best_after_their_beginnings(smollm2):
    """32 prompts × 64 tokens: the argmax after prompt and first i tokens is token i + 1, as transformers generated."""
    runs = fixture("smollm2_greedy.json")["runs"]
    assert (len(runs), {len(run["tokens"]) for run in runs}) == (32, {64})
    assert min(len(run["prompt"]) for run in runs) == 5
    assert max(len(run["prompt"]) for run in runs) == 200
    for run in runs:
        tokens = torch.tensor(run["prompt"] + run["tokens"][:-1])
        hidden = smollm2.forward(tokens, torch.arange(len(tokens)), DenseAttention(smollm2.spec, [len(tokens)]))
        assert smollm2.logits(hidden[len(run["prompt"]) - 1 :]).argmax(-1).tolist() == run["tokens"]


@pytest.mark.parametrize("pack_weights", [True, False])
def test_greedy_decoding_in_a_batch_equals_transformers(smollm2, smollm2_gguf, pack_weights):
    if pack_weights:
        smollm2 = load_model_weights(smollm2.spec, smollm2_gguf, "float32")
    runs = fixture("smollm2_greedy.json")["runs"][6:14]
    lengths = [len(run["prompt"]) for run in runs]
    backend = DenseAttention(smollm2.spec, lengths)
    tokens = torch.tensor([token for run in runs for token in run["prompt"]])
    positions = torch.cat([torch.arange(length) for length in lengths])
    rows = torch.tensor(lengths).cumsum(0) - 1
    for step in range(12):
        best = smollm2.logits(smollm2.forward(tokens, positions, backend)[rows]).argmax(-1)
        assert best.tolist() == [run["tokens"][step] for run in runs]
        backend.begin([1] * len(runs))
        tokens, positions, rows = best, torch.tensor(lengths) + step, torch.arange(len(runs))
