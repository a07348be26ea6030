"""Chat templates run sandboxed and within limits."""

from __future__ import annotations

import psutil
import pytest

from labkit.errors import FileFormatError, OutOfRangeError
from labkit.models import chat, chat_sandbox
from labkit.models.chat import ControlTokens, render_chat_template


def test_features_that_published_templates_use():
    template = (
        "{%- for m in messages %}\n    {%- if loop.first %}{% continue %}{% endif %}\n"
        "{%- generation %}{{ m['content'] | trim }}{% endgeneration %}{{ {'ä': [1]} | tojson }}{%- endfor %}"
        "{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ strftime_now('%Y')[:2] }}{{ bos_token }}"
    )
    messages = [{"content": "a"}, {"content": " b "}]
    assert render_chat_template(template, {"messages": messages, "bos_token": "<s>"}) == 'b{"ä": [1]}220<s>'


# CVE-2024-34359, CVE-2024-56326, CVE-2025-27516, CVE-2026-5760: ways out of a template.
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('touch {path}').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ ('{0.__class__.__init__.__globals__}').format(cycler) }}",
    "{{ 'x' | attr('format') }}{{ ('%s' | attr('__class__')).__mro__ }}",
    "{% set f = '{0.__class__}'.format %}{{ f(1) }}{{ messages.append(1) }}",
    "{{ [f for f in range(9)] }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_ways_out_of_the_sandbox(template, tmp_path):
    target = tmp_path / "touched"
    with pytest.raises(FileFormatError, match="chat template"):
        render_chat_template(template.replace("{path}", str(target)), {"messages": []})
    assert not target.exists()


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{% for", "failed"),
        ("{{ nothing.at.all }}", "failed"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "more than 8388608 characters"),
        ("{{ 'x' * (2**31) }}", "failed|stopped"),
        ("{{ range(10**9) | list | length }}", "failed|stopped"),
        ("{% include '/etc/passwd' %}", "failed"),
    ],
)
def test_templates_that_fail_say_so(template, part):
    with pytest.raises(FileFormatError, match=part):
        render_chat_template(template, {"messages": []})


def test_an_endless_template_is_stopped_and_leaves_no_process(monkeypatch):
    monkeypatch.setattr(chat, "_WALL_SECONDS", 2)
    loop = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
    with pytest.raises(FileFormatError, match="stopped"):
        render_chat_template(loop, {"messages": []})
    assert not [child for child in psutil.Process().children() if "chat_sandbox" in " ".join(child.cmdline())]


def test_limits_of_the_request(monkeypatch):
    with pytest.raises(OutOfRangeError, match="template is too long"):
        render_chat_template("x" * (chat.MAX_TEMPLATE_CHARACTERS + 1), {})
    monkeypatch.setattr(chat, "MAX_REQUEST_BYTES", 100)
    with pytest.raises(OutOfRangeError, match="messages are too long"):
        render_chat_template("x", {"messages": "y" * 100})


def test_variables_cannot_replace_the_sandbox():
    assert render_chat_template("{{ range }}", {"range": 5}) == "5"


def test_output_limit_is_on_the_whole():
    assert len(chat_sandbox.render({"template": "{{ 'x' * 1000 }}", "variables": {}})) == 1000


def test_control_tokens_overlapping_in_text():
    control = ControlTokens({"<a>": 1, "a><a": 2, "": 3})
    marker = control.pick_marker(["text"])
    for text in ("<a><a>", "<<a>a>", "<a", "a><a>", "plain"):
        broken = control.broken({"deep": [text]}, marker)["deep"][0]
        assert control.split(broken, marker) == [text]
    assert control.split("x<a>y", marker) == ["x", 1, "y"]
    assert ControlTokens({}).split("text", marker) == ["text"]
