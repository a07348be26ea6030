"""Names of configurations from what they change, and starting points by task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from labkit.errors import UnknownNameError
from labkit.format import count, duration, gib, memory
from labkit.specs.engine_config import HIGHEST_UTILIZATION, EngineConfig
from labkit.specs.workload import Workload
from labkit.specs.workload_loading import load_workload
from labkit.text import nearest, plain

Goal = Literal["output_tokens_per_s", "requests_per_s"]
_GOALS: Mapping[str, str] = MappingProxyType(
    {"output_tokens_per_s": "most output tokens per second", "requests_per_s": "most requests per second"}
)
_LIMITS: Mapping[str, str] = MappingProxyType(
    {"ttft_p99_s": "first token", "inter_token_p99_s": "time between tokens", "e2e_p99_s": "whole answer"}
)


@dataclass(frozen=True)
class Preset:
    """A starting point for one kind of task: flags, the traffic that shows it best, and what is to be reached.

    Attributes:
        name: as users name it.
        title: what it is for.
        reason: why these knobs.
        knobs: what differs from vLLM's defaults.
        workload: name of the trace; `take` says how much of it, as `load_workload` takes it.
        goal, limits: what `session.search` makes largest, and the p99 that it keeps below a time in seconds.
        space: knob → values that are worth a search.
    """

    name: str
    title: str
    reason: str
    knobs: Mapping[str, Any]
    workload: str
    take: Mapping[str, Any]
    goal: Goal
    limits: Mapping[str, float]
    space: Mapping[str, tuple[Any, ...]]

    @property
    def goal_words(self) -> str:
        """The goal in words: "most output tokens per second with 99 % of times between tokens within 100 ms"."""
        limits = [f"99 % of each {_LIMITS[name]} within {duration(value)}" for name, value in self.limits.items()]
        return " with ".join([_GOALS[self.goal], *limits])


def _preset(
    name: str,
    title: str,
    reason: str,
    workload: str,
    *,
    take: Mapping[str, Any],
    goal: Goal = "output_tokens_per_s",
    limits: Mapping[str, float] | None = None,
    space: Mapping[str, tuple[Any, ...]] | None = None,
    **knobs: Any,
) -> Preset:
    frozen = (MappingProxyType(dict(values)) for values in (knobs, take, limits or {}, space or {}))
    made, taken, kept, searched = frozen
    return Preset(name, title, reason, made, workload, taken, goal, kept, searched)


_PRESETS = (
    _preset(
        "chat", "Chat", "many short requests: prompts in small chunks, so that running answers do not stall",
        "azure-2023-conv", take={"limit": 200, "max_input_tokens": 6144, "max_output_tokens": 2000},
        limits={"inter_token_p99_s": 0.1},
        space={"max_num_seqs": (64, 128, 256), "max_num_batched_tokens": (1024, 2048, 4096)},
        max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=2048,
    ),
    _preset(
        "rag", "Long prompts with shared beginnings", "prefix caching and large chunks; few requests at once",
        "mooncake-synthetic", take={"limit": 100, "max_input_tokens": 30000, "max_output_tokens": 2000},
        limits={"ttft_p99_s": 10.0},
        space={"max_num_seqs": (32, 64, 128), "max_num_batched_tokens": (4096, 8192, 16384)},
        max_model_len=32768, max_num_seqs=64, max_num_batched_tokens=8192, enable_prefix_caching=True,
    ),
    _preset(
        "agentic", "Agents: many turns on one beginning", "each turn repeats the conversation so far, so what was "
        "computed before must stay: prefix caching, and 8-bit KV to keep more of it",
        "mooncake-conversation", take={"limit": 100, "max_input_tokens": 30000, "max_output_tokens": 2000},
        limits={"ttft_p99_s": 5.0},
        space={"kv_cache_dtype": ("auto", "fp8"), "max_num_seqs": (32, 64, 128)},
        max_model_len=32768, max_num_seqs=64, max_num_batched_tokens=4096, enable_prefix_caching=True,
        kv_cache_dtype="fp8",
    ),
    _preset(
        "batch", "Offline batch", "throughput before latency: many requests, large steps",
        "arxiv-summarization", take={"limit": 200, "max_input_tokens": 7000, "max_output_tokens": 1000},
        space={"max_num_seqs": (256, 512, 1024), "max_num_batched_tokens": (8192, 16384)},
        max_model_len=8192, max_num_seqs=1024, max_num_batched_tokens=16384,
    ),
    _preset(
        "embedding", "Embedding", "prompts only: full steps, few requests at once, and a small pool as nothing decodes",
        "azure-2023-code", take={"limit": 200, "max_input_tokens": 8000, "max_output_tokens": 1},
        goal="requests_per_s", limits={"e2e_p99_s": 1.0},
        space={"max_num_batched_tokens": (4096, 8192, 16384), "max_num_seqs": (16, 32, 64)},
        max_model_len=8192, max_num_seqs=32, max_num_batched_tokens=8192,
    ),
    _preset(
        "reasoning", "Reasoning: long answers", "answers far longer than prompts: decode and KV decide, small steps",
        "servegen-deepseek-r1", take={"limit": 60, "max_input_tokens": 4000, "max_output_tokens": 8000},
        limits={"inter_token_p99_s": 0.05},
        space={"kv_cache_dtype": ("auto", "fp8"), "max_num_seqs": (64, 128, 256)},
        max_model_len=16384, max_num_seqs=128, max_num_batched_tokens=2048,
    ),
    _preset(
        "tight-memory", "Tight memory", "8-bit KV, short requests, small steps and no CUDA graphs",
        "azure-2023-conv", take={"limit": 100, "max_input_tokens": 3000, "max_output_tokens": 1000},
        space={"max_num_seqs": (8, 16, 32), "enforce_eager": (False, True)},
        max_model_len=4096, max_num_seqs=32, max_num_batched_tokens=1024, kv_cache_dtype="fp8",
        gpu_memory_utilization=HIGHEST_UTILIZATION, enforce_eager=True,
    ),
)  # fmt: skip


def presets() -> tuple[Preset, ...]:
    """Every preset."""
    return _PRESETS


def preset_names() -> tuple[str, ...]:
    """Names that `preset` knows."""
    return tuple(entry.name for entry in _PRESETS)


def get_preset(name: str) -> Preset:
    """The preset called `name`.

    Raises:
        UnknownNameError: no such preset; names the nearest.
    """
    found = next((entry for entry in _PRESETS if entry.name == str(name).casefold()), None)
    if found is None:
        raise UnknownNameError(
            f"there is no preset called {plain(name, 80)!r}",
            available=", ".join(preset_names()),
            works=nearest(str(name), preset_names()),
        )
    return found


def preset(name: str, base: EngineConfig | None = None) -> EngineConfig:
    """The configuration of preset `name`; knobs that it leaves alone are those of `base`.

    Raises:
        UnknownNameError: no such preset; names the nearest.
    """
    return (base or EngineConfig()).replace(**get_preset(name).knobs)


def preset_traffic(name: str) -> Workload:
    """The traffic of preset `name`.

    Raises:
        UnknownNameError: no such preset; names the nearest.
    """
    found = get_preset(name)
    return load_workload(found.workload, **found.take)


def _switch(on: str, off: str) -> Callable[[Any], str]:
    return lambda value: on if value else off


def _worded(word: str, show: Callable[[Any], str] = str) -> Callable[[Any], str]:
    return lambda value: f"default {word}" if value is None else f"{word} {show(value)}"


_WORDS: Mapping[str, Callable[[Any], str]] = MappingProxyType(
    {
        "kv_cache_dtype": lambda value: f"{value} KV",
        "block_size": _worded("block"),
        "max_model_len": _worded("length", count),
        "gpu_memory_utilization": _worded("utilization", lambda value: f"{value:g}"),
        "max_num_seqs": _worded("seqs", count),
        "max_num_batched_tokens": _worded("batched tokens", count),
        "enable_chunked_prefill": _switch("chunked prefill", "no chunked prefill"),
        "enable_prefix_caching": _switch("prefix caching", "no prefix caching"),
        "enforce_eager": _switch("eager", "graphs"),
        "swap_space": lambda value: f"swap {gib(value)}" if value else "no swap space",
        "preemption_mode": lambda value: f"preempt by {value}",
        "num_gpu_blocks_override": _worded("blocks", count),
        "kv_cache_memory_bytes": _worded("KV", memory),
        "dtype": lambda value: f"dtype {value}",
        "quantization": lambda value: "default weights" if value is None else f"{value} weights",
        "load_format": lambda value: "random weights" if value == "dummy" else f"load {value}",
        "tensor_parallel_size": _worded("TP"),
        "pipeline_parallel_size": _worded("PP"),
        "data_parallel_size": _worded("DP"),
        "enable_expert_parallel": _switch("expert parallel", "no expert parallel"),
        "cpu_memory_gib": lambda value: f"memory {gib(value)}",
    }
)


def name_of(config: EngineConfig, baseline: EngineConfig | None = None) -> str:
    """What `config` changes against `baseline`, vLLM's defaults when None: "fp8 KV, block 32", or "starting settings".

    It lists exactly the differing knobs, in the order of the knobs of most interest.
    """
    changed = {name: new for name, (_, new) in (baseline or EngineConfig()).differences(config).items()}
    ordered = [name for name in _WORDS if name in changed] + [name for name in changed if name not in _WORDS]
    shown = [_WORDS[name](changed[name]) if name in _WORDS else f"{name} {changed[name]}" for name in ordered]
    return plain(", ".join(shown) or "starting settings", 200)
