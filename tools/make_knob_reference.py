"""Write `docs/knobs.md` from `EngineConfig`, so that panel help, command-line help and docs are one text."""

from __future__ import annotations

from pathlib import Path

from labkit.advice.flags import effective_default, flag_notes, known_versions
from labkit.specs.engine_config import EngineConfig, Knob

OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "knobs.md"
HEAD = """# Every knob

Made from `EngineConfig` by `tools/make_knob_reference.py`; the panel and the command line show the same text. The names
are vLLM's. "default" means as the model, the card or the vLLM version says.
"""


def allowed(knob: Knob) -> str:
    """The values that a knob takes, in words."""
    if knob.choices:
        return ", ".join(f"`{choice}`" for choice in knob.choices)
    if knob.kind is bool:
        return "on, off"
    if knob.minimum is None:
        return "text"
    top = f" to {number(knob.maximum)}" if knob.maximum is not None and knob.maximum < 2**31 else " or more"
    return f"{number(knob.minimum)}{top}" + (f" {knob.unit}" if knob.unit else "")


def number(value: float) -> str:
    """A bound with all its digits."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,g}"


def shown(value: object) -> str:
    """A default in words."""
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def section(knob: Knob) -> str:
    """One knob as Markdown."""
    newest = known_versions()[-1]
    lines = [f"## {knob.name}", "", knob.help, "", f"- allowed: {allowed(knob)}"]
    lines.append(f"- labkit's default: {shown(getattr(EngineConfig(), knob.name))}")
    if knob.flag is None:
        lines.append("- vLLM: no flag")
    else:
        lines.append(f"- vLLM {newest}: `{knob.flag}`, {shown(effective_default(knob.flag, newest))}")
        for backend, values in flag_notes().get(knob.flag, {}).get("backends", {}).items():
            lines.append(f"- with {backend}: {values}")
    return "\n".join(lines) + "\n"


def text() -> str:
    """The page."""
    return "\n".join([HEAD, *(section(knob) for knob in EngineConfig.knobs())])


if __name__ == "__main__":
    OUTPUT.write_text(text())
