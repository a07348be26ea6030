"""`Sequence`: one request inside the engine, its tokens, its blocks and its times."""

from __future__ import annotations

from enum import Enum

from labkit.engine.block_pool import BlockKey, HashFunction
from labkit.engine.sampling_params import EngineRequest


class Status(Enum):
    """Where a sequence is; a preempted one waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class Sequence:
    """Tokens and blocks of one request.

    Attributes:
        index: order of arrival; the smaller one goes first, always.
        token_ids: prompt and output.
        num_computed_tokens: tokens whose KV is in the blocks of `block_table`, or of `swap_table` when swapped.
        block_table: blocks of the pool, in token order; block i holds tokens i·block_size ….
        swap_table: blocks of the host pool while swapped out.
        slot: row of the executor's tables while running, else -1.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission.
        max_tokens: most output tokens that the model's length allows, at most what was asked.
    """

    __slots__ = (
        "block_table", "finish_reason", "finish_s", "first_token_s", "index", "keys", "max_tokens",
        "num_cached_tokens", "num_computed_tokens", "num_preemptions", "num_prompt_tokens", "num_registered_blocks",
        "request", "seed", "slot", "status", "swap_table", "token_ids", "token_times_s",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, index: int, seed: int, max_model_len: int) -> None:
        self.request = request
        self.index = index
        self.seed = seed
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_tokens = min(request.sampling.max_tokens, max_model_len - self.num_prompt_tokens)
        self.num_computed_tokens = 0
        self.block_table: list[int] = []
        self.swap_table: list[int] = []
        self.keys: list[BlockKey] = []
        self.num_registered_blocks = 0
        self.status = Status.WAITING
        self.slot = -1
        self.num_cached_tokens = -1
        self.num_preemptions = 0
        self.first_token_s: float | None = None
        self.finish_s: float | None = None
        self.token_times_s: list[float] = []
        self.finish_reason = ""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens_to_compute(self) -> int:
        """Known tokens whose KV is not there yet; 1 for a sequence that only decodes."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_complete(self) -> bool:
        """Whether its last token is made already, though perhaps not known yet."""
        return self.num_output_tokens >= self.max_tokens

    @property
    def max_num_tokens(self) -> int:
        """Tokens of KV at its longest; the last output token needs none."""
        return self.num_prompt_tokens + self.max_tokens - 1

    def full_keys(self, count: int, block_size: int, hash_function: HashFunction, first: int = 0) -> list[BlockKey]:
        """Keys of the full blocks from `first` to before `count`."""
        keys = self.keys
        if len(keys) < count:
            parent = keys[-1] if keys else None
            token_ids = tuple(self.token_ids[len(keys) * block_size : count * block_size])
            for start in range(0, len(token_ids), block_size):
                parent = BlockKey(parent, token_ids[start : start + block_size], hash_function)
                keys.append(parent)
        return keys[first:count]

    def forget_kv(self) -> None:
        """No token is computed any more; the caller has freed the blocks."""
        self.block_table = []
        self.swap_table = []
        self.num_computed_tokens = 0
        self.num_registered_blocks = 0
