"""Steps of prompts alone: the largest that a plan allows, for measuring what it takes, and smaller ones to warm up."""

from __future__ import annotations

import numpy as np

from labkit.engine.cuda_inputs import HostStep, SlotTables
from labkit.memory.records import MemoryPlan
from labkit.memory.step_shapes import StepShape

# Prompts of these lengths launch every variant of the kernels that depends on the number of rows, so that none is
# compiled while requests wait.
PROMPT_SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)


def decode_sizes(max_num_seqs: int) -> list[int]:
    """The same for steps that only decode: one row has products of its own, and the plan of the split is compiled for
    powers of two, 16 or more."""
    sizes = [1, 16] if max_num_seqs > 1 else [1]
    while sizes[-1] < max_num_seqs:
        sizes.append(2 * sizes[-1])
    return [min(size, max_num_seqs) for size in sizes]


def prompt_step(plan: MemoryPlan, tables: SlotTables, num_tokens: int = 2**31) -> HostStep:
    """`num_tokens` (or all of max_num_batched_tokens) in prompts as long as allowed, max_num_seqs rows sampled with
    every filter on.

    It writes no KV and reads block 0 alone, so any pool will do.
    """
    num_tokens = min(num_tokens, int(plan.config.max_num_batched_tokens or 1))
    longest = int(plan.config.max_model_len or 1)
    num_rows = min(int(plan.config.max_num_seqs or 1), num_tokens)
    length = max(2, min(num_tokens, longest))
    starts = np.array([*range(0, num_tokens, length), num_tokens], dtype=np.int32)
    num_seqs = len(starts) - 1
    padding = np.full(num_seqs, tables.padding, dtype=np.int64)
    arrays: dict[str, np.ndarray] = {
        "token_ids": np.zeros(num_tokens, np.int64),
        "positions": np.arange(num_tokens, dtype=np.int64) % min(length, longest),
        "slot_mapping": np.full(num_tokens, -1, np.int64),
        "decode_slots": padding[:0],
        "decode_lens": padding[:0].astype(np.int32),
        "prompt_slots": padding,
        "prompt_lens": np.diff(starts).astype(np.int32),
        "sample_rows": np.arange(num_rows, dtype=np.int64),
        "sample_slots": np.full(num_rows, tables.padding, np.int64),
        "seeds": np.arange(num_rows, dtype=np.int64),
        "temperature": np.ones(num_rows, np.float32),
        "top_k": np.full(num_rows, 50, np.int32),
        "top_p": np.full(num_rows, 0.9, np.float32),
        "min_p": np.zeros(num_rows, np.float32),
        "draws": np.ones(num_rows, np.int32),
        "query_starts": starts,
    }
    return HostStep(arrays, StepShape(num_tokens, 0, num_seqs, num_rows), np.arange(num_rows))
