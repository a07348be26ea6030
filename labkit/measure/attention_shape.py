"""`BatchShape` and `AttentionShape`: the lengths of a step, and one attention launch over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from labkit.errors import OutOfRangeError, UnknownNameError
from labkit.memory.dtypes import kv_format
from labkit.text import nearest, plain

Variant = Literal["full", "one program for each query head", "tile = block", "no split", "prefill", "shared prefix"]
VARIANTS: tuple[str, ...] = get_args(Variant)
MAX_BATCH, MAX_CONTEXT_TOKENS, MAX_BLOCK_SIZE = 1024, 1_048_576, 256


@dataclass(frozen=True)
class BatchShape:
    """One step of attention.

    Attributes:
        context_lens: tokens in the cache of each sequence, the step's own included.
        query_lens: tokens that each sequence computes in this step: 1 in decode, more in prefill.
        shared_prefix_tokens: tokens at the beginning whose blocks all sequences share.
    """

    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    shared_prefix_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.context_lens or len(self.context_lens) != len(self.query_lens):
            raise OutOfRangeError(
                f"{len(self.context_lens)} contexts and {len(self.query_lens)} query lengths are no batch",
                needed="as many of both, and one at least", knob="query_lens",
            )  # fmt: skip
        if min(self.query_lens) < 1 or any(
            query > context for query, context in zip(self.query_lens, self.context_lens, strict=True)
        ):
            raise OutOfRangeError("a query length is at least 1 and at most its context", knob="query_lens")

    @classmethod
    def decode(cls, num_seqs: int, context_len: int, shared_prefix_tokens: int = 0) -> BatchShape:
        """`num_seqs` sequences of `context_len` tokens, one new token each."""
        return cls((context_len,) * num_seqs, (1,) * num_seqs, shared_prefix_tokens)


@dataclass(frozen=True)
class AttentionShape:
    """Lengths, heads and cache layout of one launch.

    Attributes:
        batch: lengths, and the tokens at the beginning that all sequences share.
        num_heads, num_kv_heads, head_dim: query heads, KV heads, size of a head.
        block_size: tokens of a KV block.
        kv_cache_dtype: "bfloat16", "fp8" or another KV format by its vLLM name.
        window: tokens that a query sees at most; None is all.
        v_head_dim: size of a value where it is not `head_dim`.
        is_latent: multi-head latent attention: the first `v_head_dim` numbers of a key are its value, stored once.
    """

    batch: BatchShape
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    kv_cache_dtype: str = "bfloat16"
    window: int | None = None
    v_head_dim: int | None = None
    is_latent: bool = False

    def __post_init__(self) -> None:
        _check("num_kv_heads", self.num_kv_heads, 1, 1024)
        _check("num_heads", self.num_heads, 1, 4096)
        _check("head_dim", self.head_dim, 8, 1024)
        _check("v_head_dim", self.value_dim, 8, self.head_dim if self.is_latent else 1024)
        _check("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        _check("max_num_seqs", len(self.batch.context_lens), 1, MAX_BATCH)
        _check("max_model_len", max(self.batch.context_lens), 1, MAX_CONTEXT_TOKENS)
        if self.window is not None:
            _check("window", self.window, 1, MAX_CONTEXT_TOKENS)
        if self.num_heads % self.num_kv_heads:
            raise OutOfRangeError(
                f"{self.num_heads} query heads do not divide into {self.num_kv_heads} KV heads",
                works=f"a multiple of {self.num_kv_heads}",
                knob="num_heads",
            )
        kv_format(self.kv_cache_dtype, "bfloat16")

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def value_dim(self) -> int:
        """Size of a value."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def head_bytes(self) -> int:
        """Bytes of K and V of one token and KV head."""
        element = kv_format(self.kv_cache_dtype, "bfloat16")
        return element.mla_bytes(self.head_dim) if self.is_latent else element.head_bytes(self.head_dim, self.value_dim)

    @property
    def row_bytes(self) -> float:
        """Bytes of one token and KV head that lie side by side: K or V, or what both share in latent attention."""
        return (
            float(self.head_bytes)
            if self.is_latent
            else self.head_bytes * self.head_dim / (self.head_dim + self.value_dim)
        )

    @property
    def kv_kind(self) -> str:
        """The kernels' name of the KV type: "native", "fp8" or "int8"."""
        name = kv_format(self.kv_cache_dtype, "bfloat16").name
        return "native" if name in ("float32", "float16", "bfloat16") else "int8" if name.startswith("int8") else "fp8"

    @property
    def shared_tokens(self) -> int:
        """Tokens of whole blocks that all sequences share: a block is shared whole or not at all."""
        return min(self.batch.shared_prefix_tokens, min(self.batch.context_lens)) // self.block_size * self.block_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V when each is read once: what the DRAM must give at least."""
        contexts = np.asarray(self.batch.context_lens)
        seen = contexts
        if self.window is not None:
            seen = np.minimum(contexts, np.asarray(self.batch.query_lens) + self.window - 1)
        shared = np.maximum(0, self.shared_tokens - (contexts - seen))
        return int(seen.sum() - shared.sum() + shared.max()) * self.num_kv_heads * self.head_bytes

    @property
    def flops(self) -> float:
        """Causal attention operations: 2 · (key + value size) for each pair of a query head's token and a key."""
        contexts, queries = (np.asarray(x, dtype=np.float64) for x in (self.batch.context_lens, self.batch.query_lens))
        if self.window is None:
            pairs = queries * (contexts - queries) + queries * (queries + 1) / 2
        else:
            # Query j of a sequence sees min(context - queries + j, window) keys; the first `short` see fewer than all.
            short = np.clip(self.window - (contexts - queries), 0, queries)
            pairs = short * (contexts - queries) + short * (short + 1) / 2 + (queries - short) * self.window
        return float(2 * (self.head_dim + self.value_dim) * self.num_heads * pairs.sum())


def check_variant(variant: str) -> None:
    """Raises UnknownNameError unless `variant` is one of `VARIANTS`."""
    if variant not in VARIANTS:
        raise UnknownNameError(
            f"there is no kernel variant {plain(repr(variant), 80)}",
            available=", ".join(VARIANTS),
            works=nearest(str(variant), VARIANTS),
            knob="variant",
        )


def _check(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
        raise OutOfRangeError(f"{name} is {plain(repr(value), 80)}", needed=f"{low} to {high:,}", knob=name)
