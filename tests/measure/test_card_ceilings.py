"""The file of a card's ceilings is read strictly; without a card nothing is measured."""

import pytest

from labkit.errors import FileFormatError, UnsupportedError
from labkit.measure.card_ceilings import measure_ceilings, read_ceilings, write_ceilings
from labkit.measure.roofline import Ceilings


@pytest.mark.parametrize("flops", [6.77e14, None])
def test_written_and_read(tmp_path, flops):
    ceilings = Ceilings(4.536e12, flops, "measured on NVIDIA H200")
    write_ceilings(tmp_path / "c.json", ceilings)
    assert read_ceilings(tmp_path / "c.json") == ceilings


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", "{}", '{"read_bytes_per_s": "x", "flops_per_s": 1, "source": ""}',
     '{"read_bytes_per_s": 0, "flops_per_s": 1, "source": ""}',
     '{"read_bytes_per_s": 1, "flops_per_s": [], "source": ""}', "[" * 90_000, " " * 200_000],
)  # fmt: skip
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(FileFormatError):
        read_ceilings(path)
    with pytest.raises(FileFormatError):
        read_ceilings(tmp_path / "none.json")


def test_without_a_card():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    with pytest.raises(UnsupportedError, match="no NVIDIA card"):
        measure_ceilings()
