"""Shapes of the steps that labkit's engine captures as graphs, and of the largest step that it measures."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.specs.engine_config import EngineConfig

LARGEST_CAPTURE = 512
# Prompts that a captured step has places for: one for each so many of its tokens, no fewer and no more than these.
TOKENS_OF_PROMPT, FEW_PROMPTS, MANY_PROMPTS = 8, 8, 64
_MIXED_SIZES = (32, 64, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True, order=True)
class StepShape:
    """Places in a step. Sequences with one new token come first, then those with more; what is left over is padding.

    Attributes:
        num_tokens: rows.
        num_decodes: places of sequences with one new token, each of which has one of the first rows.
        num_prompts: places of other sequences.
        num_samples: sequences of both kinds together, each of which gives a token.
    """

    num_tokens: int
    num_decodes: int
    num_prompts: int
    num_samples: int


def capture_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, every 8 up to 64, every 16 up to 256, every 32 up to 512; none above what may run, which is the last."""
    largest = min(max_num_seqs, LARGEST_CAPTURE)
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, LARGEST_CAPTURE + 1, 32)]
    return [size for size in sizes if size < largest] + [largest]


def mixed_capture_sizes(max_num_batched_tokens: int) -> list[int]:
    """Numbers of tokens of captured steps in which prompts are computed; none above what a step may have."""
    largest = min(max_num_batched_tokens, _MIXED_SIZES[-1])
    return [size for size in _MIXED_SIZES if size < largest] + [largest]


def decode_shapes(max_num_seqs: int) -> list[StepShape]:
    """Of steps that only decode, smallest first."""
    return [StepShape(size, size, 0, size) for size in capture_sizes(max_num_seqs)]


def mixed_shapes(max_num_seqs: int, max_num_batched_tokens: int, *, largest: bool) -> list[StepShape]:
    """Of steps that compute prompts too, smallest first.

    Args:
        largest: even the largest step waits for the host where it is launched kernel by kernel, so it has a graph too.
    """
    sizes = mixed_capture_sizes(max_num_batched_tokens)
    if largest and sizes[-1] < max_num_batched_tokens:
        sizes.append(max_num_batched_tokens)
    places = [max(FEW_PROMPTS, min(MANY_PROMPTS, size // TOKENS_OF_PROMPT)) for size in sizes]
    return [
        StepShape(size, min(size, max_num_seqs), min(prompts, max_num_seqs), min(size + prompts, max_num_seqs))
        for size, prompts in zip(sizes, places, strict=True)
    ]


def graph_shapes(config: EngineConfig, *, largest: bool) -> tuple[list[StepShape], list[StepShape]]:
    """Shapes to capture, smallest first: of steps with prompts, which need the most memory, and of those without."""
    max_num_seqs = int(config.max_num_seqs or 1)
    prompts = mixed_shapes(max_num_seqs, int(config.max_num_batched_tokens or 1), largest=largest)
    return prompts, decode_shapes(max_num_seqs)


def prompt_shape(config: EngineConfig) -> StepShape:
    """The largest step of prompts alone: max_num_batched_tokens in prompts as long as allowed, max_num_seqs rows
    sampled."""
    num_tokens = int(config.max_num_batched_tokens or 1)
    length = max(2, min(num_tokens, int(config.max_model_len or 1)))
    return StepShape(num_tokens, 0, -(-num_tokens // length), min(int(config.max_num_seqs or 1), num_tokens))
