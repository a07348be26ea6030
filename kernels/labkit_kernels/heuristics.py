"""Launch settings by architecture, KV kind, head size and rows: recorded in heuristics.json, never tuned at run time.

`kernels/bench/tune.py` measures the candidates on a card and rewrites its part of the file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

from labkit_kernels.checks import KernelValueError

TABLE = "heuristics.json"
INTERPRETER_SLOTS = 8
# Shares of keys: how many at most, of how many tiles at least, and in a shared prefix at most where the card has room.
MAX_SPLITS, MIN_TILES_OF_SPLIT, MAX_TILES_OF_SHARE = 32, 4, 44


@dataclass(frozen=True)
class DecodeConfig:
    """Settings of the decode kernel.

    tile: KV tokens of one step. swap: KV tokens are the rows of the matrix instruction and queries its columns
    (Hopper's WGMMA, at most 32 columns); otherwise queries are the rows. prefetch: block ids are read one tile ahead.
    ctas_per_sm: programs of one multiprocessor at the same time, which the split aims at.
    merge: partial values read at once when splits are merged.
    words: an 8-bit cache is read as 32-bit words and unpacked in registers; queries are then the rows.
    """

    tile: int = 64
    warps: int = 4
    stages: int = 3
    swap: bool = False
    prefetch: bool = True
    ctas_per_sm: int = 2
    merge: int = 4096
    words: bool = False
    evict: str = ""

    def padded_rows(self, rows: int) -> int:
        """Query rows as the matrix instruction takes them: a power of two, at least 16."""
        return max(16, 1 << (rows - 1).bit_length())


@dataclass(frozen=True)
class PrefillConfig:
    """Settings of the prefill kernel.

    rows: query rows of a program (token × head of a group). tile: KV tokens of a step. stages: pipeline depth over the
    tiles that every row sees whole; tail_tile, tail_stages: the same on the diagonal.
    """

    rows: int = 128
    tile: int = 64
    warps: int = 8
    stages: int = 3
    tail_tile: int = 128
    tail_stages: int = 1


@cache
def _table() -> dict[str, list[dict]]:
    return json.loads(Path(__file__).with_name(TABLE).read_text(encoding="utf-8"))


def _family(arch: int) -> str:
    """The recorded architecture nearest below `arch`."""
    known = sorted(int(name) for name in _table()["architectures"])
    below = [name for name in known if name <= arch]
    return str(below[-1] if below else known[0])


def _holds(name: str, limit: object, facts: dict[str, object]) -> bool:
    """Whether one condition holds: `max_<fact>` and `min_<fact>` are bounds, a bare fact lists what it may be."""
    if name.startswith("max_"):
        return facts[name[4:]] <= limit  # type: ignore[operator]
    if name.startswith("min_"):
        return facts[name[4:]] >= limit  # type: ignore[operator]
    return facts[name] in limit  # type: ignore[operator]


def _first_match(rules: list[dict], facts: dict[str, object]) -> dict:
    """Settings of the first rule whose conditions all hold."""
    for rule in rules:
        if all(_holds(name, limit, facts) for name, limit in rule["when"].items()):
            return rule["use"]
    raise KernelValueError(f"{TABLE} has no rule for {facts}")


def _config(kind: type, settings: dict):
    unknown = set(settings) - {field.name for field in fields(kind)}
    if unknown:
        raise KernelValueError(f"{TABLE} has unknown settings {sorted(unknown)} for {kind.__name__}")
    return kind(**settings)


def decode_config(arch: int, kv_kind: str, head_dim: int, rows: int, batch: int = 1) -> DecodeConfig:
    """Settings for `rows` query rows of one KV head and up to `batch` sequences on capability `arch` (90 = 9.0)."""
    rules = _table()["architectures"][_family(arch)]["decode"]
    facts = {"kv": kv_kind, "head_dim": head_dim, "rows": rows, "batch": batch}
    return _config(DecodeConfig, _first_match(rules, facts))


def prefill_config(arch: int, kv_kind: str, head_dim: int, rows: int) -> PrefillConfig:
    """Settings for sequences of up to `rows` query rows of one KV head."""
    rules = _table()["architectures"][_family(arch)]["prefill"]
    return _config(PrefillConfig, _first_match(rules, {"kv": kv_kind, "head_dim": head_dim, "rows": rows}))


def shared_config(arch: int, kv_kind: str, head_dim: int, rows: int) -> PrefillConfig:
    """Settings for the shared part of a cascade: small enough to lie beside the programs of the own part."""
    rules = _table()["architectures"][_family(arch)]["shared"]
    return _config(PrefillConfig, _first_match(rules, {"kv": kv_kind, "head_dim": head_dim, "rows": rows}))


def shared_splits(tiles: int, programs: int, sm_count: int) -> int:
    """Shares of a shared prefix of `tiles` tiles that `programs` (row blocks × KV heads) attend, beside the own part.

    One for each multiprocessor; more, up to two, where a share would else take so many tiles that it ends last.
    """
    enough = max(sm_count // programs, min(-(-tiles // MAX_TILES_OF_SHARE), 2 * sm_count // programs))
    return max(1, min(enough, tiles // MIN_TILES_OF_SPLIT, MAX_SPLITS))


class Occupancy(Protocol):
    """Settings of any kernel that say how many of its programs one multiprocessor holds."""

    @property
    def ctas_per_sm(self) -> int:
        """Programs of one multiprocessor at once."""


def num_slots(device: torch.device, config: Occupancy) -> int:
    """Programs that the card runs at once under `config`."""
    if device.type != "cuda":
        return INTERPRETER_SLOTS
    return torch.cuda.get_device_properties(device).multi_processor_count * config.ctas_per_sm


def as_dict(config: DecodeConfig | PrefillConfig) -> dict[str, object]:
    """The settings as plain values, for tables of results."""
    return asdict(config)
