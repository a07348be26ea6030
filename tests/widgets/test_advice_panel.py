"""Advice in the panel: what each change would buy on the session's traffic, Apply, and what came of it."""

from __future__ import annotations

import dataclasses

import pytest

import labkit
from labkit.advice import binding_limit
from labkit.experiments.virtual_run import VirtualOptions, simulate
from labkit.memory import plan as make_plan
from labkit.specs import synthetic_workload
from labkit.specs.engine_config import EngineConfig
from labkit.widgets import Panel
from tests.widgets.fake_session import FakeSession

BASE = EngineConfig(max_model_len=2048, max_num_seqs=4)
SETTLE_S = 60


class VirtualSession(FakeSession):
    """A session whose card is virtual: it plans and runs for real, without a card."""

    def __init__(self) -> None:
        super().__init__(gpu=labkit.load_gpu("L40S"), model=labkit.load_model("Qwen/Qwen3-8B"))
        self.workload = synthetic_workload(12, input_lengths=200, output_lengths=10)
        self.config = BASE

    def plan(self, config):
        return make_plan(self.model, self.gpu, config, engine="vllm")

    def run(self, config, on_event):
        options = VirtualOptions(arrival_scale=0.0, has_server=False)
        record = simulate(self.model, self.gpu, self.workload, config, options=options,
                          run_id=f"run-{len(self._records)}")  # fmt: skip
        self._records.append(record)
        return record


@pytest.fixture
def panel():
    made = Panel(VirtualSession())
    made.settle(SETTLE_S)
    yield made
    made.cancel()
    assert made.wait(10)
    made.settle(SETTLE_S)


def test_while_nobody_turns_a_knob_the_traffic_is_simulated_and_the_answer_is_of_it(panel):
    assert "max_num_seqs binds: requests waited" in panel.answer.text
    assert "tok/s" in panel.answer.text
    assert panel.advice_view.title.text == "What each change would buy on this traffic, simulated"
    columns = " ".join(panel.advice_view.table.columns)
    for part in ("KV cache", "KV tokens", "rate when all requests wait", "p99 first token", "risk"):
        assert part in columns
    assert len(panel.advice_view.table.rows) == len(panel._advice) > 1


def test_a_turned_knob_shows_the_plan_at_once_and_the_traffic_later(panel):
    panel.knobs["max_num_seqs"].value = 8
    assert panel.advice_view.title.text == "What each change would buy, from the plan"
    panel.settle(SETTLE_S)
    assert "on this traffic" in panel.advice_view.title.text


def test_apply_sets_exactly_the_knobs_and_after_the_run_estimated_stands_beside_got(panel):
    panel.run()
    assert panel.wait(30)
    panel.settle(SETTLE_S)
    line, advice = panel.advice_view.lines[0], panel._advice[1]
    assert line.text.startswith(f"{advice.title}: {advice.gain}")
    line.pressed = {"what": "Apply", "count": 1}
    assert panel.config == BASE.replace(**advice.changes)
    panel.settle(SETTLE_S)
    assert panel.advice_view.came.text == ""
    panel.run()
    assert panel.wait(30)
    panel.settle(SETTLE_S)
    assert panel.advice_view.came.text.startswith(f"Applied “{advice.title}”: estimated {advice.gain}; got ")
    assert panel.advice_view.came_table.columns == ["quantity", "estimated", "got"]
    panel.knob_set.undo()
    assert panel.config == BASE


def test_the_limits_tab_places_the_simulated_steps_before_any_run(panel):
    panel.pictures.tabs.value = "Limits"
    assert panel.pictures.caption.text.startswith("Qwen/Qwen3-8B on a virtual L40S, simulated: ")
    names = [trace["name"] for trace in panel.pictures.chart.figure["data"]]
    assert names[:2] == ["data sheet", "steps that only decode"]


def test_a_session_whose_card_is_not_known_keeps_the_plan(panel):
    fake = Panel(FakeSession())
    fake.settle(SETTLE_S)
    assert fake.advice_view.title.text == "What each change would buy, from the plan"
    fake.pictures.tabs.value = "Limits"
    assert "a card whose figures are known" in fake.pictures.caption.text


def test_a_task_shows_its_goal_and_brings_its_traffic(panel):
    panel.knob_set.presets.value = "chat"
    assert panel.config.max_model_len == 8192
    assert "Goal: most output tokens per second with 99 % of each time between tokens within 100 ms" in (
        panel.task_line.text
    )
    assert panel.task_line.buttons == ["Use its traffic: azure-2023-conv"]
    panel.task_line.pressed = {"what": "Use its traffic", "count": 1}
    panel.settle(SETTLE_S)
    assert panel.session.workload.name == "azure-2023-conv"
    assert "azure-2023-conv" in panel.answer.heading
    assert panel.task_line.buttons == []
    assert "its goal (simulated on 128 requests)" in panel.task_line.text
    panel.knob_set.presets.value = ""
    assert panel.task_line.text == ""


def test_where_no_setting_moves_the_limit_the_answer_has_no_apply_and_every_change_stands_below(monkeypatch):
    memory_binds = Panel(FakeSession())
    assert memory_binds.answer.buttons == ["Apply"]
    first = memory_binds._advice[0]
    assert first.title not in memory_binds.advice_view.lines[0].text
    limit = binding_limit(memory_binds.plan)
    monkeypatch.setattr("labkit.widgets.panel.binding_limit", lambda *_: dataclasses.replace(limit, name="traffic"))
    panel = Panel(FakeSession())
    assert "offer more traffic" in panel.answer.text
    assert panel.answer.buttons == []
    assert panel.advice_view.lines[0].text.startswith(first.title)
    panel.advice_view.lines[0].pressed = {"what": "Apply", "count": 1}
    assert all(getattr(panel.config, name) == value for name, value in first.changes.items())
    for one in (memory_binds, panel):
        one.settle(SETTLE_S)
