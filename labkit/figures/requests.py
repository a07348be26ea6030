"""How the latency of a run's requests is spread: the share of requests that is at most so slow, for up to four runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from labkit import format as fmt
from labkit.figures.frame import empty, position, row_of_plots
from labkit.figures.latency import METRICS
from labkit.figures.palette import get_theme, label
from labkit.figures.tables import Table, make_table
from labkit.figures.thinning import Thinned, thin
from labkit.measure.run_record import RequestRow, RunRecord
from labkit.measure.summary import inter_token_s, time_to_first_token_s

MAX_RUNS = 4
MAX_ROWS = 200


@dataclass(frozen=True)
class RequestCurves:
    """One run: for each of `METRICS` its sorted times (s) against the share of values at most as large."""

    run_id: str
    name: str
    curves: tuple[tuple[str, Thinned], ...]
    origin: str = "measured"


@dataclass(frozen=True)
class RequestsInfo:
    """Curves of at most `MAX_RUNS` runs, and the requests of the first one."""

    runs: tuple[RequestCurves, ...]
    rows: tuple[RequestRow, ...] = ()
    num_runs: int = 0
    origin: str = "measured"


def get_requests_info(records: Sequence[RunRecord]) -> RequestsInfo:
    """The distributions of the first `MAX_RUNS` records; the table lists the requests of the first."""
    runs = tuple(_curves(record) for record in records[:MAX_RUNS] if time_to_first_token_s(record.requests))
    first = records[0] if records else None
    return RequestsInfo(runs, first.requests if first else (), len(records), first.origin if first else "measured")


def _curves(record: RunRecord) -> RequestCurves:
    values = {
        "ttft_s": time_to_first_token_s(record.requests),
        "inter_token_s": inter_token_s(record.requests),
        "e2e_s": [row.finish_s - row.arrival_s for row in record.requests if row.finish_s is not None],
    }
    curves = tuple((name, _cumulative(values[name])) for name in METRICS)
    return RequestCurves(record.run_id, record.name, curves, record.origin)


def _cumulative(values: list[float]) -> Thinned:
    ordered = sorted(values)
    return thin(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))])


def draw_requests(info: RequestsInfo, theme: str = "light", narrow: bool = False) -> go.Figure:
    """Three cumulative distributions side by side, one line a run."""
    if not info.runs:
        return empty(theme, "no request has given a token yet")
    figure = row_of_plots(theme, tuple(METRICS.values()), narrow=narrow, spacing=0.07)
    for index, metric in enumerate(METRICS):
        place = position(index, narrow)
        longest = max((dict(run.curves)[metric].x[-1] for run in info.runs if dict(run.curves)[metric].x), default=0.0)
        scale, unit = (1e3, "ms") if longest < 1 else (1.0, "s")
        for run, style in zip(info.runs, get_theme(theme).lines, strict=False):
            curve, name = dict(run.curves)[metric], f"{label(run.name, 32)} ({run.origin})"
            figure.add_trace(
                go.Scatter(
                    name=name,
                    legendgroup=run.run_id,
                    showlegend=index == 0,
                    mode="lines",
                    x=[scale * value for value in curve.x],
                    y=[100 * share for share in curve.y],
                    line={"color": style.color, "dash": style.dash, "width": 2, "shape": "hv"},
                    hovertemplate=f"%{{y:.3g}} % within %{{x:.3g}} {unit}<extra>{name}</extra>",
                ),
                **place,
            )
        figure.update_xaxes(title_text=f"time ({unit})", rangemode="tozero", **place)
        what = "tokens" if metric == "inter_token_s" else "requests"
        figure.update_yaxes(range=[0, 101], title_text=f"% of {what}", **place)
    figure.update_layout(legend={"y": 1.05 if narrow else 1.14})
    return figure


def plot_requests(records: Sequence[RunRecord], theme: str = "light") -> go.Figure:
    """Info step and drawing step in one."""
    return draw_requests(get_requests_info(records), theme)


def caption(info: RequestsInfo) -> str:
    """How many requests there are, how many finished, and how many were sent back or refused."""
    if not info.rows:
        return "No request was recorded."
    finished = sum(row.finish_reason in ("length", "stop") for row in info.rows)
    text = f"{fmt.count(finished)} of {fmt.count(len(info.rows))} requests finished"
    refused = sum(row.finish_reason.startswith("refused") for row in info.rows)
    preempted = sum(row.num_preemptions > 0 for row in info.rows)
    text += f", {fmt.count(preempted)} were sent back at least once" if preempted else ", none was sent back"
    text += f", {fmt.count(refused)} were refused." if refused else "."
    if info.num_runs > MAX_RUNS:
        text += f" {MAX_RUNS} of {info.num_runs} runs shown."
    return text


def table(info: RequestsInfo) -> Table:
    """One row a request, the first `MAX_ROWS`."""
    rows = [
        [str(row.request_id), fmt.duration(row.arrival_s), _since(row.first_token_s, row), _since(row.finish_s, row),
         fmt.count(row.input_tokens), fmt.count(row.num_cached_tokens), fmt.count(row.output_tokens),
         fmt.count(row.num_preemptions), row.finish_reason or "not finished"]
        for row in info.rows[:MAX_ROWS]
    ]  # fmt: skip
    shown = f", the first {MAX_ROWS} of {fmt.count(len(info.rows))}" if len(info.rows) > MAX_ROWS else ""
    columns = ["request", "arrival", "first token after", "finish after", "prompt tokens", "of them cached",
               "output tokens", "preemptions", "end"]  # fmt: skip
    return make_table(columns, rows, f"Requests of the run, {info.origin}{shown}")


def _since(moment_s: float | None, row: RequestRow) -> str:
    return fmt.duration(moment_s - row.arrival_s) if moment_s is not None else fmt.MISSING
