"""Names of configurations from what they change, and starting points by task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from labkit.errors import UnknownNameError
from labkit.format import count, gib, memory
from labkit.specs.engine_config import EngineConfig
from labkit.text import nearest, plain


@dataclass(frozen=True)
class Preset:
    """A starting point for one kind of traffic.

    Attributes:
        name: as users name it.
        title: what it is for.
        reason: why these knobs.
        knobs: what differs from vLLM's defaults.
        workload: the trace that shows it best.
    """

    name: str
    title: str
    reason: str
    knobs: Mapping[str, Any]
    workload: str


def _preset(name: str, title: str, reason: str, workload: str, **knobs: Any) -> Preset:
    return Preset(name, title, reason, MappingProxyType(knobs), workload)


_PRESETS = (
    _preset(
        "chat", "Chat", "many short requests: prompts in small chunks, so that running answers do not stall",
        "azure-2023-conv", max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=2048,
    ),
    _preset(
        "rag", "Long prompts with shared beginnings", "prefix caching and large chunks; few requests at once",
        "mooncake-synthetic", max_model_len=32768, max_num_seqs=64, max_num_batched_tokens=8192,
    ),
    _preset(
        "batch", "Offline batch", "throughput before latency: many requests, large steps",
        "arxiv-summarization", max_model_len=8192, max_num_seqs=1024, max_num_batched_tokens=16384,
    ),
    _preset(
        "tight-memory", "Tight memory", "8-bit KV, short requests, small steps and no CUDA graphs",
        "azure-2023-conv", max_model_len=4096, max_num_seqs=32, max_num_batched_tokens=1024, kv_cache_dtype="fp8",
        gpu_memory_utilization=0.95, enforce_eager=True,
    ),
)  # fmt: skip


def presets() -> tuple[Preset, ...]:
    """Every preset."""
    return _PRESETS


def preset_names() -> tuple[str, ...]:
    """Names that `preset` knows."""
    return tuple(entry.name for entry in _PRESETS)


def preset(name: str, base: EngineConfig | None = None) -> EngineConfig:
    """The configuration of preset `name`; knobs that it leaves alone are those of `base`.

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
    return (base or EngineConfig()).replace(**found.knobs)


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
    """What `config` changes against `baseline` (vLLM's defaults when None): "fp8 KV, block 32"; "baseline" for nothing.

    It lists exactly the differing knobs, in the order of the knobs of most interest.
    """
    changed = {name: new for name, (_, new) in (baseline or EngineConfig()).differences(config).items()}
    ordered = [name for name in _WORDS if name in changed] + [name for name in changed if name not in _WORDS]
    shown = [_WORDS[name](changed[name]) if name in _WORDS else f"{name} {changed[name]}" for name in ordered]
    return plain(", ".join(shown) or "baseline", 200)
