"""The flags that a log states: the engine's configuration line, the arguments line, a command line."""

from __future__ import annotations

import re
from typing import Any

from labkit.errors import LabkitError
from labkit.specs.engine_config import EngineConfig, Knob
from labkit.specs.knob_text import parse_size
from labkit.text import plain

# Names in "config: …" and "args: Namespace(…)" lines that differ from the knobs'.
_OTHER_NAMES = {
    "max_seq_len": "max_model_len", "chunked_prefill_enabled": "enable_chunked_prefill",
    "tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size",
    "device_memory_utilization": "gpu_memory_utilization",
}  # fmt: skip
_PAIR = re.compile(r"['\"]?\b([a-z_]{2,40})['\"]?[=:] ?['\"]?([A-Za-z0-9_.,+-]{1,80})")
_OPTION = re.compile(r"--?([A-Za-z-]{2,48})(?:[= ]([^\s'\",\\-][^\s'\",\\]{0,119}))?")
_MODEL = re.compile(r"model(?:_tag)?['\"]?[=:] ?['\"]([^'\"\s]{1,200})['\"]")
_SERVE = re.compile(r"vllm serve ([^\s-][^\s]{0,199})")
_SKIPPED = frozenset({"load_format", "swap_space", "cpu_memory_gib", "preemption_mode", "data_parallel_size"})
_SHORT = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"}


def config_flags(line: str) -> dict[str, Any]:
    """Knobs in a line that prints the engine's configuration or its arguments."""
    if "config:" not in line and "Namespace(" not in line and "non-default args" not in line:
        return {}
    return _knobs((name, value) for name, value in _PAIR.findall(line))


def command_flags(line: str) -> dict[str, Any]:
    """Knobs in a command line (`vllm serve …`, `python -m vllm…`)."""
    if "vllm serve" not in line and "vllm.entrypoints" not in line:
        return {}
    pairs = []
    for option, value in _OPTION.findall(line):
        name = option.replace("-", "_")
        if name.startswith("no_"):
            pairs.append((name.removeprefix("no_"), "False"))
        else:
            pairs.append((name, value if value and not value.startswith("--") else "True"))
    return _knobs(iter(pairs))


def model_name(line: str) -> str | None:
    """The model's name in such a line."""
    if "config:" in line or "Namespace(" in line or "non-default args" in line:
        found = _MODEL.search(line)
        return plain(found.group(1), 200) if found else None
    found = _SERVE.search(line)
    return plain(found.group(1), 200) if found else None


def _knobs(pairs: Any) -> dict[str, Any]:
    known = {knob.name: knob for knob in EngineConfig.knobs() if knob.name not in _SKIPPED}
    flags: dict[str, Any] = {}
    for raw_name, text in pairs:
        name = _OTHER_NAMES.get(raw_name, _SHORT.get(raw_name, raw_name))
        if name in known and name not in flags:
            value = _value(known[name], text)
            if value is not None:
                flags[name] = value
    return flags


def _value(knob: Knob, text: str) -> Any:
    text = text.strip(",").removeprefix("torch.")
    if text in ("None", ""):
        return None
    if knob.kind is bool:
        return {"true": True, "false": False}.get(text.lower())
    if knob.name == "dtype" and text in ("half", "float"):
        text = {"half": "float16", "float": "float32"}[text]
    try:
        return knob.check(parse_size(text) if knob.kind in (int, float) else text)
    except (LabkitError, ValueError):
        return None
