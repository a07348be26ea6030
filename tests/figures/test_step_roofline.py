"""Steps on the roofline: the points are those of the bound, the words name what binds, and nothing is never blank."""

from __future__ import annotations

import pytest

import labkit
from labkit.advice.step_bound import StepBound, StepPoint, step_bound
from labkit.experiments.virtual_run import VirtualOptions, simulate
from labkit.figures import step_roofline
from labkit.specs import synthetic_workload
from labkit.specs.engine_config import EngineConfig
from tests.figures.samples import sample_record

BOUND = StepBound(
    "bandwidth", {"bandwidth": 0.7, "compute": 0.2, "host": 0.1, "graphs": 0.0, "links": 0.0},
    (StepPoint("steps that only decode", 90, 1e12, 2e12, 1.0), StepPoint("steps with prompts", 10, 1e10, 1e14, 0.5)),
    flops_per_s=4e14, bytes_per_s=2e12,
)  # fmt: skip
INFO = step_roofline.StepRooflineInfo(BOUND, "block 16", "L40S", "measured")


@pytest.fixture(scope="module")
def record():
    traffic = synthetic_workload(6, input_lengths=300, output_lengths=10)
    return simulate(labkit.load_model("Qwen/Qwen3-8B"), labkit.load_gpu("L40S"), traffic,
                    EngineConfig(max_model_len=2048), options=VirtualOptions(arrival_scale=0.0))  # fmt: skip


def test_the_first_run_that_can_be_placed_is_shown(record):
    info = step_roofline.get_step_roofline_info([None, sample_record(), record])
    assert info.bound == step_bound(record.plan, record)
    assert (info.card, info.origin) == ("L40S", "simulated")
    # The name of a virtual run says its card already.
    assert step_roofline.caption(info).startswith("Qwen/Qwen3-8B on a virtual L40S, simulated: ")


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_points_and_roof_carry_the_numbers(theme, narrow):
    figure = step_roofline.draw_step_roofline(INFO, theme, narrow)
    roof, decode, prompts, *bars = figure.data
    assert max(roof.y) == 400
    assert roof.x[1] == BOUND.ridge == 200
    assert roof.y[1] == pytest.approx(400)
    assert (decode.x[0], decode.y[0]) == (2, 2)
    assert (prompts.x[0], prompts.y[0]) == (1e4, 200)
    assert decode.marker.symbol != prompts.marker.symbol
    assert [(bar.name, round(bar.y[0])) for bar in bars] == [("bandwidth", 70), ("compute", 20), ("host", 10)]


def test_the_caption_says_what_binds_and_how_near_the_roof_is():
    text = step_roofline.caption(INFO)
    assert "block 16 on L40S, measured: 70 % of the steps' time is reading weights and KV" in text
    assert "Steps that only decode reach 50 % of the memory's peak" in text
    assert "Steps with prompts reach 50 % of the peak of its matrix units" in text
    assert len(step_roofline.table(INFO)) == 5


def test_without_a_run_there_is_a_sentence():
    for records in ([], [None], [sample_record()]):
        info = step_roofline.get_step_roofline_info(records)
        assert "Nothing to place" in step_roofline.caption(info)
        assert len(step_roofline.draw_step_roofline(info).data) == 0
        assert len(step_roofline.table(info)) == 0
