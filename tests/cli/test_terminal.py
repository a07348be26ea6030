"""Progress in the shell: phase, count, elapsed and remaining on one line; messages stay plain text."""

from __future__ import annotations

import pytest

from labkit import terminal
from labkit.terminal import ProgressLine

PROGRESS = {"type": "progress", "phase": "run", "done": 3, "total": 12, "unit": "requests", "elapsed_s": 4.0}


@pytest.fixture
def line(monkeypatch):
    monkeypatch.setattr(terminal, "QUIET_S", -1.0)
    return ProgressLine


def shown(line, capsys, *events) -> list[str]:
    with line() as progress:
        for event in events:
            progress(event)
    return capsys.readouterr().err.splitlines()


def test_a_line_has_phase_count_elapsed_and_remaining(line, capsys):
    assert shown(line, capsys, {**PROGRESS, "remaining_s": 90.0}) == [
        "run: 3 of 12 requests · 4.00 s elapsed, about 90.0 s left"
    ]


def test_before_an_estimate_only_the_elapsed_time_is_said(line, capsys):
    assert shown(line, capsys, {**PROGRESS, "remaining_s": None}) == ["run: 3 of 12 requests · 4.00 s elapsed"]


def test_weights_are_read_in_bytes_and_a_step_without_a_count_has_none(line, capsys):
    load = {**PROGRESS, "phase": "load", "done": 2**30, "total": 4 * 2**30, "unit": "bytes", "remaining_s": 12.0}
    assert shown(line, capsys, load, {**load, "done": 1, "total": 1, "unit": "", "remaining_s": None}) == [
        "load: 1.00 GiB of 4.00 GiB (25 %) · 4.00 s elapsed, about 12.0 s left",
        "load · 4.00 s elapsed",
    ]


def test_lines_come_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "QUIET_S", 3600.0)
    events = [{**PROGRESS, "done": done, "remaining_s": 1.0} for done in range(12)]
    assert len(shown(ProgressLine, capsys, *events)) <= 1


def test_messages_lose_their_control_characters_and_markup_stays_text(line, capsys):
    hostile = "\x1b]52;c;x\x07[red]done[/red]\n"
    lines = shown(
        line, capsys, {"type": "status", "message": hostile}, {"type": "log", "level": "error", "message": hostile}
    )
    assert [text.strip() for text in lines] == ["]52;c;x[red]done[/red]"] * 2


def test_unknown_events_and_quiet_logs_are_passed_over(line, capsys):
    assert shown(line, capsys, {"type": "step"}, {"type": "log", "level": "info", "message": "x"}) == []
