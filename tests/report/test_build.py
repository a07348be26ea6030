"""The page: one file, deterministic, in order, accessible, with all data inside."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import json
import re
from html.parser import HTMLParser

import pytest
from samples import sample_plan, sample_record, sample_runs

from labkit.advice import recommend
from labkit.doctor.check import Check, Examination
from labkit.errors import FileFormatError
from labkit.experiments.serialise import dumps, record_from_plain
from labkit.report import Notice, build_report, report_file_name, write_report
from labkit.report.build import _together
from labkit.report.figure_sections import script_json
from labkit.specs.engine_config import EngineConfig

CREATED = "2026-11-30T12:00:00Z"
SECTIONS = ("answer", "command", "why", "evidence", "method", "data")
FIGURES = ("memory", "throughput", "latency", "pareto", "kv", "blocks", "requests", "l2")
VOID = {"meta", "br", "img", "input", "link", "hr"}


class Page(HTMLParser):
    """Elements with attributes in order, text by element, and whether tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.unbalanced: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data):
        if self.open and data.strip():
            self.texts.append((self.open[-1], data.strip()))

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


def records():
    return [
        sample_record(EngineConfig(block_size=size), run_id=f"r{size}", name=f"block {size}", slowness=slow)
        for size, slow in ((16, 1.0), (8, 1.3), (32, 0.7))
    ]


@pytest.fixture(scope="module")
def text() -> str:
    runs = records()
    return build_report(runs, [], recommend([], runs, what_if=sample_plan), created=CREATED)


@pytest.fixture(scope="module")
def page(text) -> Page:
    return Page(text)


def test_equal_input_gives_equal_bytes_and_the_clock_is_not_asked(text, monkeypatch):
    import time

    monkeypatch.setattr(time, "time", lambda: 0.0)
    runs = records()
    assert build_report(runs, [], recommend([], runs, what_if=sample_plan), created=CREATED) == text


def test_tags_are_balanced_and_ids_are_unique(page):
    assert page.unbalanced == []
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_sections_stand_in_order_and_each_link_has_its_target(page):
    sections = [attributes["id"] for attributes in page.all("section")]
    assert tuple(sections) == SECTIONS
    ids = {attributes.get("id") for _, attributes in page.elements}
    for link in page.all("a"):
        assert link["href"][0] == "#"
        assert link["href"][1:] in ids


def test_headings_go_down_one_level_at_a_time(page):
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(below - above <= 1 for above, below in itertools.pairwise(levels))


def test_language_title_and_skip_link(page):
    assert page.all("html")[0]["lang"] == "en"
    title = next(text for tag, text in page.texts if tag == "title")
    assert title == f"labkit report: SmolLM2-135M-Instruct on L4, {CREATED}"
    first_link = page.all("a")[0]
    assert (first_link["class"], first_link["href"]) == ("skip", "#answer")


def test_the_first_sentence_is_the_answer_with_limit_knob_and_gain(page):
    paragraphs = [text for tag, text in page.texts if tag == "p"]
    assert paragraphs[1].startswith("Set block_size 16 → 32: +")
    assert "KV blocks bind" in paragraphs[2]
    assert "Next: store the KV cache in fp8, at most +" in paragraphs[2]


def test_the_policy_names_exactly_the_two_scripts_of_the_page(text):
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)[1].replace("&#39;", "'")
    scripts = re.findall(r"<script>(.*?)</script>", text, re.S)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(scripts) == 2
    assert policy.startswith("default-src 'none'; ")
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes
    script_policy = re.search(r"script-src ([^;]+)", policy)[1]
    assert "unsafe" not in script_policy
    assert "http" not in policy.replace("http-equiv", "")


def test_plotly_is_inside_once_and_nothing_is_loaded(text, page):
    assert text.count("plotly.js v4") == 1
    loading = [(tag, name) for tag, attributes in page.elements for name in attributes if name in ("src", "href")]
    assert {tag for tag, name in loading} <= {"a"}
    assert not [tag for tag, _ in page.elements if tag in ("iframe", "img", "link", "object", "embed", "base", "form")]


def test_every_figure_has_a_sentence_a_table_and_both_themes(text, page):
    plots = [attributes["data-plot"] for attributes in page.all("div") if "data-plot" in attributes]
    assert tuple(plots) == FIGURES
    captions = [text for tag, text in page.texts if tag == "figcaption"]
    assert len(captions) == len(plots)
    assert all(caption.endswith(".") for caption in captions)
    assert len(re.findall(r'<details class="data-table">\s*<summary>.*?</summary>\s*<div.*?<table>', text, re.S)) == 8
    for name in FIGURES:
        for theme in ("light", "dark"):
            figure = json.loads(re.search(rf'id="{theme}-{name}">(.*?)</script>', text, re.S)[1])
            assert figure["data"]


def test_tables_have_captions_and_header_cells_with_a_scope(page):
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(attributes.get("scope") in ("row", "col") for attributes in page.all("th"))


def test_controls_and_figures_have_names(page):
    assert all(attributes.get("aria-label") for attributes in page.all("div") if attributes.get("role") == "img")
    assert all(attributes.get("aria-label") for attributes in page.all("div") if attributes.get("role") == "region")
    assert len([text for tag, text in page.texts if tag == "button"]) == len(page.all("button"))


def test_all_runs_come_back_from_the_page(text):
    data = json.loads(re.search(r'id="labkit-data">(.*?)</script', text, re.S)[1])
    assert (data["format"], data["version"], data["created"]) == ("labkit-report", 1, CREATED)
    came_back = [record_from_plain(run) for run in data["runs"]]
    assert [dumps(run) for run in came_back] == [dumps(run) for run in records()]


def test_the_shown_python_reads_the_data(text, tmp_path):
    path = tmp_path / "tuning-report.html"
    path.write_text(text, encoding="utf-8")
    blocks = [block for tag, block in Page(text).texts if tag == "code" and "Session" not in block]
    code = next(block for block in blocks if block.startswith("import json"))
    scope: dict = {}
    exec(code.replace("tuning-report.html", str(path)), scope)
    assert len(scope["data"]["runs"]) == 3


def test_method_states_versions_seeds_and_code_to_reproduce(text, page):
    words = " ".join(text for _, text in page.texts)
    for part in ("torch", "2.13.0", "engine 0, traffic 0", "each configuration ran once"):
        assert part in words


def test_the_code_to_reproduce_runs_the_same_settings_on_the_same_traffic(text, tmp_path, monkeypatch):
    asked = {}

    class Session:
        def __init__(self, **options):
            asked.update(options)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def run(self, config):
            asked["config"] = config

    monkeypatch.setattr("labkit.Session", Session, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tuning-report.html").write_text(text, encoding="utf-8")
    code = next(block for tag, block in Page(text).texts if tag == "code" and "labkit.Session" in block)
    exec(compile(code, "report", "exec"), {})
    best = records()[2]
    assert asked["config"] == best.config
    assert (asked["model"], asked["gpu"]) == (best.model.name, best.gpu.name)
    offered = [(row.arrival_s, row.input_tokens, row.output_tokens) for row in asked["workload"].requests]
    assert offered == [(row.arrival_s, row.input_tokens, row.output_tokens) for row in best.requests]


def test_a_long_table_is_cut_with_a_word_but_the_data_is_whole():
    record = sample_record(num_requests=100)
    text = build_report([record], [], recommend([], [record], what_if=sample_plan), created=CREATED)
    assert "the first 30 of 100 rows, all are in the data below" in text
    assert (
        len(json.loads(re.search(r'id="labkit-data">(.*?)</script', text, re.S)[1])["runs"][0]["record"]["requests"])
        == 100
    )


def test_notices_stand_above_the_answer():
    text = build_report(created=CREATED, notices=[Notice("2 runs have schema 9.", "Upgrade labkit to read them.")])
    assert text.index("2 runs have schema 9.") < text.index('id="answer"')


def test_script_json_cannot_leave_its_element():
    value = {"</script>": "<!--", "\u2028": "&", "\ud800": 1.5}
    made = script_json(value)
    assert json.loads(made) == value
    assert not set("<>&\u2028") & set(made)
    assert made.isascii()


def test_control_characters_are_taken_out_wherever_a_value_enters_the_page():
    """The last guard: a command made elsewhere, with an escape sequence and a line break of its own."""
    runs = records()
    chosen = dataclasses.replace(recommend([], runs, what_if=sample_plan), confidence="low\x1b[31m\u202e")
    text = build_report(runs, [], chosen, created=CREATED)
    assert "Confidence: low[31m." in text


def test_a_report_is_written_whole_or_not_at_all(tmp_path):
    path = write_report(tmp_path / "deep" / "r.html", created=CREATED)
    assert path.read_text(encoding="utf-8").endswith("</html>\n")
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileFormatError, match="cannot write"):
        write_report(tmp_path / "file" / "r.html", created=CREATED)


def test_the_file_name_says_what_it_is_about():
    assert report_file_name("HF/Smol LM2", "cpu", CREATED) == "labkit-report-HF-Smol-LM2-cpu-2026-11-30.html"
    assert report_file_name("../../etc", "", "") == "labkit-report-etc.html"


def test_the_machine_has_its_own_part_with_the_worst_first():
    found = Examination(
        "this machine",
        (
            Check("python", "ok", "3.11"),
            Check("shm", "problem", "64 MiB <b>", "the container's default", "docker run --ipc=host"),
        ),
    )
    page = build_report(created="2026-01-01T00:00:00Z", machine=found)
    part = page[page.index('id="machine"') : page.index('id="data"')]
    assert "1 problem" in part
    assert part.index("docker run --ipc=host") < part.index("3.11")
    assert "64 MiB &lt;b&gt;" in part
    assert 'id="machine"' not in build_report(created="2026-01-01T00:00:00Z")


@pytest.mark.parametrize(
    ("text", "together"),
    [
        ("155 ms / 244 ms", "155~ms~/ 244~ms"),
        ("21.0 GiB (87 %)", "21.0~GiB (87~%)"),
        ("133 tok/s, 3.35 TB/s", "133~tok/s, 3.35~TB/s"),
        ("16 sets of 8 requests", "16 sets of 8 requests"),
        ("<b>1 s</b>", "<b>1~s</b>"),
        ("", ""),
    ],
)
def test_no_line_ends_between_a_number_and_its_unit(text, together):
    assert _together(text) == together.replace("~", "\u00a0")
    assert type(_together(text)) is str, "it is escaped like any other text"


def test_runs_of_one_name_are_numbered_in_table_and_figures_and_kept_as_they_are_in_the_data():
    runs = [dataclasses.replace(record, name="vLLM defaults") for record in sample_runs()]
    page = build_report(runs, created="2026-01-01T00:00:00Z")
    shown, rest = page.split('id="labkit-data">')
    data, figures = rest.split("</script", 1)
    assert all(f"#{number} vLLM defaults" in shown for number in (1, 2, 3))
    assert "#2 vLLM defaults" in figures
    assert "#1 vLLM defaults" not in data
