"""Ceilings of a card are measured on one, or refused."""

import pytest

from labkit.errors import UnsupportedError
from labkit.measure.card_ceilings import measure_ceilings


def test_without_a_card():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    with pytest.raises(UnsupportedError, match="no NVIDIA card"):
        measure_ceilings()
