"""What every figure starts from: an empty frame with the template, and the sentence for "nothing to show"."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.figures.palette import get_theme, template


def frame(theme: str, height: int = 340) -> go.Figure:
    """An empty figure with labkit's template."""
    return go.Figure(layout={"template": template(theme), "height": height})


def panels(theme: str, titles: tuple[str, ...], *, rows: int, cols: int, height: int = 340, **options) -> go.Figure:
    """A grid of plots with labkit's template and a title over each."""
    figure = make_subplots(rows=rows, cols=cols, subplot_titles=titles, **options)
    figure.update_layout(template=template(theme), height=height, margin={"t": 60})
    figure.update_annotations(font={"size": 12, "color": get_theme(theme).text})
    return figure


def empty(theme: str, sentence: str, height: int = 160) -> go.Figure:
    """A figure that says in words why there is nothing to draw; never a blank."""
    figure = frame(theme, height)
    figure.update_layout(
        annotations=[{"text": sentence, "showarrow": False, "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5,
                      "font": {"size": 13}}],
        xaxis={"visible": False},
        yaxis={"visible": False},
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
    )  # fmt: skip
    return figure
