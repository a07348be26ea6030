"""`tighten` launches programmatic kernels where a card has such launches, and nothing elsewhere."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="needs Triton: pip install 'labkit[triton]'")
from labkit_kernels import replays  # noqa: E402


class Recorder:
    """Stands for `Launches`: the first call of a device goes through Triton, later ones do not."""

    def __init__(self):
        self.known, self.firsts, self.repeats = set(), [], 0

    def again(self, parts, *settings):
        self.repeats += settings in self.known
        return settings in self.known

    def first(self, parts, settings, kernel, grid, *arguments, **options):
        self.known.add(settings)
        self.firsts.append((kernel, grid, options))


@pytest.fixture
def launched(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(replays, "_LAUNCHES", recorder)
    return recorder


def test_a_card_without_programmatic_launches_gets_none(launched):
    replays.tighten(torch.device("cpu"))
    assert not launched.firsts
    assert not launched.repeats


def test_each_device_gets_its_own_programmatic_launches_of_one_program(launched, monkeypatch):
    monkeypatch.setattr(replays, "overlaps_launches", lambda device: True)
    monkeypatch.setattr(replays, "overlap_options", lambda device: {"OVERLAP": True, "launch_pdl": True})
    for index in (0, 1):
        for _ in range(2):
            replays.tighten(torch.device("cuda", index))
    assert len(launched.firsts) == 2
    assert launched.firsts[0] == (
        replays._nothing_kernel, (1,), {"num_warps": 1, "OVERLAP": True, "launch_pdl": True}
    )  # fmt: skip
    assert launched.repeats == 4 * replays.NUM_LAUNCHES - 2
