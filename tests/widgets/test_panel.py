"""The panel without a browser: what each knob, button and event puts into the widgets."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit.errors import DoesNotFitError, LabkitError, UnsupportedError, WorkerError
from labkit.memory.records import PARTS
from labkit.specs.engine_config import EngineConfig
from labkit.widgets import Panel
from labkit.widgets.parts import TextLine
from tests.figures.samples import HOSTILE, sample_gpu, sample_model, sample_plan, sample_runs, state_records
from tests.widgets.fake_session import FakeSession

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def make_panel():
    panels = []

    def make(session=None, **options):
        panels.append(Panel(session or FakeSession(), **options))
        return panels[-1]

    yield make
    for panel in panels:
        panel.cancel()
        assert panel.wait(10)
        panel.settle()


def bar_bytes(panel) -> dict[str, float]:
    figure = panel.pictures.memory.figure
    unit = {"memory (GiB)": 2**30, "memory (MiB)": 2**20}[figure["layout"]["xaxis"]["title"]["text"]]
    return {part: round(trace["x"][0] * unit) for part, trace in zip(PARTS, figure["data"], strict=True)}


@pytest.mark.parametrize(("knob", "value"), [("block_size", 64), ("kv_cache_dtype", "fp8"), ("max_model_len", 2048),
                                             ("max_num_batched_tokens", 512), ("cpu_memory_gib", 1.0)])  # fmt: skip
def test_turning_a_knob_redraws_the_bar_of_its_plan(make_panel, knob, value):
    panel = make_panel()
    panel.knobs[knob].value = value
    plan = sample_plan(EngineConfig(**{knob: value}), gpu=panel.session.gpu)
    expected = {part: max(0, size) for part, size in plan.breakdown.parts().items()}
    assert bar_bytes(panel) == expected
    assert panel.plan == plan
    assert panel.config == EngineConfig(**{knob: value})


def test_settings_that_were_planned_are_not_planned_again(make_panel):
    panel = make_panel()
    panel.settle()
    panel.knobs["block_size"].value = 64
    panel.settle()
    planned, shown = panel.session.plan_calls, bar_bytes(panel)
    panel.knob_set.undo()
    panel.settle()
    assert panel.session.plan_calls == planned, "the settings before, their advice and every step from them are known"
    panel.knob_set.redo()
    assert bar_bytes(panel) == shown


def test_the_answer_names_fit_limit_and_the_best_change(make_panel):
    panel = make_panel()
    assert panel.answer.heading == "SmolLM2-135M-Instruct · cpu · azure-conv"
    assert panel.answer.level == "ok"
    assert panel.answer.text.startswith("Fits: 1.56 GiB of KV = ")
    assert "KV blocks bind" in panel.answer.text
    assert "Next: raise cpu_memory_gib" in panel.answer.text


def test_what_does_not_fit_is_red_with_the_cure_and_apply_sets_it_in_one_step(make_panel):
    panel = make_panel(config=EngineConfig(cpu_memory_gib=1.0))
    panel.knobs["max_model_len"].value = 10**6
    assert panel.answer.level == "bad"
    assert panel.answer.text.startswith("Does not fit")
    largest = panel.plan.max_model_len_that_fits
    assert f"{largest:,} tokens" in panel.knobs["max_model_len"].error
    panel.knobs["max_model_len"].typed = {"text": "one million", "count": 1}
    assert "whole number" in panel.knobs["max_model_len"].error
    panel.knobs["max_model_len"].typed = {"text": "2000000", "count": 2}
    assert f"{panel.plan.max_model_len_that_fits:,} tokens" in panel.knobs["max_model_len"].error
    panel.knob_set.undo()
    changes = dict(panel._advice[0].changes)
    panel.answer.pressed = {"what": "Apply", "count": 1}
    assert panel.answer.level == "ok"
    assert panel.config == EngineConfig(cpu_memory_gib=1.0, max_model_len=10**6).replace(**changes)
    panel.knob_set.undo()
    assert panel.config.max_model_len == 10**6


@pytest.mark.parametrize(
    ("knob", "typed", "value"),
    [("block_size", "32", 32), ("max_model_len", "8K", 8192), ("max_model_len", "16,384", 16384),
     ("max_model_len", "auto", None),
     ("enforce_eager", "on", True), ("kv_cache_dtype", "fp8", "fp8"), ("cpu_memory_gib", " 1.5 ", 1.5)],
)  # fmt: skip
def test_typed_values(make_panel, knob, typed, value):
    panel = make_panel()
    panel.knobs[knob].typed = {"text": typed, "count": 1}
    assert getattr(panel.config, knob) == value
    assert panel.knobs[knob].error == ""


@pytest.mark.parametrize(
    ("knob", "typed", "said"),
    [("block_size", "0", "1 to 8192 tokens"), ("block_size", "-5", "1 to 8192"), ("block_size", "many", "whole number"),
     ("block_size", "1.5", "whole number"), ("kv_cache_dtype", "fp7", "one of auto"),
     ("block_size", "9" * 400, "block_size"),
     ("cpu_memory_gib", "nan", "cpu_memory_gib"), ("max_model_len", HOSTILE, "max_model_len")],
)  # fmt: skip
def test_a_typed_value_that_is_not_allowed_is_said_beside_the_knob_and_changes_nothing(make_panel, knob, typed, said):
    panel = make_panel()
    before = panel.config
    panel.knobs[knob].typed = {"text": typed, "count": 1}
    assert said in panel.knobs[knob].error
    assert panel.config == before
    assert panel.plan is not None
    panel.knobs[knob].typed = {"text": panel.knobs[knob].shown, "count": 2}
    assert panel.knobs[knob].error == ""


def test_a_value_set_from_python_is_checked_like_a_typed_one(make_panel):
    panel = make_panel()
    with pytest.raises(LabkitError):
        panel.knobs["block_size"].value = -1
    assert panel.config.block_size == 16


def test_a_plan_that_fails_is_said_beside_its_knob_and_in_the_answer(make_panel):
    panel = make_panel()
    panel.session.plan_error = UnsupportedError("block 24 is not supported", works="16 or 32", knob="block_size")
    panel.knobs["block_size"].value = 24
    assert panel.knobs["block_size"].error == "block 24 is not supported. Would work: 16 or 32"
    assert panel.answer.level == "bad"
    assert "would work: 16 or 32" in panel.answer.text
    panel.session.plan_error = None
    panel.knobs["block_size"].value = 32
    assert panel.knobs["block_size"].error == ""
    assert panel.answer.level == "ok"


def test_undo_redo_and_reset(make_panel):
    panel = make_panel()
    for size in (8, 32, 64):
        panel.knobs["block_size"].value = size
    knobs = panel.knob_set
    knobs.undo()
    knobs.undo()
    assert panel.config.block_size == 8
    knobs.redo()
    assert (panel.config.block_size, panel.knobs["block_size"].value) == (32, 32)
    panel.knobs["enforce_eager"].value = True
    assert knobs.redo_button.disabled
    knobs.reset()
    assert panel.config == EngineConfig()
    knobs.undo()
    assert (panel.config.block_size, panel.config.enforce_eager) == (32, True)


def test_fifty_changes_can_be_undone(make_panel):
    panel = make_panel()
    for length in range(100, 160):
        panel.knobs["max_model_len"].value = length
    for _ in range(60):
        panel.knob_set.undo()
    assert panel.config == EngineConfig()


def test_steps_up_and_down_and_what_they_buy(make_panel):
    panel = make_panel()
    panel.settle()
    assert panel.knobs["cpu_memory_gib"].gains[1].startswith("▲ 4: +")
    panel.knobs["max_model_len"].pressed = {"what": "down", "count": 1}
    assert panel.config.max_model_len == 4096
    panel.knobs["enforce_eager"].pressed = {"what": "down", "count": 1}
    assert panel.config.enforce_eager is False


def test_a_run_grows_the_chart_then_stands_in_the_table_beside_its_prediction(make_panel):
    panel = make_panel(FakeSession(pause_s=0.01, num_steps=60))
    lengths = []
    panel.pictures.chart.observe(lambda change: lengths.append(len(change["new"]["data"][0]["x"]))
                                 if change["new"].get("data") else None, "figure")  # fmt: skip
    panel.run_bar.run.click()
    assert panel.run_bar.run.disabled
    assert not panel.run_bar.cancel.disabled
    assert panel.wait(20)
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 2
    assert lengths[-1] == 60
    assert panel.run_bar.status.text.startswith("1 run finished in ")
    assert not panel.run_bar.run.disabled
    assert [row[:2] for row in panel.runs.rows] == [["fake 1", "finished, measured"]]
    assert panel.runs.selected == 0
    assert panel.pictures.memory.figure["data"][0]["y"] == ["predicted", "measured"]
    assert panel.stale.text == ""


def test_results_go_stale_when_a_knob_moves_and_come_back_with_undo(make_panel):
    panel = make_panel()
    panel.run()
    assert panel.wait(20)
    panel.knobs["block_size"].value = 64
    assert "for other settings (block_size)" in panel.stale.text
    assert panel.pictures.memory.figure["data"][0]["y"] == ["predicted"]
    panel.knob_set.undo()
    assert panel.stale.text == ""


def test_cancel_keeps_what_was_measured_and_the_panel_goes_on(make_panel):
    session = FakeSession(pause_s=0.02, num_steps=2000)
    panel = make_panel(session)
    begun = threading.Event()
    panel.pictures.chart.observe(lambda _: begun.set(), "figure")
    panel.run()
    assert begun.wait(10)
    panel.run_bar.cancel.click()
    assert panel.wait(10)
    assert panel.run_bar.status.text.startswith("Cancelled; ")
    assert panel.runs.rows[0][1] == "cancelled, measured"
    assert len(session.records()[0].steps) > 0
    session._num_steps = 5
    panel.run()
    assert panel.wait(10)
    assert [row[1] for row in panel.runs.rows] == ["cancelled, measured", "finished, measured"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (WorkerError("the worker was killed (signal 9)", works="running again"), "killed (signal 9)"),
        (DoesNotFitError("out of memory", works="less", knob="cpu_memory_gib"), "out of memory"),
        (RuntimeError(f"boom {HOSTILE}"), "RuntimeError: boom"),
        (SystemExit(3), "SystemExit"),
    ],
)
def test_a_run_that_fails_leaves_the_panel_usable(make_panel, error, said):
    session = FakeSession()
    session.fail = error
    panel = make_panel(session)
    panel.run()
    assert panel.wait(10)
    assert said in panel.run_bar.status.text
    assert panel.run_bar.status.level == "bad"
    assert not panel.run_bar.run.disabled
    if isinstance(error, DoesNotFitError):
        assert "out of memory" in panel.knobs["cpu_memory_gib"].error
    session.fail = None
    panel.run()
    assert panel.wait(10)
    assert panel.run_bar.status.text.startswith("1 run finished in ")


def test_a_double_click_starts_one_run(make_panel):
    panel = make_panel(FakeSession(pause_s=0.01))
    panel.run_bar.run.click()
    panel.run_bar.run.click()
    panel.run()
    assert panel.wait(20)
    assert len(panel.session.records()) == 1


def test_a_sweep_runs_every_value(make_panel):
    panel = make_panel()
    panel.run_bar.sweep_text.value = "8, 32"
    panel.run_bar.sweep.click()
    assert panel.wait(20)
    assert [record.config.block_size for record in panel.session.records()] == [8, 32]
    assert panel.run_bar.status.text == "2 runs finished."
    assert panel.config.block_size == 16
    panel.pictures.tabs.value = "Throughput and latency"
    assert panel.pictures.chart.figure["data"][0]["x"] == ["8", "32"]


@pytest.mark.parametrize("text", ["", "8, zero", "0", ", ".join(["8"] * 99)])
def test_a_sweep_of_wrong_values_runs_nothing(make_panel, text):
    panel = make_panel()
    panel.run_bar.sweep_text.value = text
    panel.run_bar.sweep.click()
    assert panel.run_bar.status.level == "bad"
    assert panel.session.records() == ()


def test_the_baseline_is_a_third_bar_and_deltas_in_the_table(make_panel):
    panel = make_panel(FakeSession(records=sample_runs()))
    panel.choose("run-8")
    panel.run_bar.pin.click()
    assert panel.runs.pinned == [0]
    assert panel.pictures.memory.figure["data"][0]["y"][-1] == "baseline"
    assert "▲ +" in panel.runs.rows[1][2]
    panel.run_bar.pin.click()
    assert panel.runs.pinned == []


def test_a_click_on_a_point_chooses_its_run_and_a_row_does_too(make_panel):
    panel = make_panel(FakeSession(records=sample_runs()))
    panel.pictures.chart.clicked = {"run_id": "run-8", "count": 1}
    assert panel.runs.selected == 0
    panel.runs.selected = 2
    assert panel._chosen_id == "run-64"
    panel.pictures.chart.clicked = {"run_id": "no such run", "count": 2}
    assert panel.runs.selected == 2


@pytest.mark.parametrize("state", [name for name in state_records() if name != "none"])
def test_every_state_of_a_run_shows_in_every_tab(make_panel, state):
    panel = make_panel(FakeSession(records=[state_records()[state]]))
    for tab in panel.pictures.tabs.options:
        panel.pictures.tabs.value = tab
        assert panel.pictures.chart.figure["layout"]
        assert panel.pictures.caption.text


def test_the_command_is_shown_with_plain_flags(make_panel):
    panel = make_panel()
    panel.knobs["block_size"].value = 32
    panel.run_bar.command.click()
    line = panel.run_bar.command_line
    assert line.copy.startswith("vllm serve ")
    assert "--block-size 32" in line.copy
    assert line.details.split() == line.copy.split()


def test_a_report_that_fails_says_why_and_one_that_works_says_where(make_panel, tmp_path):
    panel = make_panel()
    panel.run_bar.report.click()
    assert "cannot write a report" in panel.run_bar.command_line.text
    for make, said in ((lambda: tmp_path / "report.html", "report.html"), (lambda: 1 / 0, "ZeroDivisionError")):
        panel.session.report = make
        panel.report()
        for thread in [entry for entry in threading.enumerate() if entry.name == "labkit-report"]:
            thread.join(10)
        assert said in panel.run_bar.command_line.text


def test_theme_and_width_redraw(make_panel):
    panel = make_panel(FakeSession(records=sample_runs()))
    panel.pictures.tabs.value = "Requests"
    light = panel.pictures.chart.figure["layout"]["template"]["layout"]["font"]["color"]
    panel.screen.theme = "dark"
    assert panel.pictures.chart.figure["layout"]["template"]["layout"]["font"]["color"] != light
    assert panel.pictures.chart.figure["layout"]["yaxis"]["domain"] == [0.0, 1.0]
    panel.screen.narrow = True
    assert panel.pictures.chart.figure["layout"]["yaxis"]["domain"] != [0.0, 1.0]


def test_the_full_state_carries_what_was_last_drawn(make_panel):
    panel = make_panel()
    panel.knobs["cpu_memory_gib"].value = 4.0
    state = panel.pictures.memory.get_state()
    assert state["figure"] == panel.pictures.memory.figure
    assert sum(trace["x"][0] for trace in state["figure"]["data"]) == pytest.approx(4.0)


def test_a_card_has_utilization_and_says_where_runs_are(make_panel):
    panel = make_panel(FakeSession(gpu=sample_gpu(24.0)))
    assert "gpu_memory_utilization" not in make_panel().knobs
    assert "cpu_memory_gib" in panel.knobs
    assert "Runs are on this machine's CPU" in panel.note.text
    assert make_panel().note.text == ""
    assert panel.knobs["gpu_memory_utilization"].default_text == "vLLM: 0.92"


def test_hostile_names_stay_text(make_panel):
    panel = make_panel(FakeSession(model=sample_model(HOSTILE), records=[state_records()["hostile"]]))
    assert "\x1b" not in panel.answer.heading
    assert "\u202e" not in panel.answer.heading
    assert "<img" in panel.runs.rows[0][0]
    assert "<img" not in str(panel.pictures.memory.figure)


def test_no_widget_of_labkit_takes_html():
    """Text goes in as textContent; `HTML` and `innerHTML` would make markup of it."""
    folder = ROOT / "labkit"
    markup = re.compile(r"\bHTML\(|HTMLMath\(|innerHTML|insertAdjacentHTML|outerHTML|document\.write")
    for path in [*folder.rglob("*.py"), *folder.rglob("*.js")]:
        if "report" not in path.parts:
            assert not markup.search(path.read_text()), path
    ipywidgets_with_html = re.compile(r"description_allow_html\s*=\s*True")
    assert not any(ipywidgets_with_html.search(path.read_text()) for path in folder.rglob("*.py"))


def test_a_long_log_is_cut():
    line = TextLine()
    line.say("x" * 9000, details="\n".join(["y" * 9000] * 900))
    assert len(line.text) <= 2000
    assert len(line.details) <= 60 * 301


def test_closing_takes_every_widget_of_the_panel_and_no_other(make_panel):
    panel, other = make_panel(), make_panel()
    panel.close_parts()
    assert panel.comm is panel.answer.comm is panel.knobs["block_size"].comm is panel.pictures.chart.comm is None
    assert other.answer.comm is not None


def test_a_preset_is_one_step_of_undo_and_keeps_what_it_does_not_name(make_panel):
    panel = make_panel(config=EngineConfig(block_size=32))
    panel.knob_set.presets.value = "chat"
    assert (panel.config.max_model_len, panel.config.block_size) == (8192, 32)
    panel.knob_set.undo()
    assert panel.config == EngineConfig(block_size=32)


def test_settings_as_text_make_the_same_panel(make_panel):
    panel = make_panel(config=EngineConfig(block_size=32, enforce_eager=True))
    panel.run_bar.settings.click()
    command = "labkit panel 'block_size=32 enforce_eager=on' --model=SmolLM2-135M-Instruct --gpu=cpu"
    assert panel.run_bar.command_line.copy == f"{command} --workload=azure-conv"
    again = Panel.from_text(FakeSession(), panel.run_bar.command_line.copy)
    again.settle()
    assert again.config == panel.config
    # The sample's traffic is no trace of labkit, and has no cuts.
    assert "it lacks the folder of azure-conv:" in panel.run_bar.command_line.text
    panel.session.workload = SimpleNamespace(name="azure-2023-conv", steps=("the first 12 requests",))
    panel.show_settings()
    assert "it lacks the traffic's cuts (the first 12 requests):" in panel.run_bar.command_line.text


def test_the_chosen_run_is_compared_with_the_baseline(make_panel):
    panel = make_panel(FakeSession(records=sample_runs()))
    assert panel.compared.text == ""
    panel.choose("run-8")
    panel.pin()
    panel.choose("run-64")
    assert panel.compared.text.startswith(
        "block 64 (measured) against block 8 (measured): block_size 8 → 64; output +18 %"
    )
    assert panel.compared_table.rows[0] == ["block_size", "8", "64", ""]


@pytest.mark.parametrize(("states", "bars"), [(["cancelled"], ["predicted"]),
                                              (["finished", "cancelled"], ["predicted", "measured"])])  # fmt: skip
def test_the_measured_bar_is_that_of_the_last_run_that_was_measured(make_panel, states, bars):
    records = [state_records()[state] for state in states]
    panel = make_panel(FakeSession(gpu=records[0].gpu, records=records))
    assert panel.pictures.memory.figure["data"][0]["y"] == bars


def test_moving_several_knobs_is_one_change(make_panel):
    panel = make_panel()
    configs = []
    panel.knob_set._on_change = configs.append
    panel.knob_set.set(block_size=32, enforce_eager=True, max_num_seqs=8)
    assert configs == [EngineConfig(block_size=32, enforce_eager=True, max_num_seqs=8)]
    panel.knob_set.undo()
    assert configs[-1] == EngineConfig()
    assert len(configs) == 2


def test_steps_to_count_are_asked_for_on_a_card_only(make_panel):
    panel = make_panel()
    assert panel.session.counted_steps == 0
    bar = panel.run_bar.view().children[0]
    assert panel.run_bar.counted_steps not in bar.children
    session = FakeSession()
    session.runs_on_card = True
    on_card = make_panel(session)
    assert on_card.session.counted_steps == on_card.run_bar.counted_steps.value == 3
    on_card.run_bar.counted_steps.value = 5
    assert on_card.session.counted_steps == 5


def test_the_last_runs_hit_rate_stands_with_bandwidth_and_method(make_panel):
    on_cpu = make_panel()
    on_cpu.run()
    assert on_cpu.wait(20)
    assert "L2" not in on_cpu.run_bar.status.text, "the counters are of a card that the run did not use"
    panel = make_panel(FakeSession(gpu=sample_gpu(24.0)))
    panel.run()
    assert panel.wait(20)
    assert "L2 hit rate 41 % at 180 GB/s from DRAM: simulated" in panel.run_bar.status.text


def test_an_error_names_its_section_of_the_docs(make_panel):
    panel = make_panel()
    panel.session.plan_error = UnsupportedError("block 24 is not supported", works="16 or 32", knob="block_size")
    panel.knobs["block_size"].value = 24
    assert panel.answer.details == "docs/errors.md#unsupportederror"
    panel.session.plan_error = None
    panel.session.fail = WorkerError("the worker was killed (signal 9)", works="running again")
    panel.run()
    assert panel.wait(10)
    assert panel.run_bar.status.details.endswith("explained in docs/errors.md#workererror")


def test_a_step_that_changes_nothing_is_not_offered(make_panel):
    # On a CPU the automatic dtype becomes float32, whose lower neighbour in the list is "auto" again.
    panel = make_panel()
    panel.settle()
    assert panel.knobs["dtype"].can_step == {"down": False, "up": True}
    assert not any(line.startswith("▼") for line in panel.knobs["dtype"].gains)
