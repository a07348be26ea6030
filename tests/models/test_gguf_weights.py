"""Dequantisation against the gguf package's own (data/gguf_quants.npz, made by make_gguf_quants.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from labkit.errors import FileFormatError, UnsupportedError
from labkit.models import gguf_weights
from labkit.models.gguf_weights import dequantize, read_gguf_tensor
from labkit.specs.gguf import read_gguf
from tests.models.gguf_files import BLOCKS, build_gguf, random_tensor

KINDS = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
ORACLE = Path(__file__).with_name("data") / "gguf_quants.npz"


@pytest.mark.parametrize("chunk", [256, 2**18])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_bit_identical_to_the_gguf_package(kind, chunk, monkeypatch):
    monkeypatch.setattr(gguf_weights, "_CHUNK_ELEMENTS", chunk)
    with np.load(ORACLE, allow_pickle=False) as arrays:
        blocks, expected = arrays[f"{kind}_blocks"], arrays[f"{kind}_values"]
    out = torch.full((len(expected),), torch.nan)
    dequantize(torch.from_numpy(blocks).reshape(-1), kind, out)
    np.testing.assert_array_equal(out.numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensor_of_a_file_keeps_shape_and_rounds_once(tmp_path, kind, dtype):
    data = random_tensor(np.random.default_rng(1), (3, 256), kind)
    path = tmp_path / "one.gguf"
    path.write_bytes(build_gguf([], [("w", (3, 256), kind, data)]).data)
    exact, rounded = torch.empty(3, 256), torch.empty(3, 256, dtype=dtype)
    read_gguf_tensor(read_gguf(path), "w", exact)
    read_gguf_tensor(read_gguf(path), "w", rounded)
    assert torch.isfinite(exact).all()
    assert exact.std() > 0
    assert torch.equal(rounded, exact.to(dtype))


def test_a_type_that_labkit_does_not_decode_is_named(tmp_path):
    image = build_gguf([], [("w", (1, 256), "Q4_K", bytes(144))])
    path = tmp_path / "iq.gguf"
    path.write_bytes(image.changed(t0_kind=23))
    file = read_gguf(path)
    with pytest.raises(UnsupportedError, match="IQ4_XS"):
        read_gguf_tensor(file, "w", torch.empty(1, 256))


def test_a_file_cut_off_after_its_header_was_read(tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(build_gguf([], [("w", (64,), "F32", bytes(256))]).data)
    file = read_gguf(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FileFormatError, match="ends early"):
        read_gguf_tensor(file, "w", torch.empty(64))
