"""Broken model folders are each named correctly; good ones have nothing to mend; nothing is written unasked."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from labkit.doctor.model_folder import examine_folder
from labkit.doctor.tokenizer_files import read_vocabulary, write_missing
from labkit.doctor.weight_files import BrokenShard, read_header
from labkit.errors import FileFormatError
from tests.doctor.folders import (
    CONFIG,
    LFS,
    TOKENS,
    change_json,
    good_folder,
    shapes,
    tokenizer_json,
    write_json,
    write_shard,
)
from tests.models.gguf_files import byte_vocabulary

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SINGLE = "model.safetensors"


def _cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


def _index(folder: Path, change: Callable[[dict], None]) -> None:
    values = json.loads((folder / INDEX).read_text())
    change(values)
    write_json(folder / INDEX, values)


def _only(folder: Path, *names: str) -> None:
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()


def _embedding(folder: Path, pooling: dict | str | None) -> None:
    write_json(folder / "modules.json", {"0": {}})
    if isinstance(pooling, str):
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(pooling)
    elif pooling is not None:
        write_json(folder / "1_Pooling" / "config.json", pooling)


def _deeper(folder: Path) -> None:
    _only(folder)
    good_folder(folder / "model")


def _snapshot(folder: Path) -> None:
    _only(folder)
    good_folder(folder / "snapshots" / "abc")


def _shard(path: str, **keywords) -> Callable[[Path], None]:
    changes = keywords.pop("changes", {})
    drop = keywords.pop("drop", ())
    return lambda f: (
        write_shard(
            f / path,
            {k: v for k, v in (shapes() | changes).items() if not k.startswith(tuple(drop) or "\0")},
            **keywords,
        )
        and None
    )


# name → (what is done to a good folder, sharded or not, the check that names it, status, words of evidence or cause)
BROKEN: dict[str, tuple[Callable[[Path], object], bool, str, str, str]] = {
    "empty": (lambda f: _only(f), False, "config", "problem", "holds nothing"),
    "weights only": (lambda f: _only(f, SINGLE), False, "config", "problem", "holds model.safetensors"),
    "one folder short": (_deeper, False, "config", "problem", "one folder short"),
    "cache folder instead of snapshot": (_snapshot, False, "config", "problem", "snapshots/abc"),
    "adapter": (lambda f: (_only(f), write_json(f / "adapter_config.json", {"base_model_name_or_path": "a/base"})),
                False, "adapter", "problem", "its base is a/base"),
    "adapter without base": (lambda f: (_only(f), write_json(f / "adapter_config.json", {})), False, "adapter",
                             "problem", "names no base"),
    "damaged adapter": (lambda f: (_only(f), (f / "adapter_config.json").write_text("{")), False, "adapter", "problem",
                        "damaged"),
    "Mistral's format": (lambda f: (_only(f), write_json(f / "params.json", {})), False, "config", "warning",
                         "Mistral's own format"),
    "config is no JSON": (lambda f: _cut(f / "config.json", 5), False, "config", "problem", "no JSON"),
    "config is an LFS pointer": (lambda f: (f / "config.json").write_text(LFS), False, "config", "problem", "LFS"),
    "config is empty": (lambda f: (f / "config.json").write_text(""), False, "empty-files", "problem", "config.json"),
    "no architecture": (lambda f: change_json(f / "config.json", architectures=None, model_type=None), False,
                        "architecture", "problem", "neither architectures nor model_type"),
    "no class of the network": (lambda f: change_json(f / "config.json", architectures=None), False, "architecture",
                                "warning", "class of the network"),
    "no layers stated": (lambda f: change_json(f / "config.json", num_hidden_layers=None), False, "layers", "problem",
                         "32 layers stated"),
    "negative number of layers": (lambda f: change_json(f / "config.json", num_hidden_layers=-1), False, "architecture",
                                  "problem", "num_hidden_layers"),
    "no weights": (lambda f: (f / SINGLE).unlink(), False, "weights", "problem", "no .safetensors"),
    "pickled weights": (lambda f: (f / SINGLE).rename(f / "pytorch_model.bin"), False, "weights", "warning", "pickle"),
    "weights are an LFS pointer": (lambda f: (f / SINGLE).write_text(LFS), False, "shard", "problem", "git lfs pull"),
    "weights are cut": (lambda f: _cut(f / SINGLE, 100), False, "shard", "problem", "cut"),
    "weights cut in the header": (lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes()[:50]), False, "shard",
                                  "problem", "header should have"),
    "weights are an error page": (lambda f: (f / SINGLE).write_text("<html>not found</html>"), False, "shard",
                                  "problem", "header should have"),
    "weights longer than their tensors": (lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes() + b"x" * 9),
                                          False, "shard", "problem", "no tensor covers"),
    "weights are empty": (lambda f: (f / SINGLE).write_bytes(b""), False, "empty-files", "problem", SINGLE),
    "shard missing": (lambda f: (f / SECOND).unlink(), True, "index", "problem", "1 of 2 shards missing"),
    "index missing": (lambda f: (f / INDEX).unlink(), True, "index", "problem", "2 numbered shards"),
    "index damaged": (lambda f: _cut(f / INDEX, 9), True, "index", "problem", "damaged"),
    "index is an LFS pointer": (lambda f: (f / INDEX).write_text(LFS), True, "index", "problem", "LFS"),
    "index without a map": (lambda f: _index(f, lambda v: v.pop("weight_map")), True, "index", "problem",
                            "no weight_map"),
    "index points out of the folder": (lambda f: _index(f, lambda v: v["weight_map"].update(x="../../etc/x")), True,
                                       "index", "problem", "out of the folder"),
    "tensor in no shard": (lambda f: _index(f, lambda v: v["weight_map"].update(ghost=FIRST)), True, "index-content",
                           "problem", "ghost"),
    "tensor in another shard": (lambda f: _index(f, lambda v: v["weight_map"].update({"lm_head.weight": SECOND})), True,
                                "index-content", "problem", "lm_head.weight"),
    "tensor in no index": (lambda f: _index(f, lambda v: v["weight_map"].pop("lm_head.weight")), True, "index-content",
                           "warning", "in no index"),
    "index of another size": (lambda f: _index(f, lambda v: v["metadata"].update(total_size=7)), True, "index-content",
                              "warning", "the index says 7 B"),
    "second shard cut": (lambda f: _cut(f / SECOND, 1), True, "shard", "problem", SECOND),
    "twice the same weights": (lambda f: write_shard(f / "consolidated.safetensors", shapes()), False,
                               "duplicate-weights", "warning", "twice"),
    "vocabulary of another model": (lambda f: change_json(f / "config.json", vocab_size=32), False, "shapes", "problem",
                                    "model.embed_tokens.weight is [12, 16]"),
    "heads of another model": (lambda f: change_json(f / "config.json", num_key_value_heads=4), False, "shapes",
                               "problem", "k_proj.weight is [8, 16]"),
    "hidden size of another model": (lambda f: change_json(f / "config.json", hidden_size=32, head_dim=4), False,
                                     "shapes", "problem", "means"),
    "layers missing": (lambda f: change_json(f / "config.json", num_hidden_layers=4), False, "layers", "problem",
                       "2 to 3 (2 layers)"),
    "output matrix missing": (_shard(SINGLE, drop=("lm_head",)), False, "head", "problem", "no lm_head.weight"),
    "other type than stated": (_shard(SINGLE, dtype="F32"), False, "dtype", "warning", "float32 is stored"),
    "no type stated": (lambda f: change_json(f / "config.json", torch_dtype=None), False, "dtype", "warning",
                       "states no dtype"),
    "quantised and not said": (_shard(SINGLE, changes={"model.layers.0.mlp.up_proj.qweight": [4, 4]}), False,
                               "packing", "problem", "no quantization_config"),
    "said quantised and not": (lambda f: change_json(f / "config.json", quantization_config={
        "quant_method": "awq", "bits": 4, "group_size": 128}), False, "packing", "problem", "no .qweight"),
    "quantisation without method": (lambda f: change_json(f / "config.json", quantization_config={"bits": 4}), False,
                                    "quantisation", "problem", "no quant_method"),
    "quantisation that nobody knows": (lambda f: change_json(f / "config.json", quantization_config={
        "quant_method": "magic", "bits": 4}), False, "quantisation", "warning", "magic"),
    "remote code": (lambda f: (change_json(f / "config.json", auto_map={"AutoModel": "modeling_x.X"}),
                               (f / "modeling_x.py").write_text("raise SystemExit")), False, "remote-code", "warning",
                    "your rights"),
    "remote code missing": (lambda f: change_json(f / "config.json", auto_map={"AutoModel": "modeling_x.X"}), False,
                            "remote-code", "problem", "modeling_x.py, which is not there"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), False, "tokenizer", "problem", "Can't load tokenizer"),
    "tokenizer is cut": (lambda f: _cut(f / "tokenizer.json", 20), False, "tokenizer", "problem", "damaged"),
    "tokenizer is an LFS pointer": (lambda f: (f / "tokenizer.json").write_text(LFS), False, "tokenizer", "problem",
                                    "LFS"),
    "tokenizer without vocabulary": (lambda f: write_json(f / "tokenizer.json", {"model": {}}), False, "tokenizer",
                                     "problem", "no vocabulary"),
    "tokenizer of another model": (lambda f: write_json(f / "tokenizer.json", tokenizer_json([*TOKENS, *"ijklm"])),
                                   False, "vocabulary", "problem", "tokens up to 14"),
    "no tokenizer settings": (lambda f: (f / "tokenizer_config.json").unlink(), False, "tokenizer-config", "warning",
                              "guessed"),
    "damaged tokenizer settings": (lambda f: _cut(f / "tokenizer_config.json", 3), False, "tokenizer-config", "problem",
                                   "damaged"),
    "special token that does not exist": (lambda f: change_json(f / "tokenizer_config.json", eos_token="<end>"), False,
                                          "tokenizer-config", "problem", "'<end>' is not in"),
    "end token that does not exist": (lambda f: change_json(f / "generation_config.json", eos_token_id=[99]), False,
                                      "end-token", "problem", "99"),
    "no end token": (lambda f: (change_json(f / "config.json", eos_token_id=None),
                                (f / "generation_config.json").unlink()), False, "end-token", "warning", "length only"),
    "no chat template": (lambda f: change_json(f / "tokenizer_config.json", chat_template=None), False, "chat-template",
                         "unknown", "base or embedding"),
    "damaged generation settings": (lambda f: _cut(f / "generation_config.json", 2), False, "generation-config",
                                    "problem", "damaged"),
    "download stopped": (lambda f: (f / "x.safetensors.incomplete").write_bytes(b"1"), False, "unfinished", "problem",
                         "stopped"),
    "cache without blobs": (lambda f: ((f / SINGLE).unlink(), (f / SINGLE).symlink_to("../../blobs/1")), False,
                            "dead-links", "problem", SINGLE),
    "embedding without pooling": (lambda f: _embedding(f, None), False, "pooling", "problem", "1_Pooling/config.json"),
    "pooling damaged": (lambda f: _embedding(f, "{"), False, "pooling", "problem", "damaged"),
    "pooling of another model": (lambda f: _embedding(f, {"word_embedding_dimension": 99, "pooling_mode_mean": True}),
                                 False, "pooling", "problem", "width 99"),
    "pooling without a mode": (lambda f: _embedding(f, {"word_embedding_dimension": 16}), False, "pooling", "problem",
                               "no pooling mode"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_named(tmp_path, name):
    breaks, sharded, check_name, status, word = BROKEN[name]
    folder = good_folder(tmp_path / "model", sharded=sharded)
    breaks(folder)
    before = {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}
    found = examine_folder(folder)
    named = [check for check in found.checks if check.name == check_name]
    assert named, found.checks
    assert named[0].status == status, named
    assert word in f"{named[0].evidence} {named[0].cause}", named
    assert named[0].fix
    assert found.exit_code >= {"problem": 2, "warning": 1, "unknown": 0}[status]
    assert {path: path.lstat().st_mtime_ns for path in folder.rglob("*")} == before, "nothing is changed"


@pytest.mark.parametrize("name", BROKEN)
def test_nothing_else_is_called_a_problem(tmp_path, name):
    breaks, sharded, check_name, _, _ = BROKEN[name]
    folder = good_folder(tmp_path / "model", sharded=sharded)
    breaks(folder)
    # Follow-ups that are true as well.
    also = {
        "config is empty": {"config"}, "weights are empty": {"shard"}, "cache without blobs": {"weights", "shard"},
        "hidden size of another model": {"architecture"},
    }.get(name, set())  # fmt: skip
    problems = {check.name for check in examine_folder(folder).checks if check.status == "problem"}
    assert problems - {check_name} <= also


@pytest.mark.parametrize("sharded", [False, True])
def test_a_good_folder_has_nothing_to_mend(tmp_path, sharded):
    found = examine_folder(good_folder(tmp_path / "model", sharded=sharded))
    assert [check for check in found.checks if check.status != "ok"] == []
    assert found.exit_code == 0


def test_a_good_embedding_model(tmp_path):
    folder = good_folder(tmp_path / "model")
    _embedding(folder, {"word_embedding_dimension": 16, "pooling_mode_lasttoken": True})
    assert examine_folder(folder).exit_code == 0


@pytest.mark.parametrize("path", ["missing", "file.txt", "x\0y", ""])
def test_what_is_no_folder_is_said(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("x")
    found = examine_folder(path or "nowhere")
    assert found.checks[0].name == "folder"
    assert found.exit_code == 2


def test_the_real_gguf_file(smollm2_gguf):
    found = examine_folder(smollm2_gguf)
    names = {check.name: check.status for check in found.checks}
    assert names == {"gguf": "ok", "gguf-tokenizer": "warning"}


def test_broken_gguf_files(tmp_path, smollm2_gguf):
    cut = tmp_path / "cut.gguf"
    with smollm2_gguf.open("rb") as file:
        cut.write_bytes(file.read(3 * 2**20))
    pointer = tmp_path / "pointer.gguf"
    pointer.write_text(LFS)
    for path, word in ((cut, "cut or damaged"), (pointer, "git-lfs")):
        (check,) = examine_folder(path).checks
        assert (check.name, check.status) == ("gguf", "problem")
        assert word in check.cause


def test_hostile_names_are_shown_as_text(tmp_path):
    folder = good_folder(tmp_path / "model", sharded=True)
    _index(folder, lambda v: v["weight_map"].update({"\x1b[31m\u202e<b>": FIRST}))
    shown = json.dumps(examine_folder(folder).to_dict())
    assert "\\u001b" not in shown
    assert "\\u202e" not in shown


def test_write_missing_writes_what_follows_from_the_folder_and_says_what_it_assumed(tmp_path):
    folder = good_folder(tmp_path / "model")
    (folder / "tokenizer_config.json").unlink()
    written = write_missing(folder)
    content = json.loads((folder / "tokenizer_config.json").read_text())
    assert content == dict(written.content)
    assert content["eos_token"] == "</s>"
    assert content["bos_token"] == "<s>"
    assert content["model_max_length"] == 128
    assert "pad_token" not in content
    text = " ".join(written.assumed)
    assert "eos_token_id 1 of config.json" in text
    assert "pad_token left out" in text
    assert "no chat template" in text
    names = {check.name: check.status for check in examine_folder(folder).checks}
    assert names["tokenizer-config"] == "ok"


def test_write_missing_loads_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokens, merges, _ = byte_vocabulary()
    folder = good_folder(tmp_path / "model")
    values = tokenizer_json()
    values["model"] = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges}
    values["added_tokens"] = []
    values["pre_tokenizer"] = values["decoder"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": True,
    }
    write_json(folder / "tokenizer.json", values)
    (folder / "tokenizer_config.json").unlink()
    write_missing(folder)
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    assert loaded.decode(loaded.encode("he he")) == "he he"


def test_write_missing_guesses_customary_names_where_the_config_is_silent(tmp_path):
    folder = good_folder(tmp_path / "model")
    (folder / "tokenizer_config.json").unlink()
    change_json(folder / "config.json", eos_token_id=None, bos_token_id=None)
    written = write_missing(folder)
    assert written.content["eos_token"] == "</s>"
    assert any("customary name" in sentence for sentence in written.assumed)


def test_write_missing_leaves_what_is_there(tmp_path):
    folder = good_folder(tmp_path / "model")
    before = (folder / "tokenizer_config.json").read_text()
    assert write_missing(folder) is None
    assert (folder / "tokenizer_config.json").read_text() == before


def test_write_missing_needs_a_vocabulary(tmp_path):
    folder = good_folder(tmp_path / "model")
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileFormatError):
        write_missing(folder)
    assert not (folder / "tokenizer_config.json").exists()


def test_vocabularies_of_lists_are_read(tmp_path):
    path = tmp_path / "tokenizer.json"
    write_json(path, {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": [{"id": 7, "content": "<x>"}]})
    assert read_vocabulary(path) == {"a": 0, "b": 1, "<x>": 7}


def test_a_model_type_that_nobody_knows_is_no_clean_bill(tmp_path):
    folder = good_folder(tmp_path / "model")
    change_json(folder / "config.json", architectures=["FooForCausalLM"], model_type="foo")
    found = {check.name: check for check in examine_folder(folder / "config.json").checks}
    assert found["architecture"].status == "warning"
    assert "foo" in found["architecture"].evidence
    assert "FooForCausalLM" in found["architecture"].fix
    assert all(check.status == "ok" for name, check in found.items() if name != "architecture")


@pytest.mark.parametrize(
    ("length", "rest", "cause"),
    [
        (2, b"{}", ""),
        (2, b"{}more", "no tensor covers"),
        (3, b"{}", "cut"),
        (0, b"", "damaged"),
        (None, b"1234567", "cut"),
    ],
)
def test_a_safetensors_header_may_fill_its_file_and_no_more(tmp_path, length, rest, cause):
    """Eight bytes say how long the header is, then it comes (the format's own description)."""
    file = tmp_path / "model.safetensors"
    file.write_bytes((b"" if length is None else struct.pack("<Q", length)) + rest)
    if not cause:
        assert read_header(file) == {}
        return
    with pytest.raises(BrokenShard) as refused:
        read_header(file)
    assert cause in refused.value.args[1]


def test_there_are_more_than_thirty():
    assert len(BROKEN) >= 30
    assert CONFIG["num_hidden_layers"] == 2
