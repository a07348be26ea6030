"""Empty and partial states: every section stands, and says in words what is missing and what to do."""

from __future__ import annotations

import dataclasses
import re

import pytest
from samples import sample_gpu, sample_plan, sample_record

from labkit.advice import recommend
from labkit.report import Notice, build_report
from labkit.specs.engine_config import EngineConfig

CREATED = "2026-11-30T12:00:00Z"
SECTIONS = ("answer", "command", "why", "evidence", "method", "data")


def report(records=(), plans=(), **keywords) -> str:
    chosen = recommend(plans, records, what_if=sample_plan) if records or plans else None
    text = build_report(records, plans, chosen, created=CREATED, **keywords)
    return re.sub(r"<script.*?</script>", "", text, flags=re.S)


def never_started(status: str, error: str = ""):
    return sample_record(
        status=status, num_steps=0, num_requests=0, error=error, counters=None, measured=None, duration_s=0.0
    )


STATES = {
    "nothing": ((), (), ["There is no plan and no run", "labkit tune", "There is no plan. Make one"]),
    "plan only": ((), ("plan",), ["Planned, not run: fits", "Nothing ran. What is shown is planned", "--block-size"]),
    "one run": (("finished",), (), ["One configuration ran", "nothing to compare"]),
    "interrupted": (("unfinished",), (), ["The process ended in the middle of the run; 120 steps were kept"]),
    "cancelled": (("cancelled",), (), ["Cancelled by the user; 120 steps were kept"]),
    "still running": (("running",), (), ["Still running when the report was made"]),
    "failed": (("failed",), (), ["Failed: no cause was recorded", "labkit run with the same settings"]),
    "failed before its first step": (
        ("failed early",), (), ["it ended before its first step", "The run has no steps", "No run has given a token"],
    ),
    "out of memory": (("oom",), (), ["Out of memory (CUDA out of memory", "lower gpu_memory_utilization"]),
    "no GPU": (("cpu",), (), ["labkit’s engine on a CPU", "times do not carry over"]),
    "does not fit": ((), ("too long",), ["Does not fit: KV blocks bind", "fits then", "verdict"]),
}  # fmt: skip


def made(kind: str):
    return {
        "finished": lambda: sample_record(),
        "unfinished": lambda: sample_record(status="unfinished"),
        "cancelled": lambda: sample_record(status="cancelled"),
        "running": lambda: sample_record(status="running"),
        "failed": lambda: sample_record(status="failed"),
        "failed early": lambda: never_started("failed", "worker killed by signal 9"),
        "oom": lambda: never_started("failed", "CUDA out of memory. Tried to allocate 2.00 GiB."),
        "cpu": lambda: sample_record(EngineConfig(cpu_memory_gib=1.0), gpu=sample_gpu(name="cpu"), counters=None),
        "plan": lambda: sample_plan(EngineConfig(block_size=32)),
        "too long": lambda: sample_plan(EngineConfig(max_model_len=8192, num_gpu_blocks_override=100)),
    }[kind]()


@pytest.mark.parametrize("state", STATES)
def test_every_section_renders_or_says_why_not(state):
    runs, plans, sentences = STATES[state]
    text = report([made(kind) for kind in runs], [made(kind) for kind in plans])
    assert re.findall(r'<section id="(\w+)"', text) == list(SECTIONS)
    for section in re.split(r"<section ", text)[1:]:
        words = re.sub(r"<[^>]+>", " ", section.split(">", 1)[1])
        assert len(words.split()) > 8, "a section is never only a heading"
    for anchor in ("memory", "throughput", "latency", "pareto", "kv", "blocks", "requests", "l2"):
        part = text.split(f'<h3 id="{anchor}">')[1].split("<h3")[0]
        assert ("<figcaption>" in part) != ('class="missing"' in part)
    for sentence in sentences:
        assert sentence in text
    assert "Traceback" not in text
    assert "None" not in re.sub(r"<[^>]+>", " ", text)
    assert not re.search(r"\bnan\b", text)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("plan only", ["Planned, not run: fits", "KV blocks bind", "Next: store the KV cache in fp8, at most +"]),
        ("one run", ["One configuration ran", "KV blocks bind", "Next: store the KV cache in fp8, at most +"]),
        ("no GPU", ["One configuration ran", "KV blocks bind", "Next: store the KV cache in fp8, at most +"]),
        ("interrupted", ["No run finished; planned: fits", "KV blocks bind", "Next: store", "no run finished."]),
        ("out of memory", ["No run finished; planned: fits", "KV blocks bind", "Next: store", "no run finished."]),
        ("does not fit", ["Does not fit: KV blocks bind", "fits then", "Fits: 21.0 GiB", "Next: "]),
    ],
)
def test_the_first_words_are_the_answer_with_limit_change_and_gain(state, words):
    runs, plans, _ = STATES[state]
    answer = report([made(kind) for kind in runs], [made(kind) for kind in plans])
    answer = answer.split('<section id="answer"')[1].split("</section>")[0].replace("\u00a0", " ")
    answer = re.sub(r"<[^>]+>", " ", answer)
    places = [answer.find(word) for word in words]
    assert -1 not in places
    assert places == sorted(places)


def test_runs_that_did_not_finish_are_not_compared_with_those_that_did():
    good, bad = sample_record(), sample_record(run_id="bad", name="cut short", status="cancelled")
    text = report([good, bad])
    assert "Runs that did not finish are left out of the comparisons below." in text
    throughput = text.split('<h3 id="throughput">')[1].split("<h3")[0]
    assert "cut short" not in throughput


def test_what_the_user_cancelled_is_not_called_out_of_memory():
    text = report([sample_record(status="cancelled", error="out of memory was near")])
    assert "Cancelled by the user" in text
    assert "Out of memory (" not in text


def test_runs_of_another_schema_are_named_with_the_next_step():
    notice = Notice("2 runs in the store were written by a newer labkit (schema 9).", "Upgrade labkit to read them.")
    text = report([sample_record()], notices=[notice])
    assert notice.cause in text
    assert notice.next_step in text


def test_a_run_on_no_measured_memory_still_shows_the_predicted_bar():
    text = report([dataclasses.replace(sample_record(), measured=None, counters=None, block_map=())])
    memory = text.split('<h3 id="memory">')[1].split("<h3")[0]
    assert "Predicted: the largest part of 24.0 GiB" in memory
    assert "The run recorded no block map" in text
    assert "No run has counters" in text


def test_a_command_that_cannot_start_says_so():
    gpu = sample_gpu(0.2)
    plan = sample_plan(gpu=gpu)
    assert plan.verdict == "does not fit"
    chosen = recommend([plan], [], what_if=lambda config: sample_plan(config, gpu=gpu))
    page = build_report([], [plan], chosen, created=CREATED)
    assert "These settings do not fit." in page.split('<section id="command"')[1].split("</section>")[0]
    fits = report([], [sample_plan()]).split('<section id="command"')[1].split("</section>")[0]
    assert "do not fit" not in fits
