"""The GGUF reader: right values from files written by another writer, and a clear error for every broken file."""

from __future__ import annotations

import os
import struct
import tracemalloc

import numpy as np
import pytest

from labkit.errors import FileFormatError
from labkit.specs import gguf
from labkit.specs.gguf import read_gguf
from tests.models.gguf_files import VALUE_LAYOUTS, build_gguf, tiny_llama

SCALARS = [
    ("a.u8", "u8", 255), ("a.i8", "i8", -128), ("a.u16", "u16", 65535), ("a.i16", "i16", -3),
    ("a.u32", "u32", 2**32 - 1), ("a.i32", "i32", -7),
    ("a.f32", "f32", 0.5), ("a.u64", "u64", 2**64 - 1), ("a.i64", "i64", -(2**63)),
    ("a.f64", "f64", 1e300), ("a.str", "str", "größe ▁"),
]  # fmt: skip


def write(tmp_path, data: bytes):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 32, 4096])
def test_reads_every_kind_of_value_and_the_tensors(tmp_path, version, alignment):
    arrays = [(f"b.{kind}", f"[{kind}]", [1, 0, 1]) for kind in VALUE_LAYOUTS]
    metadata = [
        *SCALARS, ("a.bool", "bool", 1), *arrays, ("c.str", "[str]", ["x", "", "▁y"]), ("c.empty", "[str]", []),
        ("c.none", "[u32]", []), ("general.alignment", "u32", alignment),
    ]  # fmt: skip
    first, second = os.urandom(3 * 64 * 18 // 32), struct.pack("<5f", *range(5))
    image = build_gguf(
        metadata, [("q", (3, 64), "Q4_0", first), ("v", (5,), "F32", second)], version=version, alignment=alignment
    )
    file = read_gguf(write(tmp_path, image.data))
    assert {key: file.metadata[key] for key, _, _ in SCALARS} == {key: value for key, _, value in SCALARS}
    assert file.metadata["a.bool"] is True
    for kind in VALUE_LAYOUTS:
        values = file.metadata[f"b.{kind}"]
        assert values.tolist() == [1, 0, 1]
        assert (values.dtype == bool) == (kind == "bool")
    assert file.metadata["c.str"] == ("x", "", "▁y")
    assert file.metadata["c.empty"] == ()
    assert file.metadata["c.none"].shape == (0,)
    assert (file.version, file.alignment, file.num_bytes) == (version, alignment, len(image.data))
    assert list(file.tensors) == ["q", "v"]
    assert (file.tensors["q"].shape, file.tensors["q"].kind, file.tensors["q"].num_bytes) == (
        (3, 64),
        "Q4_0",
        len(first),
    )
    assert file.read("q").tobytes() == first
    assert file.read("v").view("<f4").tolist() == [0, 1, 2, 3, 4]


def test_smollm2_header(smollm2_gguf):
    file = read_gguf(smollm2_gguf)
    kinds = [tensor.kind for tensor in file.tensors.values()]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert max(tensor.offset + tensor.num_bytes for tensor in file.tensors.values()) == smollm2_gguf.stat().st_size


def test_a_file_without_anything(tmp_path):
    file = read_gguf(write(tmp_path, build_gguf([], []).data))
    assert not file.metadata
    assert not file.tensors


SMALL = build_gguf(
    [("k.n", "u32", 1), ("k.s", "str", "text"), ("k.a", "[u32]", [1, 2]), ("k.t", "[str]", ["x", "y"]),
     ("general.alignment", "u32", 32), ("k.b", "bool", 1)],
    [("first", (2, 32), "Q4_0", bytes(36)), ("second", (3, 8), "F32", bytes(96))],
)  # fmt: skip

# What is broken → (bytes, part of the message). Kinds follow llama.cpp's tests/test-gguf.cpp and the advisories.
BROKEN = {
    "empty file": (b"", "magic"),
    "magic alone": (b"GGUF", "version"),
    "wrong magic": (b"GGML" + bytes(SMALL.data[4:]), "magic"),
    "version 0": (SMALL.changed(version=0), "version"),
    "version 1": (SMALL.changed(version=1), "version"),
    "version 4": (SMALL.changed(version=4), "version"),
    "big-endian": (SMALL.changed(version=3 << 24), "big-endian"),
    "2**63 tensors": (SMALL.changed(num_tensors=2**63), "tensor count"),
    "100 tensors": (SMALL.changed(num_tensors=100), "tensor count"),
    "one tensor more": (SMALL.changed(num_tensors=3), "tensor 2"),
    "2**64 - 1 keys": (SMALL.changed(num_keys=2**64 - 1), "metadata count"),
    "one key more": (SMALL.changed(num_keys=7), "name of tensor 0"),
    "empty key": (build_gguf([("", "u32", 1)], []).data, "key 0"),
    "key twice": (build_gguf([("a", "u32", 1), ("a", "u32", 2)], []).data, "no key twice"),
    "key of 2**40 bytes": (SMALL.changed(key0_name_length=2**40), "key 0"),
    "key that is no UTF-8": (bytes(SMALL.data).replace(b"k.n", b"k.\xff"), "UTF-8"),
    "unknown value type": (SMALL.changed(key0_type=13), "type of k.n"),
    "string of 2**62 bytes": (SMALL.changed(key1_length=2**62), "length of k.s"),
    "string longer than the file": (SMALL.changed(key1_length=len(SMALL.data)), "k.s"),
    "array of 2**63 numbers": (SMALL.changed(key2_count=2**63), "k.a"),
    "array whose bytes wrap 64 bits": (SMALL.changed(key2_count=2**62 + 1), "k.a"),
    "array of 2**40 strings": (SMALL.changed(key3_count=2**40), "length of k.t"),
    "array of arrays": (SMALL.changed(key2_element_type=9), "element type of k.a"),
    "array of an unknown type": (SMALL.changed(key2_element_type=99), "element type of k.a"),
    "bool that is 2": (SMALL.changed(key5=2), "0 or 1"),
    "alignment 0": (SMALL.changed(key4=0), "general.alignment"),
    "alignment 48": (SMALL.changed(key4=48), "general.alignment"),
    "alignment 2**30": (SMALL.changed(key4=2**30), "general.alignment"),
    "alignment of another type": (build_gguf([("general.alignment", "str", "32")], []).data, "general.alignment"),
    "empty tensor name": (build_gguf([], [("", (1,), "F32", bytes(4))]).data, "name of tensor 0"),
    "tensor name twice": (build_gguf([], [("a", (1,), "F32", bytes(4))] * 2).data, "no name twice"),
    "five dimensions": (SMALL.changed(t0_dims=5), "dimensions"),
    "2**31 dimensions": (SMALL.changed(t0_dims=2**31), "dimensions"),
    "dimension 0": (SMALL.changed(t0_dim1=0), "dimension 1"),
    "dimension 2**63": (SMALL.changed(t0_dim1=2**63), "dimension 1"),
    "product of dimensions wraps 64 bits": (SMALL.changed(t0_dim0=2**32, t0_dim1=2**32), "size of tensor"),
    "row that is no whole block": (SMALL.changed(t0_dim0=33), "a multiple of 32"),
    "unknown tensor type": (SMALL.changed(t0_kind=200), "type of tensor"),
    "removed tensor type": (SMALL.changed(t0_kind=4), "type of tensor"),
    "tensor larger than the file": (SMALL.changed(t1_dim1=4), "size of tensor 'second'"),
    "offset behind the end": (SMALL.changed(t1_offset=2**40), "offset"),
    "offset 2**64 - 32": (SMALL.changed(t1_offset=2**64 - 32), "offset"),
    "unaligned offset": (SMALL.changed(t1_offset=65), "alignment"),
    "overlapping tensors": (SMALL.changed(t1_offset=32), "no overlap"),
    "data cut off": (bytes(SMALL.data[:-1]), "size of tensor 'second'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_is_refused_and_the_field_named(tmp_path, name):
    data, part = BROKEN[name]
    path = write(tmp_path, bytes(data))
    tracemalloc.start()
    with pytest.raises(FileFormatError) as caught:
        read_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert part in str(caught.value)
    assert "model.gguf" in str(caught.value)
    assert peak < 10 * 2**20


def test_every_truncation_is_refused(tmp_path):
    data = bytes(SMALL.data)
    for length in range(len(data)):
        with pytest.raises(FileFormatError):
            read_gguf(write(tmp_path, data[:length]))


def test_reads_the_undamaged_file(tmp_path):
    file = read_gguf(write(tmp_path, bytes(SMALL.data)))
    assert list(file.tensors) == ["first", "second"]


@pytest.mark.parametrize("limit", ["MAX_HEADER_BYTES", "MAX_STRINGS", "MAX_METADATA_ENTRIES", "MAX_TENSORS"])
def test_limits_hold(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(gguf, limit, 1)
    with pytest.raises(FileFormatError, match="at most 1"):
        read_gguf(write(tmp_path, bytes(SMALL.data)))


@pytest.mark.parametrize("make", [lambda p: p / "missing.gguf", lambda p: p, lambda p: str(p) + "/a\0b"])
def test_no_file(tmp_path, make):
    with pytest.raises(FileFormatError):
        read_gguf(make(tmp_path))


def test_a_file_that_shrinks_after_it_was_opened_gives_an_error_not_a_signal(tmp_path):
    path = write(tmp_path, bytes(tiny_llama().data))
    file = read_gguf(path)
    os.truncate(path, file.tensors["token_embd.weight"].offset + 10)
    with pytest.raises(FileFormatError, match="ends early"):
        file.read("token_embd.weight")
    path.unlink()
    with pytest.raises(FileFormatError, match="cannot read"):
        file.read("token_embd.weight")
    with pytest.raises(FileFormatError, match="no tensor"):
        file.read("nothing")


def test_names_from_the_file_are_shown_without_control_characters(tmp_path):
    image = build_gguf([("k\x1b[31m", "bool", 3)], [])
    with pytest.raises(FileFormatError) as caught:
        read_gguf(write(tmp_path, image.data))
    assert "\x1b" not in str(caught.value)


def test_arrays_are_read_only(tmp_path):
    values = read_gguf(write(tmp_path, bytes(SMALL.data))).metadata["k.a"]
    assert isinstance(values, np.ndarray)
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 5
