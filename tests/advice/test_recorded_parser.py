"""The recorded flags of vLLM 0.33.0 against its own parser, run once on a CPU (data/vllm-0.33.0-parser.json)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labkit.advice import flags_for

REAL = json.loads((Path(__file__).with_name("data") / "vllm-0.33.0-parser.json").read_text())["flags"]
# vLLM changes these lists while it builds the parser; the recorder reads the declarations.
CHANGED_AT_RUN_TIME = {
    "--all2all-backend", "--linear-backend", "--mm-processor-device", "--moe-backend", "--sparse-indexer-topk-backend",
    "--spec-method",
}  # fmt: skip
# Types that the recorder cannot see in the declaration: a function makes them.
TYPE_NOT_SEEN = {"--device-ids"}
NUMBER_TYPES = {"int": "int", "human_readable_int": "int", "human_readable_int_or_auto": "int", "float": "float"}


def test_the_names_are_the_same():
    assert set(flags_for("0.33.0")) == set(REAL)
    assert len(REAL) == 254


@pytest.mark.parametrize("name", sorted(REAL))
def test_each_flag_is_as_the_parser_has_it(name):
    recorded, real = flags_for("0.33.0")[name], REAL[name]
    assert (recorded.kind == "bool") == (real["kind"] == "bool")
    if real["type"] in NUMBER_TYPES and real["nargs"] is None and name not in TYPE_NOT_SEEN:
        assert recorded.kind == NUMBER_TYPES[real["type"]]
    if recorded.kind in ("int", "float") and name not in TYPE_NOT_SEEN:
        assert real["type"] in (*NUMBER_TYPES, "_optional_type", "_parse_type") or "int" in real["type"]
    if name not in CHANGED_AT_RUN_TIME:
        assert set(recorded.choices) - {None} == set(real["choices"] or ()) - {None}
    if recorded.default is not None:
        assert recorded.default == real["default"]
