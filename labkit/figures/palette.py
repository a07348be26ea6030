"""All colours, dashes, markers and templates of labkit's figures; one place, safe for colour-blind readers.

The base is Okabe and Ito's set (https://jfly.uni-koeln.de/color/). The distances that the choice rests on are
computed in tests/figures/test_palette.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from labkit.text import plain

ThemeName = Literal["light", "dark"]

PART_COLORS: Mapping[str, str] = MappingProxyType(
    {
        "weights": "#0072B2",
        "kv_cache": "#E69F00",
        "block_tables": "#56B4E9",
        "activation": "#F0E442",
        "cuda_graphs": "#009E73",
        "workspace": "#CC79A7",
        "outside": "#666666",
        "free": "rgba(0,0,0,0)",
    }
)
OUTLINE = "#767676"
BASELINE = "#767676"
HEAT_SCALE = "Cividis"
DASHES = ("solid", "dash", "dot", "dashdot")
MARKERS = ("circle", "square", "triangle-up", "diamond")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class LineStyle:
    """How one series looks: never told apart by colour alone."""

    color: str
    dash: str
    marker: str


@dataclass(frozen=True)
class Theme:
    """Colours of one page: text, lines, and the two that mean better and worse (never without ▲ ▼ and a word)."""

    name: ThemeName
    page: str
    text: str
    muted: str
    grid: str
    lines: tuple[LineStyle, ...]
    better: str
    worse: str
    hover: str


def _lines(*colors: str) -> tuple[LineStyle, ...]:
    return tuple(LineStyle(*style) for style in zip(colors, DASHES, MARKERS, strict=True))


LIGHT = Theme(
    name="light",
    page="#ffffff",
    text="#1a1a1a",
    muted="#595959",
    grid="#e3e3e3",
    lines=_lines("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    better="#0072B2",
    worse="#D55E00",
    hover="#ffffff",
)
DARK = Theme(
    name="dark",
    page="#111111",
    text="#ececec",
    muted="#a8a8a8",
    grid="#333333",
    lines=_lines("#56B4E9", "#E69F00", "#009E73", "#CC79A7"),
    better="#56B4E9",
    worse="#E69F00",
    hover="#222222",
)


def get_theme(name: str) -> Theme:
    """The theme called `name`; anything but "dark" is light, as a page without a theme is."""
    return DARK if name == "dark" else LIGHT


def text_on(fill: str) -> str:
    """Black or white, whichever reads on `fill`."""
    return "#ffffff" if fill in ("#0072B2", "#666666", "#D55E00") else "#000000"


def template(name: str) -> dict[str, Any]:
    """plotly template `labkit_light` or `labkit_dark`: transparent paper, page colours only where text stands."""
    theme = get_theme(name)
    axis: dict[str, Any] = {
        "gridcolor": theme.grid,
        "linecolor": OUTLINE,
        "zerolinecolor": OUTLINE,
        "tickcolor": OUTLINE,
        "ticks": "outside",
        "automargin": True,
        "exponentformat": "none",
        "separatethousands": True,
        "title": {"standoff": 8},
    }
    return {
        "layout": {
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": FONT, "size": 12, "color": theme.text},
            "colorway": [style.color for style in theme.lines],
            "hoverlabel": {"bgcolor": theme.hover, "font": {"color": theme.text, "family": FONT}, "align": "left"},
            "margin": {"l": 56, "r": 16, "t": 16, "b": 44},
            "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "xanchor": "left"},
            "xaxis": axis,
            "yaxis": axis,
            "title": {"x": 0, "xanchor": "left", "font": {"size": 14}},
            "separators": ".,",
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": theme.muted, "activecolor": theme.text},
            "dragmode": "zoom",
        }
    }


_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;", "%": "&#37;"})


def label(text: object, limit: int = 60) -> str:
    """`text` from outside, as plotly shows it letter by letter.

    plotly reads a few HTML tags, `$…$` as TeX and `%{…}` as a template; it decodes only a handful of named entities,
    so quotes stay as they are.
    """
    return plain(text, limit).translate(_ENTITIES)


def pattern(shapes: list[str] | str, fill: str) -> dict[str, Any]:
    """Hatching over `fill`, weak enough that the text on it still reads; an empty shape leaves the fill plain."""
    return {
        "shape": shapes,
        "fillmode": "overlay",
        "fgcolor": text_on(fill),
        "fgopacity": 0.3,
        "size": 7,
        "solidity": 0.14,
    }
