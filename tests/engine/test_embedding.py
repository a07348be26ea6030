"""Embeddings through the engine equal sentence-transformers' maths on transformers' hidden states."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers as hf

from labkit.engine import Engine, EngineRequest, SamplingParams
from labkit.engine.embedding import embed
from labkit.engine.simulation import bare_plan
from labkit.errors import DoesNotFitError, LabkitError, OutOfRangeError, UnsupportedError
from labkit.models import load_model_weights
from labkit.specs.engine_config import EngineConfig
from labkit.specs.model_loading import load_model

TEXTS = [[5, 9, 31], [7], [100] * 20, list(range(45)), [8, 9], list(range(60, 10, -1))]
FAMILIES = {
    "qwen3": (hf.Qwen3Config, hf.Qwen3Model, {"head_dim": 32}),
    "mistral": (hf.MistralConfig, hf.MistralModel, {"sliding_window": 7}),
    "llama": (hf.LlamaConfig, hf.LlamaModel, {}),
}


def save_body(family: str, folder) -> torch.nn.Module:
    config_class, model_class, changes = FAMILIES[family]
    torch.manual_seed(len(family))
    config = config_class(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, max_position_embeddings=64, architectures=[model_class.__name__], **changes,
    )  # fmt: skip
    model = model_class(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def sentence_vectors(model: torch.nn.Module, kind: str) -> torch.Tensor:
    """One padded batch; pooling by mask and unit length, as the Pooling and Normalize modules do."""
    width = max(map(len, TEXTS))
    tokens = torch.tensor([[*text, *[0] * (width - len(text))] for text in TEXTS])
    mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in TEXTS])
    with torch.inference_mode():
        hidden = model(tokens, attention_mask=mask).last_hidden_state
    wide = mask.unsqueeze(-1).float()
    if kind == "mean":
        vectors = (hidden * wide).sum(1) / wide.sum(1).clamp(min=1e-9)
    else:
        vectors = hidden[torch.arange(len(TEXTS)), mask.sum(1) - 1] if kind == "last" else hidden[:, 0]
    return torch.nn.functional.normalize(vectors, p=2, dim=1)


@pytest.fixture(scope="module", params=FAMILIES)
def model_and_decoder(request, tmp_path_factory, one_thread):
    folder = tmp_path_factory.mktemp(request.param)
    model = save_body(request.param, folder)
    spec = dataclasses.replace(load_model(folder), is_embedding=True)
    return model, load_model_weights(spec, folder, "float32")


def make_engine(decoder, blocks: int = 32, **knobs) -> Engine:
    config = EngineConfig(
        **{"max_model_len": 64, "max_num_seqs": 3, "max_num_batched_tokens": 32, "block_size": 4, **knobs}
    )
    return Engine(decoder, bare_plan(decoder.spec, config, blocks, 0))


@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
@pytest.mark.parametrize("tokens_in_step", [3, 32, 256])
def test_vectors_equal_sentence_transformers(model_and_decoder, kind, tokens_in_step):
    model, decoder = model_and_decoder
    engine = make_engine(decoder, max_num_batched_tokens=tokens_in_step)
    found = embed(engine, TEXTS, pooling=kind)
    torch.testing.assert_close(found, sentence_vectors(model, kind), atol=2e-5, rtol=1e-4)
    engine.check()
    assert engine.scheduler.pool.num_used == 0


def test_the_models_own_pooling_raw_vectors_and_none(model_and_decoder):
    _, decoder = model_and_decoder
    engine = make_engine(decoder)
    assert torch.equal(embed(engine, TEXTS), embed(engine, TEXTS, pooling="last"))
    raw = embed(engine, TEXTS, normalize=False)
    torch.testing.assert_close(torch.nn.functional.normalize(raw), embed(engine, TEXTS))
    assert not torch.allclose(raw.norm(dim=1), torch.ones(len(TEXTS)), atol=0.01)
    assert embed(engine, []).shape == (0, 64)


def test_blocks_that_requests_left_in_the_prefix_cache_stay_true(model_and_decoder):
    """Texts take free blocks, and cached ones only by evicting them."""
    _, decoder = model_and_decoder
    engine, fresh = make_engine(decoder, blocks=20), make_engine(decoder, blocks=20)
    request = EngineRequest(1, tuple(range(3, 27)), SamplingParams(max_tokens=4, ignore_eos=True))

    def serve(target: Engine) -> tuple[int, ...]:
        target.add_request(request)
        while target.has_unfinished:
            finished = target.step().finished
        return finished[0].token_ids

    expected = serve(fresh)
    for _ in range(2):
        assert serve(engine) == expected
        embed(engine, TEXTS)
        engine.check()


def test_refusals(model_and_decoder):
    _, decoder = model_and_decoder
    engine = make_engine(decoder, blocks=8)
    with pytest.raises(DoesNotFitError, match=r"needed: 45 tokens; available: 32 tokens") as caught:
        embed(engine, TEXTS)
    assert caught.value.knob == "gpu_memory_utilization"
    with pytest.raises(DoesNotFitError, match="available: 16 tokens") as caught:
        embed(make_engine(decoder, max_model_len=16), [[1] * 17])
    assert caught.value.knob == "max_model_len"
    for texts in ([[]], [[128]], [[-1]]):
        with pytest.raises(OutOfRangeError):
            embed(engine, texts)
    with pytest.raises(OutOfRangeError, match="last or mean or cls"):
        embed(engine, [[1]], pooling="max")
    engine.add_request(EngineRequest(1, (1, 2), SamplingParams(max_tokens=2)))
    with pytest.raises(LabkitError, match="requests are running"):
        embed(engine, [[1]])
    engine.close()

    class NoHidden:
        pass

    with pytest.raises(UnsupportedError, match="no hidden states"):
        embed(Engine(None, make_engine(decoder).plan, executor=NoHidden()), [[1]])
    engine = make_engine(decoder)
    engine.reconfigure(bare_plan(decoder.spec, engine.plan.config.replace(tensor_parallel_size=2), 32, 0))
    with pytest.raises(UnsupportedError, match="no hidden states"):
        embed(engine, [[1]])
