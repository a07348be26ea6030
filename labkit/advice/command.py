"""Settings as commands: `vllm serve`, docker and Compose, with only the flags of the named vLLM version."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.advice.flags import (
    Flag,
    check_command,
    effective_default,
    flag_history,
    flags_for,
    recorded_version,
    version_tuple,
)
from labkit.errors import OutOfRangeError
from labkit.memory.records import MemoryPlan
from labkit.memory.resolve import open_config
from labkit.memory.rules import vllm_rules
from labkit.specs.engine_config import EngineConfig, Knob
from labkit.text import plain

DEFAULT_VERSION = "0.33.0"
FORMS = ("serve", "docker", "compose")
_IMAGE = "vllm/vllm-openai"
# Knobs that describe how the lab measures, not how a server should run.
_LAB_ONLY = {
    "load_format": "random weights are for measuring only",
    "cpu_memory_gib": "it stands in for a card's memory in the lab; on a GPU the card's own total applies",
}


@dataclass(frozen=True)
class NotExported:
    """A knob that the command cannot carry: why, and the nearest thing with how it differs."""

    knob: str
    value: str
    reason: str


@dataclass(frozen=True)
class ExportedCommand:
    """One configuration as commands for one vLLM version.

    Attributes:
        version: as asked for; `recorded` is the recorded parser that it was checked against.
        words: the words of `vllm serve`, unquoted.
        serve, docker, compose: ready to paste, each on as many lines as it has flags.
        comments: one line for each flag that is given, what it was and why; then warnings.
        not_exported: what has no equivalent.
    """

    version: str
    recorded: str
    words: tuple[str, ...]
    serve: str
    docker: str
    compose: str
    comments: tuple[str, ...]
    not_exported: tuple[NotExported, ...]

    def text(self, form: str = "serve") -> str:
        """Comments and the command as "serve", "docker" or "compose", for a terminal or a file.

        Raises:
            OutOfRangeError: another form.
        """
        if form not in FORMS:
            raise OutOfRangeError(f"there is no form {plain(form, 40)!r}", works=", ".join(FORMS), knob="--as")
        lines = [f"# {line}" for line in self.comments]
        lines += [f"# not exported: {item.knob} {item.value}: {item.reason}" for item in self.not_exported]
        return "\n".join([*lines, getattr(self, form).rstrip("\n")]) + "\n"


def vllm_command(model: str, config: EngineConfig, version: str = DEFAULT_VERSION) -> str:
    """The `vllm serve` command for `config`: plain numbers, only flags that differ from that version's defaults.

    Raises:
        OutOfRangeError: `version` is no version.
    """
    return export_command(model, config, version).serve


def export_command(
    model: str,
    config: EngineConfig,
    version: str = DEFAULT_VERSION,
    *,
    reasons: Mapping[str, str] | None = None,
    port: int = 8000,
) -> ExportedCommand:
    """`config` as commands for vLLM `version`.

    Args:
        model: hub id or folder; a folder that exists is mounted into the container.
        reasons: knob → why it has its value, for the comments; the knob's own help where it is missing.
        port: of the server on the host.

    Raises:
        OutOfRangeError: `version` is no version, or `port` is none.
    """
    if not 0 < int(port) < 65536:
        raise OutOfRangeError(f"port cannot be {port}", works="1 to 65535", knob="port")
    recorded, note = recorded_version(version)
    flags = flags_for(version)
    pairs: list[tuple[str, ...]] = []
    comments = [f"for vLLM {plain(version, 40)}"] + ([note] if note else [])
    left_out: list[NotExported] = []
    for knob in EngineConfig.knobs():
        value = getattr(config, knob.name)
        reason = _unexportable(knob, value, version, flags)
        if reason:
            left_out.append(NotExported(knob.name, _plain_value(value), reason))
        elif _differs(knob, value, version):
            pairs.append(_words(flags[knob.flag or ""], value))
            comments.append(_comment(knob, value, version, reasons or {}))
    name = plain(model, 4096)
    name = f"./{name}" if name.startswith("-") else name
    words = ("vllm", "serve", name, *(word for pair in pairs for word in pair))
    comments.extend(check_command(words, version))
    num_gpus = config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size
    return ExportedCommand(
        version=version,
        recorded=recorded,
        words=words,
        serve=_joined([("vllm", "serve", name), *pairs]),
        docker=_docker(name, pairs, version, num_gpus, port),
        compose=_compose(name, pairs, version, num_gpus, port),
        comments=tuple(comments),
        not_exported=tuple(left_out),
    )


def export_plan(
    plan: MemoryPlan, version: str = DEFAULT_VERSION, *, reasons: Mapping[str, str] | None = None, port: int = 8000
) -> ExportedCommand:
    """The settings of a plan as commands; what the model, the card or the CPU engine chose itself stays unsaid.

    Raises:
        OutOfRangeError: as `export_command`.
    """
    rules = None if plan.gpu.is_cpu else vllm_rules(version)
    config, own = open_config(plan.model, plan.gpu, plan.config, rules), []
    if plan.gpu.is_cpu and config.dtype == "float32":
        own.append(NotExported("dtype", "float32", "the CPU engine computes in it; a card keeps the model's own type"))
        config = config.replace(dtype="auto")
    exported = export_command(plan.model.name, config, version, reasons=reasons, port=port)
    return dataclasses.replace(exported, not_exported=(*own, *exported.not_exported))


def _unexportable(knob: Knob, value: Any, version: str, flags: Mapping[str, Flag]) -> str:
    """Why `value` cannot be carried by a flag of `version`; "" when it can or need not be."""
    if value is None or value == knob_default(knob.name):
        return ""
    if knob.name in _LAB_ONLY:
        return _LAB_ONLY[knob.name]
    flag_name = knob.flag or f"--{knob.name.replace('_', '-')}"
    if knob.flag is None and flag_name in flags:
        return f"vLLM {version} still has {flag_name}; it is left at its default, as newer versions have it no more"
    flag = flags.get(knob.flag or "")
    if flag is None:
        history = flag_history(flag_name)
        if history is None:
            return f"vLLM {version} has no such flag"
        return history.difference or f"{flag_name} is known from vLLM {history.since} to {history.until or 'now'} only"
    if flag.choices and value not in flag.choices:
        return f"{flag.name} of vLLM {version} takes {', '.join(map(str, flag.choices))}"
    return _block_size_problem(int(value), version) if knob.name == "block_size" else ""


def _block_size_problem(block_size: int, version: str) -> str:
    why = vllm_rules(version).refused_block_size(block_size)
    return f"{why}; vLLM's {knob_default('block_size')} is kept" if why else ""


def knob_default(name: str) -> Any:
    """labkit's default of a knob."""
    return getattr(EngineConfig(), name)


def _differs(knob: Knob, value: Any, version: str) -> bool:
    if knob.flag is None or value is None or knob.name in _LAB_ONLY:
        return False
    default = effective_default(knob.flag, version)
    return value != (knob_default(knob.name) if default is None else default)


def _words(flag: Flag, value: Any) -> tuple[str, ...]:
    if flag.kind == "bool":
        return (flag.name if value else f"--no-{flag.name[2:]}",)
    if flag.kind == "flag":
        if value:
            return (flag.name,)
        return (f"{flag.name}=False",) if flag.nargs == "?" else ()
    text = _plain_value(value)
    return (f"{flag.name}={text}",) if text.startswith("-") else (flag.name, text)


def _plain_value(value: Any) -> str:
    return f"{value:.12g}" if isinstance(value, float) else plain(value)


def _comment(knob: Knob, value: Any, version: str, reasons: Mapping[str, str]) -> str:
    default = effective_default(knob.flag or "", version)
    before = "vLLM's own choice" if default is None else _plain_value(default)
    why = plain(reasons.get(knob.name) or knob.help.split(". ")[0].rstrip("."))
    return f"{knob.name}: {before} → {_plain_value(value)}: {why}"


def _joined(pairs: list[tuple[str, ...]]) -> str:
    return " \\\n    ".join(" ".join(shlex.quote(word) for word in pair) for pair in pairs)


def _container_model(model: str) -> tuple[str, str | None]:
    """Name of the model inside the container, and the host folder to mount for it, if it is a folder."""
    if os.path.isdir(model):
        folder = Path(model).resolve()
        return f"/models/{folder.name or 'model'}", str(folder)
    return model, None


def _docker(model: str, pairs: list[tuple[str, ...]], version: str, num_gpus: int, port: int) -> str:
    name, folder = _container_model(model)
    lines: list[tuple[str, ...]] = [
        ("docker", "run", "--rm"),
        ("--gpus", "all" if num_gpus == 1 else str(num_gpus)),
        ("--ipc=host",),
        ("-p", f"{port}:8000"),
    ]
    if folder is not None:
        lines.append(("--mount", f"type=bind,source={folder},target={name},readonly"))
    mount = '-v "$HOME/.cache/huggingface:/root/.cache/huggingface"'
    image = ("--entrypoint", "vllm", f"{_IMAGE}:v{_tag(version)}", "serve", name)
    return " \\\n    ".join([_joined(lines), mount, _joined([image, *pairs])])


def _tag(version: str) -> str:
    return ".".join(map(str, version_tuple(version)))


def _compose(model: str, pairs: list[tuple[str, ...]], version: str, num_gpus: int, port: int) -> str:
    name, folder = _container_model(model)
    volumes = [_yaml("~/.cache/huggingface:/root/.cache/huggingface")]
    if folder is not None:
        bind = {"type": "bind", "source": folder, "target": name, "read_only": True}
        volumes.append(json.dumps(bind, ensure_ascii=False).replace("$", "$$"))
    arguments = ["serve", name, *(word for pair in pairs for word in pair)]
    lines = [
        "services:",
        "  vllm:",
        f"    image: {_yaml(f'{_IMAGE}:v{_tag(version)}')}",
        '    entrypoint: ["vllm"]',
        "    command:",
        *(f"      - {_yaml(word)}" for word in arguments),
        "    ipc: host",
        "    ports:",
        f"      - {_yaml(f'{port}:8000')}",
        "    volumes:",
        *(f"      - {volume}" for volume in volumes),
        "    deploy:",
        "      resources:",
        "        reservations:",
        "          devices:",
        "            - driver: nvidia",
        f"              count: {num_gpus}",
        "              capabilities: [gpu]",
    ]
    return "\n".join(lines) + "\n"


def _yaml(text: str) -> str:
    """A YAML string that stays this text: JSON strings are YAML, and Compose expands `$` unless it is doubled."""
    return json.dumps(text, ensure_ascii=False).replace("$", "$$")
