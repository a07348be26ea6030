"""`LaunchRules`: how an engine brings its steps to a card: which replay a captured graph, and what the host hides."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.memory.budget import capture_sizes as vllm_capture_sizes
from labkit.memory.step_shapes import graph_shapes
from labkit.specs.engine_config import EngineConfig


@dataclass(frozen=True)
class LaunchRules:
    """How steps are launched.

    Attributes:
        graph_sizes: captured numbers of tokens, smallest first; a step runs padded in the next larger one, and larger
            steps are launched kernel by kernel.
        prompt_sizes: the same for steps that compute prompts.
        prompt_places: for each of `prompt_sizes`, with how many prompts at most; empty where any number will do.
        padded_tokens: the largest of `prompt_sizes` that takes steps whose own size has too few places for their
            prompts; others of these are launched kernel by kernel.
        overlaps: the host puts the next step together while the card computes, so that only the longer one counts.
    """

    graph_sizes: tuple[int, ...] = ()
    prompt_sizes: tuple[int, ...] = ()
    prompt_places: tuple[int, ...] = ()
    padded_tokens: int = 0
    overlaps: bool = False


def labkit_rules(
    config: EngineConfig, *, captures: bool = True, largest: bool = False, padded_tokens: int = 0
) -> LaunchRules:
    """The lab's own engine: graphs of decode steps, and of steps with few tokens of prompts.

    Args:
        captures: False for experts that the host visits one by one.
        largest: even the largest step waits for the host where it is launched kernel by kernel, so it has a graph too.
        padded_tokens: see `LaunchRules`; as `labkit.memory.card_parts.padded_tokens` says.
    """
    if config.enforce_eager or not captures:
        return LaunchRules(overlaps=True)
    prompts, decodes = graph_shapes(config, largest=largest)
    return LaunchRules(
        tuple(shape.num_tokens for shape in decodes), tuple(shape.num_tokens for shape in prompts),
        tuple(shape.num_prompts for shape in prompts), padded_tokens, overlaps=True,
    )  # fmt: skip


def vllm_launch_rules(config: EngineConfig) -> LaunchRules:
    """vLLM: pieces between attention calls are captured for steps of any kind."""
    sizes = tuple(vllm_capture_sizes(config))
    return LaunchRules(sizes, sizes)
