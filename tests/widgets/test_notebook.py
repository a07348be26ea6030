"""Cells that take a while: their line of progress, and tables that read from the left."""

from __future__ import annotations

import pandas as pd
import pytest

from labkit.widgets import notebook
from labkit.widgets.parts import TextLine


@pytest.fixture
def shown(monkeypatch) -> list[TextLine]:
    lines: list[TextLine] = []
    monkeypatch.setattr(notebook, "display", lambda view: lines.append(view.children[1]))
    monkeypatch.setattr(notebook, "UPDATES_PER_S", 1e9)
    return lines


def test_progress_says_done_elapsed_and_left_and_gives_every_item(shown):
    seen = []
    for item in notebook.progress(range(4), 4, "cards"):
        seen.append((item, shown[0].text, shown[0].progress))
    assert [item for item, _, _ in seen] == [0, 1, 2, 3]
    assert seen[0][1].startswith("1 of 4 cards, ")
    assert seen[0][1].endswith(" left")
    assert [share for _, _, share in seen] == [0.25, 0.5, 0.75, 1.0]
    assert shown[0].text.startswith("4 cards in ")
    assert shown[0].progress is None


def test_a_broken_off_loop_and_an_empty_one_end_in_words(shown):
    broken = notebook.progress(iter([1, 2, 3]), 3)
    assert (next(broken), next(broken)) == (1, 2)
    broken.close()
    assert shown[0].text.startswith("2 rows in ")
    list(notebook.progress([], 0))
    assert shown[1].text.startswith("0 rows in ")


def test_a_table_of_words_reads_from_the_left_and_escapes_what_it_holds():
    frame = pd.DataFrame(
        [["a <b>", 0.123456, 1.0, None, 89648, True]], columns=["text", "rate", "cards", "gone", "n", "ok"]
    )
    html = notebook.text_table(frame).to_html()
    assert "text-align: left" in html
    assert "min-width" not in html
    assert "a &lt;b&gt;" in html
    assert [word in html for word in (">0.123<", ">1<", ">–<", ">89,648<", ">True<")] == [True] * 5


def test_only_a_column_of_long_texts_keeps_its_width_on_a_narrow_page():
    html = notebook.text_table(pd.DataFrame([["short", "word " * 20]], columns=["a", "b"])).to_html()
    assert ".col1 {" in html
    assert ".col0 {" not in html
    notebook.text_table(pd.DataFrame([], columns=["a"])).to_html()
