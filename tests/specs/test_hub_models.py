"""Hub ids: from the cache without network, refused fast when the hub cannot be reached."""

from __future__ import annotations

import json
import socket
import threading

import huggingface_hub
import pytest

from labkit.errors import FileFormatError, UnknownNameError
from labkit.specs import load_model, model_loading
from labkit.specs.hub_probe import hub_answers

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    "vocab_size": 100, "max_position_embeddings": 128, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Files of a hub repository in the cache; what is not there is absent, and the hub is out of reach."""

    def find(name, file):
        path = tmp_path / file
        return str(path) if path.exists() else None

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", find)
    monkeypatch.setattr(model_loading, "hub_answers", lambda: False)
    return tmp_path


def test_a_cached_model_loads_without_network(cached):
    (cached / "config.json").write_text(json.dumps(CONFIG))
    spec = load_model("some-org/some-model")
    assert (spec.name, spec.source, spec.num_layers, spec.weights_bytes) == (
        "some-org/some-model",
        "hub:some-org/some-model",
        2,
        None,
    )


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ('{"metadata": {"total_size": 1234}}', 1234), ('{"metadata": {"total_size": -1}}', None),
        ('{"metadata": {"total_size": true}}', None), ('{"metadata": []}', None), ("{", None), ("[]", None),
        ('{"metadata": {"total_size": "1"}}', None), ("[" * 100_000, None),
    ],
)  # fmt: skip
def test_the_index_states_the_weights(cached, index, expected):
    (cached / "config.json").write_text(json.dumps(CONFIG))
    (cached / "model.safetensors.index.json").write_text(index)
    assert load_model("some-org/some-model").weights_bytes == expected


def test_a_broken_config_in_the_cache(cached):
    (cached / "config.json").write_text("{")
    with pytest.raises(FileFormatError, match="some-org/some-model"):
        load_model("some-org/some-model")


def test_out_of_reach(cached):
    with pytest.raises(UnknownNameError, match="cannot be reached"):
        load_model("some-org/some-model")


def test_whatever_the_hub_library_raises_is_a_clear_error(monkeypatch):
    def explode(*arguments, **keywords):
        raise RuntimeError("planted")

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", explode)
    with pytest.raises(UnknownNameError, match="RuntimeError"):
        load_model("some-org/some-model")


@pytest.mark.parametrize("bad", ["org/../x", "a/b/c", "-a/b", "a//b", "a/b c", "https://huggingface.co/a/b"])
def test_what_is_no_hub_id_never_reaches_the_hub(monkeypatch, bad):
    monkeypatch.setattr(model_loading, "_hub_file", lambda *arguments: pytest.fail("asked the hub"))
    with pytest.raises((UnknownNameError, FileFormatError)):
        load_model(bad)


@pytest.fixture
def no_proxies(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_probe(no_proxies):
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=server.accept, daemon=True)
        thread.start()
        no_proxies.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub_answers(timeout_s=2.0)
        thread.join(2.0)
        no_proxies.setenv("HF_HUB_OFFLINE", "1")
        assert not hub_answers()
    no_proxies.delenv("HF_HUB_OFFLINE")
    assert not hub_answers(timeout_s=0.5)
    no_proxies.setenv("HF_ENDPOINT", "http://[broken")
    assert not hub_answers(timeout_s=0.5)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("GatedRepoError", "accept it there, then set HF_TOKEN"),
        ("RepositoryNotFoundError", "no such public model"),
        ("OSError", "the hub gave OSError"),
    ],
)
def test_what_the_hub_refuses_is_said_with_what_helps(monkeypatch, kind, words):

    refused = getattr(huggingface_hub.errors, kind, OSError)

    def download(*_, **__):
        raise refused.__new__(refused)

    monkeypatch.setattr(model_loading, "hub_answers", lambda: True)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(UnknownNameError, match=words):
        load_model("somebody/not-in-the-catalogue")
