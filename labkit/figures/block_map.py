"""Who owns each KV block: an occupancy map, and how much of the owned blocks holds no token (tail waste)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import plotly.graph_objects as go

from labkit import format as fmt
from labkit.figures.frame import empty, panels
from labkit.figures.palette import OUTLINE, PART_COLORS, get_theme, pattern
from labkit.figures.tables import Table, make_table
from labkit.measure.run_record import RunRecord

FREE, CACHED = -1, -2
MAX_CELLS = 4096
_OWNER_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00")
_CACHED_COLOR = "#8fa3ad"


@dataclass(frozen=True)
class BlockMapInfo:
    """The pool at its fullest recorded moment.

    Attributes:
        owners: owner of each cell: request id, `FREE` or `CACHED`; a cell stands for `blocks_per_cell` blocks and
            shows the owner of most of them.
        shares: (what, tokens' worth of places) with "stored tokens", "tail waste", "cached", "free"; empty where no
            step was recorded.
        num_blocks, block_size, num_requests: of the map before it was thinned.
    """

    name: str
    owners: tuple[int, ...]
    blocks_per_cell: int
    shares: tuple[tuple[str, int], ...]
    num_blocks: int
    block_size: int
    num_requests: int
    origin: str = "measured"


def get_block_map_info(record: RunRecord | None) -> BlockMapInfo:
    """The map of `record`, thinned to at most `MAX_CELLS` cells."""
    if record is None or not record.block_map:
        return BlockMapInfo(record.name if record else "", (), 1, (), 0, 0, 0)
    owners, per_cell = record.block_map, math.ceil(len(record.block_map) / MAX_CELLS)
    if per_cell > 1:
        starts = range(0, len(owners), per_cell)
        owners = tuple(Counter(owners[start : start + per_cell]).most_common(1)[0][0] for start in starts)
    return BlockMapInfo(
        record.name,
        owners,
        per_cell,
        _shares(record),
        len(record.block_map),
        record.plan.config.block_size,
        len({owner for owner in record.block_map if owner >= 0}),
        record.origin,
    )


def _shares(record: RunRecord) -> tuple[tuple[str, int], ...]:
    peak = max(record.steps, key=lambda step: step.num_blocks_used, default=None)
    if peak is None:
        return ()
    size = record.plan.config.block_size
    reserved, cached = peak.num_blocks_used * size, peak.num_blocks_cached * size
    # Shared prefix blocks are stored once and counted by each request, so stored can exceed what is reserved.
    stored = min(peak.num_tokens_stored, reserved)
    free = max(0, record.plan.num_gpu_blocks * size - reserved - cached)
    return ("stored tokens", stored), ("tail waste", reserved - stored), ("cached", cached), ("free", free)


def draw_block_map(info: BlockMapInfo, theme: str = "light", narrow: bool = False) -> go.Figure:
    """The map above, the shares of the pool as one bar below."""
    if not info.owners:
        return empty(theme, "no block map: the run ended before its blocks were read")
    figure = panels(theme, (), rows=2, cols=1, height=420, row_heights=[0.8, 0.2], vertical_spacing=0.14)
    figure.add_trace(_map(info), row=1, col=1)
    divisor, unit = fmt.count_scale(sum(size for _, size in info.shares), "tokens")
    for part in info.shares:
        figure.add_trace(_share(info, *part, divisor, theme), row=2, col=1)
    figure.update_layout(
        barmode="stack", legend={"y": -0.16, "yanchor": "top", "traceorder": "normal"}, margin={"t": 16, "b": 56}
    )
    figure.update_yaxes(visible=False, fixedrange=True)
    figure.update_yaxes(autorange="reversed", row=1, col=1)
    figure.update_xaxes(showgrid=False, zeroline=False, showticklabels=False, ticks="", row=1, col=1)
    each = f"1 cell = {fmt.count(info.blocks_per_cell)} blocks" if info.blocks_per_cell > 1 else "1 cell = 1 block"
    order = "" if narrow else ", in the order of the pool"
    figure.update_xaxes(title_text=f"{each} of {fmt.count(info.block_size)} tokens{order}", row=1, col=1)
    figure.update_xaxes(title_text=unit, row=2, col=1)
    return figure


def _map(info: BlockMapInfo) -> go.Heatmap:
    columns = max(1, math.ceil(math.sqrt(len(info.owners) * 4)))
    cells = [_color_index(owner) for owner in info.owners]
    hover = [_hover(info, index) for index in range(len(info.owners))]
    rows = range(0, len(cells), columns)
    pad = [None] * (-len(cells) % columns)
    colors = ("rgba(127,127,127,0.12)", _CACHED_COLOR, *_OWNER_COLORS)
    return go.Heatmap(
        z=[(cells + pad)[start : start + columns] for start in rows],
        text=[(hover + [""] * len(pad))[start : start + columns] for start in rows],
        hovertemplate="%{text}<extra></extra>",
        hoverongaps=False,
        zmin=0,
        zmax=len(colors) - 1,
        xgap=1,
        ygap=1,
        showscale=False,
        colorscale=[[index / (len(colors) - 1), color] for index, color in enumerate(colors)],
    )


def _color_index(owner: int) -> int:
    if owner == FREE:
        return 0
    return 1 if owner == CACHED else 2 + owner % len(_OWNER_COLORS)


def _hover(info: BlockMapInfo, index: int) -> str:
    owner = info.owners[index]
    who = {FREE: "free", CACHED: "cached, free for reuse"}.get(owner, f"request {owner}")
    start = index * info.blocks_per_cell
    stop = min(start + info.blocks_per_cell, info.num_blocks) - 1
    return f"block {start:,}: {who}" if start == stop else f"blocks {start:,} to {stop:,}: mostly {who}"


def _share(info: BlockMapInfo, what: str, tokens: int, divisor: int, theme: str) -> go.Bar:
    fill = {"stored tokens": PART_COLORS["kv_cache"], "tail waste": get_theme(theme).worse, "cached": _CACHED_COLOR,
            "free": "rgba(0,0,0,0)"}[what]  # fmt: skip
    total = sum(size for _, size in info.shares)
    return go.Bar(
        name=f"{what} {fmt.count(tokens)} ({fmt.share(tokens, total)})",
        orientation="h",
        y=["pool"],
        x=[tokens / divisor],
        marker={"color": fill, "line": {"color": OUTLINE, "width": 1},
                "pattern": pattern("x" if what == "tail waste" else "", fill)},
        hovertemplate=f"{what}: {fmt.count(tokens)} tokens<extra></extra>",
    )  # fmt: skip


def plot_block_map(record: RunRecord | None, theme: str = "light") -> go.Figure:
    """Info step and drawing step in one."""
    return draw_block_map(get_block_map_info(record), theme)


def caption(info: BlockMapInfo) -> str:
    """How many requests share the pool, and the tail waste."""
    if not info.owners:
        return "No block map was recorded for this run."
    shares = dict(info.shares)
    text = (
        f"{info.origin.capitalize()}: {fmt.count(info.num_blocks)} blocks of {fmt.count(info.block_size)} tokens, "
        f"held by {fmt.count(info.num_requests)} requests"
    )
    if not shares:
        return f"{text}."
    reserved = shares["stored tokens"] + shares["tail waste"]
    return (
        f"{text}; at the fullest step {fmt.share(reserved, sum(shares.values()))} of all places are reserved, and "
        f"{fmt.count(shares['tail waste'])} of those ({fmt.share(shares['tail waste'], reserved)}) hold no token."
    )


def table(info: BlockMapInfo) -> Table:
    """The shares of the pool in tokens and percent."""
    total = sum(size for _, size in info.shares)
    rows = [[what, fmt.count(size), fmt.share(size, total)] for what, size in info.shares]
    caption = f"The pool at its fullest step, {info.origin}"
    return make_table(["places for tokens", "tokens", "share of the pool"], rows, caption)
