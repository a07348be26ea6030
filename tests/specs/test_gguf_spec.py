"""`ModelSpec` from GGUF metadata: facts of the real file, every family's rules, and metadata that contradict."""

from __future__ import annotations

import math

import numpy as np
import pytest

from labkit.errors import FileFormatError, UnsupportedError
from labkit.specs.gguf_spec import model_from_gguf
from labkit.specs.model_loading import load_model
from tests.models.gguf_files import build_gguf, tiny_llama


def spec_of(tmp_path, image):
    path = tmp_path / "model.gguf"
    path.write_bytes(image.data)
    return model_from_gguf(path)


def family(tmp_path, architecture: str, entries: dict, tensors: dict | None = None, layers: int = 12):
    """A file of `architecture` with the least that a spec needs; tensors beside the embedding are name → shape."""
    base = {
        "block_count": ("u32", layers), "context_length": ("u32", 4096), "embedding_length": ("u32", 64),
        "feed_forward_length": ("u32", 96), "attention.head_count": ("u32", 4), "attention.key_length": ("u32", 32),
        "attention.head_count_kv": ("u32", 2), **entries,
    }  # fmt: skip
    metadata = [("general.architecture", "str", architecture)]
    metadata += [(f"{architecture}.{name}", *entry) for name, entry in base.items() if entry is not None]
    shapes = {"token_embd.weight": (10, 64), **(tensors or {}), **{f"blk.{i}.x": (1,) for i in range(layers)}}
    stored = [(name, shape, "F32", bytes(4 * math.prod(shape))) for name, shape in shapes.items()]
    return spec_of(tmp_path, build_gguf(metadata, stored))


def test_smollm2_facts(smollm2_gguf):
    spec = load_model(smollm2_gguf)
    layer = spec.layers[0]
    assert (spec.num_layers, spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (30, 576, 1536, 49152)
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.kind) == (9, 3, 64, "full")
    assert (spec.rope.theta, spec.max_position_embeddings, spec.tie_word_embeddings) == (100000.0, 8192, True)
    assert spec.num_parameters == 134_515_008
    assert (spec.bos_token_id, spec.eos_token_ids, spec.model_type) == (1, (2,), "llama")
    assert spec.rms_norm_eps == pytest.approx(1e-5)


def test_qwen2_has_biases_and_untied_output_where_the_tensors_say_so(tmp_path):
    spec = family(tmp_path, "qwen2", {}, {"blk.0.attn_q.bias": (128,), "output.weight": (10, 64)})
    assert (spec.qkv_bias, spec.tie_word_embeddings, spec.qk_norm) == (True, False, False)
    assert family(tmp_path, "qwen3", {}, {"blk.0.attn_q_norm.weight": (32,)}).qk_norm


def test_gemma2_alternates_and_caps(tmp_path):
    spec = family(tmp_path, "gemma2", {"attention.sliding_window": ("u32", 128)})
    assert [layer.window for layer in spec.layers[:4]] == [128, None, 128, None]
    assert (spec.attention_softcap, spec.final_softcap, spec.attention_scale) == (50.0, 30.0, None)
    assert spec.sandwich_norms
    assert spec.norm_offset
    assert spec.scale_embeddings


def test_gemma3_has_five_local_layers_for_a_global_one(tmp_path):
    entries = {"attention.sliding_window": ("u32", 512), "rope.freq_base": ("f32", 1e6)}
    spec = family(tmp_path, "gemma3", entries)
    assert [layer.kind for layer in spec.layers] == (["sliding"] * 5 + ["full"]) * 2
    assert (spec.rope.theta, spec.rope_local.theta) == (1e6, 10000.0)
    assert (spec.attention_softcap, spec.final_softcap) == (None, None)
    explicit = {**entries, "attention.sliding_window_pattern": ("u32", 3)}
    assert [layer.kind for layer in family(tmp_path, "gemma3", explicit).layers[:3]] == ["sliding", "sliding", "full"]
    listed = {**entries, "attention.sliding_window_pattern": ("[bool]", [1, 0] * 6)}
    assert [layer.kind for layer in family(tmp_path, "gemma3", listed).layers[:2]] == ["sliding", "full"]


def test_gemma_27b_scales_by_hidden_size_over_heads(tmp_path):
    """google/gemma-2-27b: query_pre_attn_scalar 144 = 4608 / 32; here 64 / 4."""
    assert family(tmp_path, "gemma2", {}, layers=46).attention_scale == 16**-0.5
    assert family(tmp_path, "gemma2", {}, layers=42).attention_scale is None


def test_heads_of_each_layer(tmp_path):
    entries = {"attention.head_count_kv": ("[u32]", [1, 2] * 6)}
    assert [layer.num_kv_heads for layer in family(tmp_path, "llama", entries).layers[:3]] == [1, 2, 1]


def test_mixture_of_experts(tmp_path):
    experts = {"expert_count": ("u32", 8), "expert_used_count": ("u32", 2), "expert_feed_forward_length": ("u32", 16)}
    spec = family(tmp_path, "qwen3moe", experts)
    assert (spec.moe.num_experts, spec.moe.num_experts_per_tok, spec.moe.intermediate_size) == (8, 2, 16)
    assert {layer.num_experts for layer in spec.layers} == {8}


def test_rope_variants(tmp_path):
    linear = {"rope.scaling.type": ("str", "linear"), "rope.scaling.factor": ("f32", 4.0)}
    rope = family(tmp_path, "llama", linear).rope
    assert (rope.kind, dict(rope.parameters)) == ("linear", {"factor": 4.0})
    yarn = {**linear, "rope.scaling.type": ("str", "yarn"), "rope.scaling.original_context_length": ("u32", 1024)}
    rope = family(tmp_path, "qwen2", yarn).rope
    assert (rope.kind, dict(rope.parameters)["original_max_position_embeddings"]) == ("yarn", 1024)
    assert family(tmp_path, "llama", {"rope.dimension_count": ("u32", 8)}).rope.partial_rotary_factor == 0.25


def test_llama3_frequency_factors_come_from_their_tensor(tmp_path):
    metadata = [("general.architecture", "str", "llama")]
    values = {"block_count": 1, "context_length": 64, "embedding_length": 64, "feed_forward_length": 8}
    metadata += [(f"llama.{name}", "u32", value) for name, value in {**values, "attention.head_count": 8}.items()]
    factors = np.array([1.0, 1.0, 2.5, 8.0], dtype="<f4")
    tensors = [
        ("token_embd.weight", (10, 64), "F32", bytes(2560)),
        ("rope_freqs.weight", (4,), "F32", factors.tobytes()),
    ]
    rope = spec_of(tmp_path, build_gguf(metadata, tensors)).rope
    assert (rope.kind, rope.parameters) == ("factors", (("factors", (1.0, 1.0, 2.5, 8.0)),))
    tensors[1] = ("rope_freqs.weight", (4,), "F32", np.array([1, 0, 1, 1], dtype="<f4").tobytes())
    with pytest.raises(FileFormatError, match="rope_freqs"):
        spec_of(tmp_path, build_gguf(metadata, tensors))


# What contradicts → (key, type, value) in place of the right one, part of the message.
WRONG = {
    "no architecture": ("general.architecture", "u32", 1),
    "unknown architecture": ("general.architecture", "str", "mamba"),
    "no layers": ("llama.block_count", "u32", 0),
    "more layers than tensors": ("llama.block_count", "u32", 10**6),
    "layers as text": ("llama.block_count", "str", "2"),
    "hidden size 0": ("llama.embedding_length", "u32", 0),
    "hidden size of another model": ("llama.embedding_length", "u32", 128),
    "no heads": ("llama.attention.head_count", "u32", 0),
    "heads that KV heads do not divide": ("llama.attention.head_count_kv", "u32", 3),
    "KV heads for too few layers": ("llama.attention.head_count_kv", "[u32]", [2]),
    "KV head count 0 in an array": ("llama.attention.head_count_kv", "[u32]", [2, 0]),
    "context 2**40": ("llama.context_length", "u64", 2**40),
    "negative width": ("llama.feed_forward_length", "i32", -1),
    "theta that is no number": ("llama.rope.freq_base", "f32", math.nan),
    "negative theta": ("llama.rope.freq_base", "f32", -1.0),
    "epsilon as bool": ("llama.attention.layer_norm_rms_epsilon", "bool", 1),
    "odd head": ("llama.attention.key_length", "u32", 15),
    "unknown rope": ("llama.rope.scaling.type", "str", "spiral"),
    "more rotated than there is": ("llama.rope.dimension_count", "u32", 1024),
    "more experts used than there are": ("llama.expert_count", "u32", 4),
    "window 2**33": ("llama.attention.sliding_window", "u64", 2**33),
}


# The contradiction shows at another key than the changed one.
_ELSEWHERE = {
    "hidden size of another model": "token_embd.weight",
    "more experts used than there are": "llama.expert_used_count",
}


@pytest.mark.parametrize("name", WRONG)
def test_metadata_that_contradict(tmp_path, name):
    change = WRONG[name]
    with pytest.raises((FileFormatError, UnsupportedError)) as caught:
        spec_of(tmp_path, tiny_llama(changes=[change]))
    assert _ELSEWHERE.get(name, change[0].removeprefix("general.")) in str(caught.value)


def test_no_embedding(tmp_path):
    data = bytes(tiny_llama().data).replace(b"token_embd.weight", b"token_xxxx.weight")
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(FileFormatError, match="token_embd"):
        model_from_gguf(path)
