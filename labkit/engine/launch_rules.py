"""`LaunchRules`: how an engine brings its steps to a card: which replay a captured graph, and what the host hides."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.memory.budget import capture_sizes as vllm_capture_sizes
from labkit.specs.engine_config import EngineConfig

LARGEST_CAPTURE = 512
_MIXED_SIZES = (32, 64, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True)
class LaunchRules:
    """How steps are launched.

    Attributes:
        graph_sizes: captured numbers of tokens, smallest first; a step runs padded in the next larger one, and larger
            steps are launched kernel by kernel.
        prompt_sizes: the same for steps that compute prompts.
        overlaps: the host puts the next step together while the card computes, so that only the longer one counts.
    """

    graph_sizes: tuple[int, ...] = ()
    prompt_sizes: tuple[int, ...] = ()
    overlaps: bool = False


def capture_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, every 8 up to 64, every 16 up to 256, every 32 up to 512; none above what may run, which is the last."""
    largest = min(max_num_seqs, LARGEST_CAPTURE)
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, LARGEST_CAPTURE + 1, 32)]
    return [size for size in sizes if size < largest] + [largest]


def mixed_capture_sizes(max_num_batched_tokens: int) -> list[int]:
    """Numbers of tokens of captured steps in which prompts are computed; none above what a step may have."""
    largest = min(max_num_batched_tokens, _MIXED_SIZES[-1])
    return [size for size in _MIXED_SIZES if size < largest] + [largest]


def labkit_rules(config: EngineConfig, *, captures: bool = True, largest: bool = False) -> LaunchRules:
    """The lab's own engine: graphs of decode steps, and of steps with few tokens of prompts.

    Args:
        captures: False for experts that the host visits one by one.
        largest: even the largest step waits for the host where it is launched kernel by kernel, so it has a graph too.
    """
    if config.enforce_eager or not captures:
        return LaunchRules(overlaps=True)
    max_tokens = int(config.max_num_batched_tokens or 1)
    sizes, prompt_sizes = capture_sizes(int(config.max_num_seqs or 1)), mixed_capture_sizes(max_tokens)
    if largest and prompt_sizes[-1] < max_tokens:
        prompt_sizes.append(max_tokens)
    return LaunchRules(tuple(sizes), tuple(prompt_sizes), overlaps=True)


def vllm_launch_rules(config: EngineConfig) -> LaunchRules:
    """vLLM: pieces between attention calls are captured for steps of any kind."""
    sizes = tuple(vllm_capture_sizes(config))
    return LaunchRules(sizes, sizes)
