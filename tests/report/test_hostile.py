"""Text from outside stays text: 33 hostile names in every place of text give the page of a harmless one."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hostile_names import HOSTILE_NAMES, with_text_everywhere
from samples import sample_record

from labkit.advice import recommend
from labkit.report import Notice, build_report


class Shape(HTMLParser):
    """The elements of a page with the names of their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.values: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, tuple(name for name, _ in attrs)))
        self.values.extend(value or "" for name, value in attrs if name in ("href", "src", "style", "action"))


def page_with(text: str) -> str:
    record = with_text_everywhere(sample_record(num_steps=12, num_requests=3), text)
    failed = with_text_everywhere(sample_record(run_id="x", status="failed", num_steps=4, num_requests=2), text)
    chosen = recommend([], [record, failed], what_if=lambda config: record.plan)
    page = build_report(
        [record, failed], [record.plan], chosen, created=text, title=text, notices=[Notice(text, text)]
    )  # fmt: skip
    return re.sub(r"<script>/\*\*.*?</script>", "<script></script>", page, count=1, flags=re.S)


@pytest.fixture(scope="module")
def harmless() -> Shape:
    return Shape(page_with("harmless"))


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=range(len(HOSTILE_NAMES)))
def test_the_tree_is_that_of_a_harmless_name(name, harmless):
    text = page_with(name)
    shape = Shape(text)
    assert shape.elements == harmless.elements
    assert not [attribute for _, names in shape.elements for attribute in names if attribute.startswith("on")]
    assert not [value for value in shape.values if "script:" in value]
    visible = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", visible)
    text.encode()


def test_there_are_33_names_and_none_twice():
    assert len(set(HOSTILE_NAMES)) == 33
