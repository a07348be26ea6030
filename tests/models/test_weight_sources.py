"""Folders, shards and GGUF files as sources of weights: right, incomplete, and hostile ones."""

from __future__ import annotations

import json
import struct

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from labkit.errors import FileFormatError, OutOfRangeError, UnsupportedError
from labkit.models import DenseAttention, load_model_weights
from labkit.models.ranks import OneRank
from labkit.models.weight_sources import SafetensorsSource
from labkit.specs.gguf_spec import model_from_gguf
from labkit.specs.model_loading import load_model
from tests.models.gguf_files import tiny_llama

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    """A random Llama of three layers in one safetensors file."""
    config = hf.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def shard(folder) -> dict[str, str]:
    """Splits the folder's only file in two and writes the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for index, part in enumerate((names[::2], names[1::2]), 1):
        file_name = f"model-{index:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder, weight_map) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def change(folder, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def load(folder, **options):
    return load_model_weights(load_model(folder), folder, "float32", pack_weights=False, **options)


def same_weights(first, second) -> bool:
    pairs = zip(first.weights.tensors(), second.weights.tensors(), strict=True)
    return all(torch.equal(mine, other) for mine, other in pairs)


def test_shards_and_links_give_the_same_weights_as_one_file(folder, tmp_path):
    whole = load(folder)
    shard(folder)
    assert same_weights(load(folder), whole)
    cache = tmp_path / "cache"
    cache.mkdir()
    for path in folder.iterdir():
        (cache / path.name).symlink_to(path)
    assert same_weights(load(cache), whole)
    assert same_weights(load_model_weights(load_model(folder), None, "float32", pack_weights=False), whole)


@pytest.mark.parametrize(
    "name", ["../model/{}", "/{}", "./{}", "sub/{}", "..\\{}", "C:{}", "", "..", "x.bin", 5, None, "a\0.safetensors"]
)
def test_an_index_cannot_name_files_outside_its_folder(folder, name):
    weight_map = shard(folder)
    first = next(iter(weight_map))
    weight_map[first] = name.format(weight_map[first]) if isinstance(name, str) else name
    write_index(folder, weight_map)
    with pytest.raises(FileFormatError, match=r"allowed are \.safetensors files in that folder"):
        SafetensorsSource(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000, "\xff"])
def test_broken_index(folder, text):
    shard(folder)
    (folder / INDEX).write_text(text, encoding="latin-1")
    with pytest.raises(FileFormatError, match="index"):
        SafetensorsSource(folder)


def test_a_shard_that_is_not_there(folder):
    weight_map = shard(folder)
    (folder / sorted(weight_map.values())[-1]).unlink()
    with pytest.raises(FileFormatError, match="not there"):
        SafetensorsSource(folder)


def test_missing_tensor_is_named(folder):
    change(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(FileFormatError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_unexpected_tensor_is_named(folder):
    change(folder, lambda tensors: tensors.update({"model.layers.1.extra.weight": torch.zeros(3)}))
    with pytest.raises(FileFormatError, match=r"model\.layers\.1\.extra\.weight"):
        load(folder)


def test_a_fourth_layer_is_not_left_out_silently(folder):
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileFormatError, match=r"model\.layers\.2"):
        load(folder)


def test_wrong_shape_is_named_before_anything_is_allocated(folder):
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = 2**26
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileFormatError, match=r"embed_tokens.*\(64, 32\).*67108864"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_of_another_kind_are_refused(folder, dtype):
    name = "model.layers.0.mlp.up_proj.weight"
    change(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(FileFormatError, match="has type"):
        load(folder)


def _header(text: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + data


BROKEN_SAFETENSORS = {
    "empty": b"",
    "length alone": struct.pack("<Q", 8),
    "header of 2**63 bytes": _header(b"{}", length=2**63),
    "header of 100 MB announced": _header(b"{}", length=100_000_000),
    "no JSON": _header(b"nonsense"),
    "negative offsets": _header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}', bytes(4)),
    "shape larger than the data": _header(b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}', bytes(4)),
    "product of the shape wraps": _header(
        b'{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}', bytes(4)
    ),
    "overlapping tensors": _header(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
    ),
    "data cut off": _header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(7)),
    "bytes that no tensor covers": _header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(99)),
}


@pytest.mark.parametrize("name", BROKEN_SAFETENSORS)
def test_broken_safetensors(folder, name):
    (folder / "model.safetensors").write_bytes(BROKEN_SAFETENSORS[name])
    with pytest.raises(FileFormatError, match=r"model\.safetensors"):
        SafetensorsSource(folder)


def test_a_bloated_header_is_refused_and_not_printed(folder):
    entries = {
        f"tensor {index} {'x' * 150}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for index in range(90_000)
    }
    (folder / "model.safetensors").write_bytes(_header(json.dumps(entries).encode()))
    with pytest.raises(FileFormatError) as caught:
        SafetensorsSource(folder)
    assert len(str(caught.value)) < 1000


def test_no_weights_and_pickles(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileFormatError, match=r"never loaded"):
        load(folder)
    with pytest.raises(FileFormatError, match="neither a path"):
        load_model_weights(load_model(folder), "nobody/no-such-model")
    with pytest.raises(FileFormatError, match="there is no"):
        load_model_weights(load_model(folder), folder / "missing")


@pytest.mark.parametrize("options", [{"load_format": "pt"}, {"ranks": OneRank(0, 3)}, {"ranks": OneRank(1, 1)}])
def test_wrong_options(folder, options):
    with pytest.raises(OutOfRangeError):
        load(folder, **options)
    with pytest.raises(OutOfRangeError, match="dtype"):
        load_model_weights(load_model(folder), folder, "int4")


def test_gguf_rows_are_put_back_in_order(tmp_path):
    """The stored order of a head is a pair of the rotation after the other; labkit rotates by halves."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_llama("F32").data)
    spec = model_from_gguf(path)
    decoder = load_model_weights(spec, path, "float32", pack_weights=False)
    from labkit.specs.gguf import read_gguf

    stored = torch.from_numpy(read_gguf(path).read("blk.1.attn_q.weight").view("<f4").copy()).view(4, 16, 64)
    loaded = decoder.weights.layers[1].qkv[:64].view(4, 16, 64)
    assert torch.equal(loaded[:, :8], stored[:, 0::2])
    assert torch.equal(loaded[:, 8:], stored[:, 1::2])
    tokens = torch.arange(20)
    logits = decoder.logits(decoder.forward(tokens, tokens, DenseAttention(spec, [20])))
    assert torch.isfinite(logits).all()


def test_gguf_that_lacks_a_tensor_of_its_architecture(tmp_path):
    image = tiny_llama("F32")
    path = tmp_path / "tiny.gguf"
    path.write_bytes(bytes(image.data).replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(FileFormatError, match=r"layers\.1\.mlp\.up_proj"):
        load_model_weights(model_from_gguf(path), path)


def test_dummy_weights_are_seeded_and_sane(folder):
    spec = load_model(folder)
    first, again, other = (
        load_model_weights(spec, load_format="dummy", seed=seed, pack_weights=False) for seed in (1, 1, 2)
    )
    assert same_weights(first, again)
    assert not same_weights(first, other)
    tokens = torch.arange(30)
    decoder = load_model_weights(spec, None, "float32", "dummy")
    logits = decoder.logits(decoder.forward(tokens, tokens, DenseAttention(spec, [30])))
    assert torch.isfinite(logits).all()
    assert 0.05 < logits.std() < 20


def test_architectures_that_the_decoder_lacks_are_named(folder):
    spec = load_model(folder)
    with pytest.raises(UnsupportedError, match="attention sinks"):
        load_model_weights(spec.replace(attention_sinks=True), folder)
