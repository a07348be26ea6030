"""Where runs stand in a plot of numbers: along the knob that they vary, or in rows with their names at the left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import plotly.graph_objects as go

from labkit.figures.frame import MANY_ROWS, name_lowest_only, names_beside, row_of_plots, rows_height, wrapped


class Points(Protocol):
    """What `name_runs` reads of a figure's info."""

    @property
    def knob(self) -> str | None:
        """The knob that the runs vary; None where there is no such one."""
        ...

    @property
    def axis_title(self) -> str:
        """Of the knob's axis."""
        ...

    @property
    def points(self) -> Sequence[Any]:
        """The runs, each with `value`: its place on the axis, or its name."""
        ...


def plots_of_runs(info: Points, theme: str, titles: tuple[str, ...], narrow: bool) -> go.Figure:
    """The frame: a plot for each of `titles`, as high as its rows need."""
    height = rows_height(len(info.points)) if info.knob is None else None
    return row_of_plots(theme, titles, narrow=narrow, height=height)


def along(knob: str | None, labels: Sequence[str], values: Sequence[float | None]) -> dict[str, Any]:
    """x and y of a trace: the values over the knob's, or each run's value in a row of its own; None is not drawn."""
    return {"x": values, "y": list(range(len(values)))} if knob is None else {"x": labels, "y": values}


def name_values(figure: go.Figure, knob: str | None, unit: str, place: Mapping[str, int]) -> None:
    """The axis of the values, from zero."""
    update = figure.update_xaxes if knob is None else figure.update_yaxes
    update(title_text=unit, rangemode="tozero", **place)


def name_runs(figure: go.Figure, info: Points, num_plots: int, narrow: bool) -> None:
    """The axis of the runs."""
    if info.knob is None:
        width, lines = (14, 3) if narrow else (24, 2)
        if len(info.points) > MANY_ROWS:
            width, lines = (18, 1) if narrow else (36, 1)
        names = [wrapped(point.value, width, lines) for point in info.points]
        names_beside(figure, names, num_plots, narrow)
        return
    figure.update_xaxes(title_text=info.axis_title, type="category")
    name_lowest_only(figure, num_plots, narrow)
