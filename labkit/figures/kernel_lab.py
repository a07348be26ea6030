"""The kernel lab's pictures: hit rate, DRAM bandwidth and time over block size, and hits over block and prefix."""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go

from labkit import format as fmt
from labkit.figures.frame import empty, frame, name_lowest_only, position, row_of_plots
from labkit.figures.palette import HEAT_SCALE, get_theme
from labkit.figures.tables import Table, make_table
from labkit.measure.kernel_lab import LINE_VARIANTS, LabResult
from labkit.measure.l2_claims import ClaimVerdict
from labkit.measure.roofline import Roofline
from labkit.text import plain

TITLES = ("L2 hit rate", "DRAM reads", "kernel time")
NAMES = {
    "full": "heads of a group packed",
    "one program for each query head": "a program for each query head",
    "tile = block": "tile = block",
}


@dataclass(frozen=True)
class KernelLabLine:
    """One kernel: values at each of `block_sizes`."""

    variant: str
    block_sizes: tuple[int, ...]
    l2_hit_rates: tuple[float, ...]
    dram_bytes_per_s: tuple[float, ...]
    times_s: tuple[float, ...]
    rooflines: tuple[Roofline, ...]


@dataclass(frozen=True)
class KernelLabInfo:
    """Lines, and `heat[prefix][block]` hit rates (None where the point was not made); method and card to be shown."""

    lines: tuple[KernelLabLine, ...]
    block_sizes: tuple[int, ...]
    prefix_shares: tuple[float, ...]
    heat: tuple[tuple[float | None, ...], ...]
    method: str
    card: str

    @property
    def origin(self) -> str:
        """How the numbers were got, in a word: "measured" or "simulated"."""
        return self.method.split(" ")[0]


def get_kernel_lab_info(result: LabResult | None) -> KernelLabInfo:
    """The points by line and cell; empty before the first result."""
    if result is None:
        return KernelLabInfo((), (), (), (), "", "")
    lines = []
    for variant in LINE_VARIANTS:
        points = [point for _, point in sorted(result.line(variant).items())]
        if points:
            counters = [point.counters for point in points]
            lines.append(KernelLabLine(
                variant, tuple(point.block_size for point in points), tuple(each.l2_hit_rate for each in counters),
                tuple(each.dram_bytes_per_s for each in counters), tuple(each.kernel_time_s for each in counters),
                tuple(point.roofline for point in points),
            ))  # fmt: skip
    cells = {(point.prefix_share, point.block_size): point.counters.l2_hit_rate for point in result.heat}
    sizes, shares = result.settings.block_sizes, result.settings.prefix_shares
    heat = tuple(tuple(cells.get((share, size)) for size in sizes) for share in shares)
    return KernelLabInfo(tuple(lines), sizes, shares, heat, result.method, result.settings.gpu.name)


def draw_kernel_lab(info: KernelLabInfo, theme: str = "light", narrow: bool = False) -> go.Figure:
    """Lines of hit rate, bandwidth and time, each from zero."""
    if not info.lines:
        return empty(theme, "nothing counted yet: press Run")
    titles = tuple(f"{title}, {info.origin}" for title in TITLES)
    figure = row_of_plots(theme, titles, narrow=narrow, spacing=0.1)
    divisor, unit = fmt.bandwidth_scale(max(max(line.dram_bytes_per_s) for line in info.lines))
    for line, style in zip(info.lines, get_theme(theme).lines, strict=False):
        columns = (
            ([100 * rate for rate in line.l2_hit_rates], [fmt.share(rate, 1) for rate in line.l2_hit_rates]),
            ([value / divisor for value in line.dram_bytes_per_s],
             [fmt.bandwidth(value) for value in line.dram_bytes_per_s]),
            ([1e6 * value for value in line.times_s], [fmt.duration(value) for value in line.times_s]),
        )  # fmt: skip
        for index, (values, texts) in enumerate(columns):
            figure.add_trace(
                go.Scatter(
                    name=NAMES[line.variant], legendgroup=line.variant, showlegend=index == 0, mode="lines+markers",
                    x=[str(size) for size in line.block_sizes], y=values,
                    line={"color": style.color, "dash": style.dash, "width": 2},
                    marker={"symbol": style.marker, "size": 9, "color": style.color},
                    hovertext=[f"{NAMES[line.variant]}, block {size}: {text}, {info.origin}"
                               for size, text in zip(line.block_sizes, texts, strict=True)],
                    hovertemplate="%{hovertext}<extra></extra>",
                ),
                **position(index, narrow),
            )  # fmt: skip
    for index, (title, limits) in enumerate((("%", [0, 104]), (unit, None), ("µs", None))):
        figure.update_yaxes(title_text=title, range=limits, rangemode="tozero", **position(index, narrow))
    figure.update_xaxes(title_text="block_size (tokens)", type="category")
    name_lowest_only(figure, len(TITLES), narrow)
    figure.update_layout(legend={"y": 1.08 if narrow else 1.16}, margin={"t": 84})
    return figure


def draw_hit_map(info: KernelLabInfo, theme: str = "light", narrow: bool = False) -> go.Figure:
    """Hit rate over block size and shared prefix, every cell with its number; a narrow page has no scale beside it."""
    if not info.heat or not any(rate is not None for row in info.heat for rate in row):
        return empty(theme, "no heat map yet")
    figure = frame(theme, 300)
    percent = [[None if rate is None else 100 * rate for rate in row] for row in info.heat]
    figure.add_trace(go.Heatmap(
        x=[str(size) for size in info.block_sizes], y=[f"{100 * share:.0f} %" for share in info.prefix_shares],
        z=percent, zmin=0, zmax=100, colorscale=HEAT_SCALE,
        text=[["" if rate is None else fmt.share(rate, 1) for rate in row] for row in info.heat],
        texttemplate="%{text}", textfont={"size": 9 if narrow else 12}, showscale=not narrow,
        colorbar={"title": {"text": f"L2 hits, %,<br>{info.origin}"}},
        hovertemplate="block %{x}, %{y} shared: %{text}, " + info.origin + "<extra></extra>",
    ))  # fmt: skip
    figure.update_xaxes(title_text="block_size (tokens)", type="category")
    figure.update_yaxes(title_text="shared context" if narrow else "context shared by all sequences", type="category")
    figure.update_layout(title_text=f"L2 hits, {info.origin}" if narrow else None, margin={"t": 40 if narrow else 16})
    return figure


def plot_kernel_lab(result: LabResult, theme: str = "light") -> go.Figure:
    """Info step and drawing step in one."""
    return draw_kernel_lab(get_kernel_lab_info(result), theme)


def caption(info: KernelLabInfo) -> str:
    """What block size does to hits and bytes, and what else moves them."""
    if not info.lines:
        return "Nothing was counted yet."
    first = info.lines[0]
    spread = 100 * (max(first.l2_hit_rates) - min(first.l2_hit_rates))
    best = max(info.lines, key=lambda line: max(line.l2_hit_rates))
    text = (
        f"{plain(info.card, 40)}, {info.origin}: from block {first.block_sizes[0]} to "
        f"{first.block_sizes[-1]} the L2 hit rate of the packed kernel moves by {spread:.1f} points."
    )
    if best.variant != first.variant:
        text += f" Most hits, {fmt.share(max(best.l2_hit_rates), 1)}, come with {NAMES[best.variant]}."
    known = [rate for row in info.heat for rate in row if rate is not None]
    if known:
        text += f" Over shared prefixes the rate goes from {fmt.share(min(known), 1)} to {fmt.share(max(known), 1)}."
    if not info.method.startswith("measured"):
        text += " Simulated times are the shortest that bytes and operations allow; a kernel may take longer."
    return text


def table(info: KernelLabInfo) -> Table:
    """One row a kernel and block size, with its roofline: bytes, operations, what binds, share of it reached."""
    rows = [
        [NAMES[line.variant], fmt.count(size), fmt.share(rate, 1), fmt.bandwidth(speed), fmt.duration(time_s),
         fmt.memory(roof.dram_bytes), f"{fmt.number(roof.flops / 1e9)} GFLOP", roof.bound,
         fmt.share(roof.share_reached, 1)]
        for line in info.lines
        for size, rate, speed, time_s, roof in zip(
            line.block_sizes, line.l2_hit_rates, line.dram_bytes_per_s, line.times_s, line.rooflines, strict=True
        )
    ]  # fmt: skip
    columns = ["kernel", "block_size (tokens)", "L2 hit rate", "DRAM reads", "time", "from DRAM", "operations",
               "bound by", "of that ceiling"]  # fmt: skip
    method = f"{plain(info.card)}: {info.method}" if info.lines else ""
    ceilings = f"; ceilings: {plain(info.lines[0].rooflines[0].ceilings.source)}" if info.lines else ""
    return make_table(columns, rows, method + ceilings)


def claims_table(verdicts: tuple[ClaimVerdict, ...]) -> Table:
    """One row a claim."""
    rows = [[each.claim_id, each.claim, each.finding, each.evidence] for each in verdicts]
    method = f"{verdicts[0].card}: {verdicts[0].method}" if verdicts else ""
    return make_table(["claim", "says", "here", "why"], rows, method)
