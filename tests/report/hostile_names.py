"""33 hostile names: markup, attributes, scripts, templates, control and bidirectional characters, shells, formats."""

from __future__ import annotations

HOSTILE_NAMES = (
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "</title><script>alert(1)</script>",
    "</style><script>alert(1)</script>",
    "</textarea></pre></code><img src=x onerror=alert(1)>",
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "<svg><script href=data:,alert(1) />",
    "\" onmouseover=\"alert(1)",
    "' onfocus='alert(1)' autofocus='",
    "\"><iframe src=javascript:alert(1)>",
    "javascript:alert(1)",
    "<a href=\"javascript:alert(1)\">x</a>",
    "<base href=https://evil.example/>",
    "<meta http-equiv=refresh content='0;url=https://evil.example/'>",
    "<link rel=stylesheet href=https://evil.example/x.css>",
    "<style>*{display:none}</style>",
    "<!--",
    "--><script>alert(1)</script>",
    "<![CDATA[<script>alert(1)</script>]]>",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "&#60;img src=x onerror=alert(1)&#62;",
    "{{ 7 * 7 }}{% raw %}{{ config }}",
    "${7*7} %{x} $\\alpha$ %(x)s {x!r}",
    "\x1b[31mred\x1b]8;;https://evil.example\x07link",
    "\u202egnp.exe\u2066\u2069",
    "a\x00b\x08c\x7f\x9b31m",
    "line one\r\nSet-Cookie: x=1\u2028line two",
    "<b onclick=alert(1)>bold</b><br><sub>x</sub>",
    "'; DROP TABLE runs; --",
    "$(touch pwned)`touch pwned`;touch pwned|x",
    "\ud800<script>alert(1)</script>",
    "<details open ontoggle=alert(1)>" + "A" * 3000,
)  # fmt: skip


def with_text_everywhere(record, text: str):
    """`record` with `text` in every place of text that comes from outside."""
    import dataclasses

    from labkit.measure.run_record import Counters

    model = record.model.replace(name=text, source=text, notes=(text,))
    gpu = dataclasses.replace(record.gpu, name=text)
    config = record.config.replace(quantization=text)
    plan = dataclasses.replace(
        record.plan, model=model, gpu=gpu, config=config, engine=text, engine_version=text, binding_limit=text,
        formulas={"weights": text, text: text}, notes=(text,), details={text: text},
    )  # fmt: skip
    requests = tuple(dataclasses.replace(row, finish_reason=text if index else "length")
                     for index, row in enumerate(record.requests))  # fmt: skip
    return dataclasses.replace(
        record, name=text, created=text, config=config, model=model, gpu=gpu, plan=plan, requests=requests,
        workload={"name": text, "source": text, "licence": text, "steps": [text], "seed": 0, "num_requests": 3},
        counters=Counters(f"simulated ({text})", text, 0.4, 1e9, 1e9, 1.0), versions={text: text}, error=text,
        note=text,
    )  # fmt: skip
