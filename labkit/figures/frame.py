"""What every figure starts from: an empty frame with the template, and the sentence for "nothing to show"."""

from __future__ import annotations

import textwrap
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.figures.palette import get_theme, template


def frame(theme: str, height: int = 340) -> go.Figure:
    """An empty figure with labkit's template."""
    return go.Figure(layout={"template": template(theme), "height": height})


def row_of_plots(theme: str, titles: tuple[str, ...], *, narrow: bool, spacing: float = 0.09) -> go.Figure:
    """Plots side by side, or one under the other on a narrow page; `position` says where each is."""
    if narrow:
        gap = 0.34 / len(titles)
        return panels(theme, titles, rows=len(titles), cols=1, height=240 * len(titles), vertical_spacing=gap)
    return panels(theme, titles, rows=1, cols=len(titles), horizontal_spacing=spacing)


def position(index: int, narrow: bool) -> dict[str, int]:
    """Row and column of plot `index` (from 0) of `row_of_plots`."""
    return {"row": index + 1, "col": 1} if narrow else {"row": 1, "col": index + 1}


def name_lowest_only(figure: go.Figure, num_plots: int, narrow: bool) -> None:
    """Of plots one under the other over the same names, only the lowest shows them: there is no room between them."""
    for index in range(num_plots - 1 if narrow else 0):
        figure.update_xaxes(showticklabels=False, title_text="", **position(index, narrow))


def panels(
    theme: str, titles: tuple[str, ...], *, rows: int, cols: int, height: int = 340, **options: Any
) -> go.Figure:
    """A grid of plots with labkit's template and a title over each."""
    figure = make_subplots(rows=rows, cols=cols, subplot_titles=titles, **options)
    figure.update_layout(template=template(theme), height=height, margin={"t": 60})
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
