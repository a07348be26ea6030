"""Embeddings against transformers' own hidden states."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers as hf

from labkit.errors import OutOfRangeError
from labkit.models import embed, load_model_weights
from labkit.specs.model_loading import load_model

TEXTS = [[5, 9, 31], [7] * 20, [100], list(range(40))]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory, one_thread):
    """A random Qwen3 body as embedding models are published: without head, names without "model."."""
    folder = tmp_path_factory.mktemp("qwen3-embedding")
    config = hf.Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=128, max_position_embeddings=64, architectures=["Qwen3Model"],
    )  # fmt: skip
    torch.manual_seed(1)
    model = hf.Qwen3Model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    spec = dataclasses.replace(load_model(folder), is_embedding=True)
    return model, load_model_weights(spec, folder, "float32")


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("max_batched_tokens", [1, 22, 4096])
def test_embeddings_equal_transformers(qwen3, pooling, max_batched_tokens):
    model, decoder = qwen3
    found = embed(decoder, TEXTS, pooling=pooling, max_batched_tokens=max_batched_tokens)
    for vector, tokens in zip(found, TEXTS, strict=True):
        with torch.inference_mode():
            hidden = model(torch.tensor([tokens])).last_hidden_state[0]
        expected = hidden[-1] if pooling == "last" else hidden.mean(dim=0)
        torch.testing.assert_close(vector, expected / expected.norm(), atol=2e-5, rtol=1e-4)


def test_lengths_and_default_pooling(qwen3):
    _, decoder = qwen3
    assert torch.allclose(embed(decoder, TEXTS).norm(dim=-1), torch.ones(4), atol=1e-5)
    raw = embed(decoder, TEXTS, normalize=False)
    assert not torch.allclose(raw.norm(dim=-1), torch.ones(4), atol=1e-2)
    assert torch.equal(embed(decoder, TEXTS), embed(decoder, TEXTS, pooling="last"))
    assert embed(decoder, []).shape == (0, 64)


@pytest.mark.parametrize("texts", [[[]], [[1], [128]], [[-1]], [[1] * 65]])
def test_refuses_texts_that_the_model_cannot_read(qwen3, texts):
    with pytest.raises(OutOfRangeError):
        embed(qwen3[1], texts)


def test_refuses_unknown_pooling(qwen3):
    with pytest.raises(OutOfRangeError, match="pooling"):
        embed(qwen3[1], [[1]], pooling="first")
