"""Renders one chat template in a process of its own, within limits of time, memory and output.

A template comes with the model file and is a program: Jinja's immutable sandbox keeps it from Python's objects
(CVE-2024-34359), this process and its limits keep it from the machine's time and memory. Run as a script with a JSON
request on standard input; it imports nothing of labkit.
"""

from __future__ import annotations

import datetime
import json
import sys
from typing import Any

MAX_OUTPUT_CHARACTERS = 8 * 2**20
CPU_SECONDS = 5
MEMORY_BYTES = 768 * 2**20


def render(request: dict[str, Any]) -> str:
    """The text that `request["template"]` makes of `request["variables"]`.

    Raises:
        jinja2.TemplateError: the template is wrong, asks for what the sandbox refuses, or raises on purpose.
        ValueError: the output is over the limit.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise TemplateError(str(message))

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=options.get("indent"))

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.datetime.now().strftime(layout)
    pieces, length = [], 0
    for piece in environment.from_string(request["template"]).generate(**request["variables"]):
        length += len(piece)
        if length > MAX_OUTPUT_CHARACTERS:
            raise ValueError(f"the template wrote more than {MAX_OUTPUT_CHARACTERS} characters")
        pieces.append(piece)
    return "".join(pieces)


def _limit_process() -> None:
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Read the request, answer `{"text": …}` or `{"error": …}`."""
    request = json.loads(sys.stdin.buffer.read())
    _limit_process()
    try:
        answer = {"text": render(request)}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
    sys.stdout.buffer.write(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
