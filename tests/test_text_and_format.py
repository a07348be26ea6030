"""Shown numbers and text: three digits, units, and no control characters."""

from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import format as shown
from labkit.errors import DoesNotFitError, LabkitError, OutOfRangeError
from labkit.files import write_atomic
from labkit.text import brief, nearest, plain


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (12.345, "12.3"), (1234.5, "1,230"), (999.6, "1,000"), (0.5, "0.500"), (0.001, "<0.01"),
        (-0.001, ">-0.01"), (-12.345, "-12.3"), (None, "–"), (math.nan, "–"), (math.inf, "–"), (0.01, "0.0100"),
    ],
)  # fmt: skip
def test_number(value, text):
    assert shown.number(value) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"), (1023, "1,023 B"), (1024, "1.00 KiB"), (2**20, "1.00 MiB"), (12.3 * 2**30, "12.3 GiB"),
        (-(2**30), "-1.00 GiB"), (None, "–"), (80e9, "74.5 GiB"),
    ],
)  # fmt: skip
def test_memory_is_binary(num_bytes, text):
    assert shown.memory(num_bytes) == text


def test_bandwidth_is_decimal_and_durations_change_unit():
    assert shown.bandwidth(4.8e12) == "4.80 TB/s"
    assert shown.bandwidth(600e9) == "600 GB/s"
    assert [shown.duration(value) for value in (0.0421, 1.5, 119, 150, 9000)] == [
        "42.1 ms", "1.50 s", "119 s", "2.50 min", "2.50 h",
    ]  # fmt: skip


def test_progress_of_bytes_has_amount_and_share():
    assert shown.progress(1.25 * 2**30, 14.9 * 2**30, "bytes") == "1.25 GiB of 14.9 GiB (8.4 %)"
    assert shown.progress(0, 512 * 2**20, "bytes") == "0 B of 512 MiB (0.0 %)"
    assert shown.progress(3, 1200, "requests") == "3 of 1,200 requests"
    assert shown.progress(3, 4, "") == "3 of 4"


def test_share_and_change_never_stand_alone():
    assert shown.memory_with_share(12.3 * 2**30, 80 * 2**30) == "12.3 GiB (15 %)"
    assert shown.share(1, 10_000) == "<0.1 %"
    assert shown.share(1, 0) == "–"
    assert shown.change(1240, 1460, "tok/s") == "+18 % (1,240 → 1,460 tok/s)"
    assert shown.change(0, 5) == "–"


@given(st.floats(min_value=0.01, max_value=1e15))
def test_number_keeps_three_significant_digits(value):
    assert float(shown.number(value).replace(",", "")) == pytest.approx(value, rel=5.1e-3)


@given(st.text(max_size=2000))
def test_plain_text_is_one_line_without_control_characters(text):
    cleaned = plain(text)
    assert len(cleaned) <= 500
    assert not any(unicodedata.category(char) in ("Cc", "Cs") for char in cleaned)


def test_plain_strips_escape_sequences_and_direction_overrides():
    assert plain("a\x1b]52;c;x\x07b\u202ec\nd") == "a]52;c;xbc d"


def test_nearest_ignores_case_and_gives_up_on_nonsense():
    assert nearest("H100", ["h100", "A10"]) == "h100"
    assert nearest("zzzz", ["h100", "A10"]) is None


def test_error_says_needed_available_works_and_knob():
    error = DoesNotFitError("no room", needed="2 GiB", available="1 GiB", works="4,096 tokens", knob="max_model_len")
    assert str(error) == "no room (needed: 2 GiB; available: 1 GiB; would work: 4,096 tokens; turn: max_model_len)"
    assert isinstance(error, LabkitError)


def test_errors_survive_pickling():
    import pickle

    error = pickle.loads(pickle.dumps(OutOfRangeError("bad", works="16", knob="block_size")))
    assert (str(error), error.works, error.knob) == ("bad (would work: 16; turn: block_size)", "16", "block_size")


def test_write_atomic_replaces_and_leaves_nothing_behind(tmp_path):
    target = tmp_path / "new" / "file.txt"
    write_atomic(target, "old")
    write_atomic(target, b"new")
    assert target.read_text() == "new"
    assert [entry.name for entry in target.parent.iterdir()] == ["file.txt"]


def test_write_atomic_names_the_folder_it_cannot_write(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(LabkitError, match="cannot write"):
        write_atomic(tmp_path / "file" / "child.txt", "x")


def test_unicode_line_separators_do_not_make_a_second_line():
    assert plain("a\u2028b\u2029c") == "a b c"
    assert len(plain("a\u2028b").splitlines()) == 1


@pytest.mark.parametrize("target", ["/dev/null", "."])
def test_write_atomic_replaces_neither_devices_nor_folders(target):
    with pytest.raises(LabkitError, match="no ordinary file"):
        write_atomic(target, "x")


@pytest.mark.parametrize(("joules", "text"), [(None, "–"), (0.0, "0 J"), (0.0415, "41.5 mJ"), (0.213, "0.213 J")])
def test_energy(joules, text):
    assert shown.energy(joules) == text


def test_brief_shows_chosen_fields_on_one_plain_line():
    class Card:
        name = "H\x1b[31m200"

    class Run:
        gpu, status, seconds, steps = Card(), "cut\noff", 1.23456, ("x" * 999,)

    found = brief(Run(), "gpu", "status", "seconds", "steps")
    assert found.startswith("Run(gpu='H[31m200', status='cut off', seconds=1.235, steps=('xxx")
    assert len(found) < 300
    assert found.isprintable()
