"""`write_entries` against torch's `index_copy_`, in Triton's interpreter or on a card."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="needs Triton: pip install 'labkit[triton]'")
from labkit_kernels.checks import KernelTypeError, KernelValueError  # noqa: E402
from labkit_kernels.entries import TILE, pack_entries, write_entries  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("count", [1, 2, TILE, TILE + 1, 300])
def test_entries_are_written_and_all_others_left(count):
    rng = np.random.default_rng(count)
    table = torch.from_numpy(rng.integers(-5, 5, (17, 36), dtype=np.int32))
    indices, values = rng.permutation(table.numel())[:count], rng.integers(0, 2**31 - 1, count)
    expected = table.clone()
    expected.view(-1).index_copy_(0, torch.from_numpy(indices), torch.from_numpy(values.astype(np.int32)))
    found = table.to(DEVICE)
    # Twice, since the second launch is the first one repeated.
    for _ in range(2):
        write_entries(found, torch.from_numpy(pack_entries(indices, values)).to(DEVICE))
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize(("count", "wanted"), [(1, TILE), (TILE, TILE), (TILE + 1, 2 * TILE), (5 * TILE, 8 * TILE)])
def test_packed_in_few_sizes(count, wanted):
    packed = pack_entries(np.arange(count), np.arange(count) + 7)
    assert packed.shape == (2, wanted)
    assert packed[:, count:].T.tolist() == [[count - 1, count + 6]] * (wanted - count)


def test_no_entries_change_nothing():
    table = torch.arange(8, dtype=torch.int32, device=DEVICE)
    write_entries(table, torch.empty(2, 0, dtype=torch.int32, device=DEVICE))
    assert table.tolist() == list(range(8))


def test_what_cannot_be_written_is_refused():
    table = torch.zeros(4, 8, dtype=torch.int32, device=DEVICE)
    good = torch.zeros(2, TILE, dtype=torch.int32, device=DEVICE)
    with pytest.raises(KernelTypeError, match="table has dtype"):
        write_entries(table.long(), good)
    with pytest.raises(KernelTypeError, match="entries has dtype"):
        write_entries(table, good.long())
    with pytest.raises(KernelValueError, match="contiguous"):
        write_entries(table[:, :4], good)
    with pytest.raises(KernelValueError, match="multiple of 64"):
        write_entries(table, good[:, :5].contiguous())
