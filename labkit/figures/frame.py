"""What every figure starts from: an empty frame with the template, and the sentence for "nothing to show"."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.figures.palette import get_theme, label, template
from labkit.text import plain

# More rows than these lie closer together, with names of one line.
MANY_ROWS = 12
# Pixels of each plot on a narrow page, and between two: a title below the one and a title over the other.
NARROW_HEIGHT, NARROW_GAP = 240, 96


def frame(theme: str, height: int = 340) -> go.Figure:
    """An empty figure with labkit's template."""
    return go.Figure(layout={"template": template(theme), "height": height})


def row_of_plots(
    theme: str, titles: tuple[str, ...], *, narrow: bool, spacing: float = 0.09, height: int | None = None
) -> go.Figure:
    """Plots side by side, or one under the other on a narrow page; `position` says where each is.

    Args:
        height: of each plot with its axis, in pixels.
    """
    if narrow:
        total = (height or NARROW_HEIGHT) * len(titles)
        return panels(theme, titles, rows=len(titles), cols=1, height=total, vertical_spacing=NARROW_GAP / total)
    return panels(theme, titles, rows=1, cols=len(titles), horizontal_spacing=spacing, height=height or 340)


def position(index: int, narrow: bool) -> dict[str, int]:
    """Row and column of plot `index` (from 0) of `row_of_plots`."""
    return {"row": index + 1, "col": 1} if narrow else {"row": 1, "col": index + 1}


def name_lowest_only(figure: go.Figure, num_plots: int, narrow: bool) -> None:
    """Of plots one under the other over the same names, only the lowest shows them: there is no room between them."""
    for index in range(num_plots - 1 if narrow else 0):
        figure.update_xaxes(showticklabels=False, title_text="", **position(index, narrow))


def joined(values: Sequence[str], is_axis: bool) -> str:
    """plotly's mode for runs along an axis: markers, and a line through them where each value has one run only."""
    return "lines+markers" if is_axis and len(set(values)) == len(values) else "markers"


def rows_height(num_rows: int) -> int:
    """Of a plot with `num_rows` named rows, in pixels."""
    return (48 if num_rows <= MANY_ROWS else 24) * num_rows + 136


def names_beside(figure: go.Figure, names: Sequence[str], num_plots: int, narrow: bool) -> None:
    """Put `names` at the left of plots whose marks lie at y = 0, 1, … from the top.

    Names of any length and number have room there; under the axis they would turn and squeeze the plot.
    """
    for index in range(num_plots):
        figure.update_yaxes(
            tickvals=list(range(len(names))), ticktext=list(names), range=[len(names) - 0.4, -0.6], title_text="",
            zeroline=False, showticklabels=narrow or index == 0, **position(index, narrow),
        )  # fmt: skip


def wrapped(name: str, width: int = 24, lines: int = 2) -> str:
    """`name` from outside in at most `lines` lines for a label, cut where it is longer."""
    parts = textwrap.wrap(plain(name, 200), width) or [""]
    shown = [label(part, width) for part in parts[:lines]]
    return "<br>".join(shown) + ("…" if len(parts) > lines else "")


def panels(
    theme: str, titles: tuple[str, ...], *, rows: int, cols: int, height: int = 340, **options: Any
) -> go.Figure:
    """A grid of plots with labkit's template and a title over each."""
    figure = make_subplots(rows=rows, cols=cols, subplot_titles=titles, **options)
    # Set, not updated: an update would be merged into plotly's own template.
    figure.layout.template = template(theme)
    figure.update_layout(height=height, margin={"t": 60})
    figure.update_annotations(font={"size": 12, "color": get_theme(theme).text})
    return figure


def empty(theme: str, sentence: str, height: int = 160) -> go.Figure:
    """A figure that says in words why there is nothing to draw; never a blank."""
    figure = frame(theme, height)
    figure.update_layout(
        annotations=[{"text": "<br>".join(textwrap.wrap(sentence, 44)), "showarrow": False, "xref": "paper",
                      "yref": "paper", "x": 0.5, "y": 0.5,
                      "font": {"size": 13}}],
        xaxis={"visible": False},
        yaxis={"visible": False},
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
    )  # fmt: skip
    return figure
