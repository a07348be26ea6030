"""Where a session's runs happen: on its card, on a virtual one, or on this machine's CPU instead."""

from __future__ import annotations

from labkit.text import plain
from labkit.widgets.run_control import SessionLike


def virtual_card(session: SessionLike) -> str:
    """The session's card where it is not here and can be simulated; else ""."""
    if session.gpu.is_cpu or getattr(session, "runs_on_card", False) or not hasattr(session, "simulate"):
        return ""
    return plain(session.gpu.name, 60)


def place_note(session: SessionLike) -> str:
    """One sentence where plan and runs are of different machines; "" where they are of one."""
    if session.gpu.is_cpu or getattr(session, "runs_on_card", False):
        return ""
    card = plain(session.gpu.name, 60)
    where = f"The plan is for {card}, which is not here: nothing is measured on it."
    measured = "on this machine's CPU, within cpu_memory_gib"
    if virtual_card(session):
        return f"{where} Run simulates the traffic there, or runs it {measured}."
    return f"{where} Runs are {measured}."
