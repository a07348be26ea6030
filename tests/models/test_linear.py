"""Packed matrices give what plain ones give, for any number of rows."""

from __future__ import annotations

import pytest
import torch

from labkit.models.linear import PackedMatrix, pack, project, project_few

ROWS = [1, 2, 3, 4, 5, 8, 9, 33, 200]
SHAPES = [(96, 64), (1, 1), (7, 5), (261, 64), (64, 261)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_equal_the_exact_ones(shape, dtype, one_thread):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(*shape, generator=generator).to(dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype)
    packed = pack(weight)
    assert (packed.shape, packed.dtype, packed.nbytes) == (shape, dtype, weight.nbytes)
    for rows in ROWS:
        x = torch.randn(rows, shape[1], generator=generator).to(dtype)
        exact = x.double() @ weight.double().t()
        tolerance = {"atol": 1e-4, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.02}
        for matrix in (packed, weight):
            for found, wanted in (
                (project(x, matrix), exact),
                (project(x, matrix, bias), exact + bias.double()),
                (project_few(x, matrix), exact),
            ):
                assert found.shape == (rows, shape[0])
                assert found.is_contiguous()
                assert found.dtype == dtype
                torch.testing.assert_close(found.double(), wanted, **tolerance)


def test_unpacking_gives_the_same_bits(one_thread):
    weight = torch.randn(96, 64)
    packed = pack(weight)
    if isinstance(packed, PackedMatrix):
        assert torch.equal(packed.to_dense(), weight)


def test_what_cannot_be_packed_stays_plain(monkeypatch):
    stack, meta = torch.randn(2, 3, 4), torch.empty(3, 4, device="meta")
    assert pack(stack) is stack
    assert pack(meta) is meta
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    weight = torch.randn(3, 4)
    assert pack(weight) is weight
