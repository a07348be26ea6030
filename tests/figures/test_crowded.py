"""Figures with equal names, many near points and little room: nothing stands on something else."""

from __future__ import annotations

import pytest

from labkit.figures import l2, latency, pareto, throughput
from labkit.specs.engine_config import EngineConfig
from tests.figures.samples import sample_record


def runs(number: int, **options):
    return [
        sample_record(EngineConfig(), run_id=f"r{index}", slowness=1 + index / 100, **options)
        for index in range(number)
    ]


def test_bars_of_runs_with_one_name_stand_side_by_side():
    figure = l2.draw_l2(l2.get_l2_info(runs(3, name="the same")))
    assert len(set(figure.data[0].x)) == len(figure.data[0].x)
    assert len(set(figure.layout.xaxis.ticktext)) == 1


@pytest.mark.parametrize("room", [throughput, latency, l2])
def test_on_a_narrow_page_only_the_lowest_plot_names_its_runs(room):
    name = room.__name__.rpartition(".")[2]
    info = getattr(room, f"get_{name}_info")(runs(2))
    draw = getattr(room, f"draw_{name}")
    narrow = draw(info, narrow=True).layout
    axes = [narrow[f"xaxis{number or ''}"] for number in ("", 2, 3) if f"xaxis{number or ''}" in narrow]
    assert [axis.showticklabels for axis in axes] == [False] * (len(axes) - 1) + [None]
    assert draw(info).layout.xaxis.showticklabels is None


def test_of_many_near_points_only_the_ends_are_named_and_the_slowest_has_room():
    figure = pareto.draw_pareto(pareto.get_pareto_info(runs(6)))
    texts = [text for trace in figure.data if "text" in (trace.mode or "") for text in trace.text]
    assert len(texts) == 6
    assert sum(bool(text) for text in texts) == 2
    slowest = max(value for trace in figure.data for value in trace.x)
    assert figure.layout.xaxis.range[1] == pytest.approx(1.2 * slowest)
