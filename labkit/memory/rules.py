"""What each vLLM version does about memory, as data: `vllm_rules.json`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from labkit.errors import OutOfRangeError
from labkit.specs.model_spec import ModelSpec
from labkit.text import plain

_VERSION = re.compile(r"v?(\d{1,4})(?:\.(\d{1,4}))?(?:\.(\d{1,4}))?")


@dataclass(frozen=True)
class VersionRules:
    """The rules of one vLLM version.

    Attributes:
        version: the version asked for, as three numbers.
        engine: "V0" or "V1".
        utilization: default of --gpu-memory-utilization.
        hybrid_groups: windowed layers have groups of their own; else they are allocated as full attention.
        group_ratio: the largest kind of layer sets the group size when below this times the smallest.
        printed_tokens: how "GPU KV cache size" is computed: "blocks", "groups" or "concurrency".
        concurrency: "tokens" (blocks·size/length) or "requests" (blocks/blocks of a request).
        null_block: block 0 is never usable.
        check_less_null_block: the fit check runs on the pool less that block.
        graphs_in_budget: whether the estimate of graph memory is subtracted: "none", "runner1" (only with the first
            model runner) or "all".
        state_graph_transient_kib: what the first model runner's estimate takes at least for models with recurrent
            state, for each batched token: its first whole capture profiles that many tokens of context.
        graph_limit_blackwell: largest captured batch on compute capability 10; 512 elsewhere.
        batches_in_flight: batches whose tokens windowed layers must hold on one card.
        swap_space_gib: default of --swap-space.
        runner2_models: which models the second model runner takes, which needs less memory to sample: "none",
            "listed" (`runner2_architectures`), "dense" (those, and what has neither experts nor state) or "all".
        state_prefix_caching: recurrent layers take part in prefix caching by default.
        charges_others: what other processes and the CUDA context use counts against the budget, as non-torch memory.
        block_size_multiple, largest_block_size: the block sizes that its CUDA attention backends take; None has no end.
        note: said when the version is not known and the nearest is used.
    """

    version: tuple[int, int, int]
    engine: str
    utilization: float
    hybrid_groups: bool
    group_ratio: float
    printed_tokens: str
    concurrency: str
    null_block: bool
    check_less_null_block: bool
    graphs_in_budget: str
    state_graph_transient_kib: int
    graph_limit_blackwell: int
    batches_in_flight: int
    swap_space_gib: float
    runner2_models: str
    runner2_architectures: tuple[str, ...]
    state_prefix_caching: bool
    charges_others: bool
    block_size_multiple: int
    largest_block_size: int | None
    note: str | None = None

    def model_runner(self, model: ModelSpec) -> int:
        """1 or 2: the model runner that this version takes for `model` by default."""
        if model.is_embedding or self.runner2_models == "none":
            return 1
        if self.runner2_models == "all" or model.architecture in self.runner2_architectures:
            return 2
        mixed = model.moe is not None or any(layer.kind == "state" for layer in model.layers)
        return 2 if self.runner2_models == "dense" and not mixed else 1

    def concurrent_batches(self, model: ModelSpec, stages: int) -> int:
        """Batches whose tokens windowed layers must hold with `stages` pipeline stages.

        `max_concurrent_batches` in vLLM's config: one for each stage, and with the second model runner one that is
        scheduled meanwhile; before the versions with two batches in flight the stages were not counted.
        """
        if self.batches_in_flight == 1:
            return 1
        return stages + 1 if self.model_runner(model) == 2 else max(self.batches_in_flight, stages)

    def refused_block_size(self, block_size: int) -> str:
        """Why no CUDA attention backend takes `block_size`, with the nearest sizes that work; "" where one does."""
        step, largest = self.block_size_multiple, self.largest_block_size
        if largest is not None and block_size > largest:
            return f"vLLM {self.text} takes at most {largest} on CUDA"
        if block_size % step == 0:
            return ""
        below = block_size // step * step
        near = " or ".join(str(size) for size in (below, below + step) if size and size <= (largest or size))
        return f"no CUDA attention backend takes it: they need a multiple of {step}, such as {near}"

    @property
    def is_older_than_known(self) -> bool:
        """True before the first version whose rules are known: then nothing is promised to fit."""
        return self.version < parse_version(_table()["oldest"])

    @property
    def text(self) -> str:
        """The version as "0.33.0"."""
        return ".".join(str(part) for part in self.version)


def parse_version(text: str) -> tuple[int, int, int]:
    """The first three numbers of a version such as "0.25.1", "v0.19" or "0.11.0rc2".

    Raises:
        OutOfRangeError: the text does not begin with a version.
    """
    found = _VERSION.match(str(text).strip()[:64])
    if found is None:
        raise OutOfRangeError(f"{plain(repr(text), 60)} is no vLLM version", works="0.33.0", knob="--vllm")
    major, minor, patch = (int(part or 0) for part in found.groups())
    return major, minor, patch


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    return json.loads(resources.files("labkit.memory").joinpath("vllm_rules.json").read_text(encoding="utf-8"))


@lru_cache(maxsize=64)
def vllm_rules(version: str) -> VersionRules:
    """The rules of a vLLM version; a version outside the known range gets the nearest one's and a note.

    Raises:
        OutOfRangeError: the text is no version.
    """
    wanted = parse_version(version)
    table = _table()
    newest, oldest = parse_version(table["newest"]), parse_version(table["oldest"])
    note = None
    used = wanted
    if wanted[:2] > newest[:2] or wanted < oldest:
        used = newest if wanted > newest else oldest
        name = ".".join(str(part) for part in used)
        note = f"vLLM {plain(version, 40)} is not known here; the rules of the nearest known version, {name}, are used"
    values: dict[str, Any] = {}
    for entry in table["rules"]:
        if parse_version(entry["since"]) <= used:
            values.update(entry)
    values.pop("since")
    values["runner2_architectures"] = tuple(values["runner2_architectures"])
    return VersionRules(version=wanted, note=note, **values)
