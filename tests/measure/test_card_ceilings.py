"""Ceilings of a card are measured on one, or refused."""

import pytest

from labkit.errors import UnsupportedError
from labkit.measure import card_ceilings
from labkit.measure.card_ceilings import measure_ceilings

GIB = 2**30


def test_without_a_card():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    with pytest.raises(UnsupportedError, match="no NVIDIA card"):
        measure_ceilings()


@pytest.fixture
def card(monkeypatch, one_thread):
    """A card with so many free bytes, on which reading takes half a second and the product two."""
    torch, seconds = one_thread, iter((0.5, 2.0))

    def with_free(num_bytes: int):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (num_bytes, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
        for name in ("ones", "randn"):
            monkeypatch.setattr(torch, name, lambda *shape, **options: torch.zeros(1))
        monkeypatch.setattr(card_ceilings, "_median_s", lambda call: next(seconds))

    return with_free


@pytest.mark.parametrize(
    ("free", "read"), [(80 * GIB, 2 * GIB), (4 * GIB, 2 * GIB), (GIB, GIB // 2), (GIB // 4, GIB // 8)]
)
def test_bytes_read_and_two_operations_a_number_over_the_seconds(card, free, read):
    """At most half of what is free is read."""
    card(free)
    found = measure_ceilings()
    assert found.read_bytes_per_s == read / 0.5
    # 8192³ products, each with an addition.
    assert found.flops_per_s == 1_099_511_627_776 / 2.0
    assert found.source == "measured on a card"


def test_a_full_card_is_refused(card):
    card(GIB // 4 - 1)
    with pytest.raises(UnsupportedError) as refused:
        measure_ceilings()
    assert refused.value.works == "256 MiB free"
