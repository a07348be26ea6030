"""How the KV cache is cut into pages, groups and blocks, for every kind of attention.

Rules as vLLM's `v1/core/kv_cache_planning.py` applies them: layers of one kind form groups of equal layer count, all
groups share one pool of block ids, and a block is as large as the largest group's pages together. A pipeline stage has
every group of the model, with its own layers in each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from labkit.memory.dtypes import ELEMENT_BYTES, KvFormat
from labkit.specs.model_spec import LayerSpec, StateSpec

ALIGNMENT_TOKENS = 16


@dataclass(frozen=True)
class PageKind:
    """The cache of one layer on one rank.

    Attributes:
        kind: "full", "mla", "sliding", "chunked" or "state".
        block_tokens: tokens in one page.
        token_bytes: bytes of one token; 0 for a state.
        page_bytes: bytes of one page, padding included.
        window: tokens, for "sliding" and "chunked".
    """

    kind: str
    block_tokens: int
    token_bytes: int
    page_bytes: int
    window: int = 0

    def blocks_needed(self, length: int, in_flight_tokens: int, state_blocks: int) -> int:
        """Blocks that one request of `length` tokens holds at its worst moment."""
        if self.kind == "state":
            return state_blocks
        if self.kind == "sliding":
            held = min(self.window - 1 + in_flight_tokens, length)
            return math.ceil(held / self.block_tokens) + 1
        held = min(self.window + in_flight_tokens, length) if self.kind == "chunked" else length
        return math.ceil(held / self.block_tokens)


@dataclass(frozen=True)
class KvGroup:
    """Layers that share one block table: `num_layers` of one kind on this rank, fewer than a block has room for where
    padded."""

    page: PageKind
    num_layers: int


@dataclass(frozen=True)
class KvLayout:
    """Pages, groups and blocks of one rank.

    Attributes:
        groups: the groups in order, full attention first.
        block_bytes: bytes of one block id over the whole rank.
        padding_layers: layers of the last groups that hold no cache but take pages.
        state_blocks: blocks of one request in each state group.
        in_flight_tokens: tokens that may be on their way in windowed layers.
    """

    groups: tuple[KvGroup, ...]
    block_bytes: int
    padding_layers: int = 0
    state_blocks: int = 1
    in_flight_tokens: int = 0

    @property
    def min_block_tokens(self) -> int:
        """Tokens of the smallest block over the groups."""
        return min((group.page.block_tokens for group in self.groups), default=1)

    def blocks_per_request(self, length: int) -> int:
        """Block ids that one request of `length` tokens takes over all groups."""
        return sum(group.page.blocks_needed(length, self.in_flight_tokens, self.state_blocks) for group in self.groups)

    def request_bytes(self, length: int) -> int:
        """Bytes that one request of `length` tokens takes, padding layers included."""
        return self.blocks_per_request(length) * self.block_bytes

    def largest_length(self, num_blocks: int, upper: int) -> int:
        """The largest length up to `upper` of which one request fits in `num_blocks`; 0 when none does."""
        if not self.groups:
            return upper
        low, high = 0, upper
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_per_request(middle) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low


def state_bytes(state: StateSpec, dtype: str, tensor_parallel_size: int, extra_conv_rows: int = 0) -> int:
    """Bytes of one request's recurrent state in one layer of one rank.

    `extra_conv_rows` widens the first axis of a convolution state by the draft tokens of speculative decoding.
    """
    total = 0
    for index, (shape, kind, axis) in enumerate(zip(state.shapes, state.dtypes, state.tp_axes, strict=True)):
        sizes = list(shape)
        if axis is not None:
            sizes[axis] = max(1, math.ceil(sizes[axis] / tensor_parallel_size))
        if extra_conv_rows and index == 0 and state.kind in ("gdn", "mamba2"):
            sizes[0] += extra_conv_rows
        total += math.prod(sizes) * ELEMENT_BYTES[dtype if kind == "auto" else kind]
    return total


def pages_of(
    layer: LayerSpec, fmt: KvFormat, block_size: int, tensor_parallel_size: int, windows: bool
) -> list[PageKind]:
    """The pages of an attention layer; `windows` False allocates windowed layers as full attention.

    A sparse-attention indexer keeps one fp8 key a token with a 4-byte scale beside the layer's own cache.
    """
    if layer.kind == "mla":
        token = fmt.mla_bytes(layer.kv_lora_rank + layer.qk_rope_head_dim)
        widths = [token, layer.index_head_dim + 4] if layer.index_head_dim else [token]
        return [PageKind("mla", block_size, width, width * block_size) for width in widths]
    return [_dense_page(layer, fmt, block_size, tensor_parallel_size, windows)]


def _dense_page(layer: LayerSpec, fmt: KvFormat, block_size: int, tensor_parallel_size: int, windows: bool) -> PageKind:
    heads = max(1, layer.num_kv_heads // tensor_parallel_size)
    v_head_dim = layer.head_dim if layer.v_head_dim is None else layer.v_head_dim
    token = heads * fmt.head_bytes(layer.head_dim, v_head_dim)
    if windows and layer.kind in ("sliding", "chunked") and layer.window:
        return PageKind(layer.kind, block_size, token, token * block_size, layer.window)
    return PageKind("full", block_size, token, token * block_size)


@dataclass(frozen=True)
class _Page:
    """One page of one layer; a layer with an indexer has two."""

    layer: int
    kind: PageKind


def build_layout(
    layers: Sequence[LayerSpec],
    fmt: KvFormat,
    *,
    dtype: str,
    held: range | None = None,
    block_size: int,
    tensor_parallel_size: int = 1,
    windows: bool = True,
    group_ratio: float = 1.5,
    state_blocks: int = 2,
    in_flight_tokens: int = 0,
    draft_tokens: int = 0,
) -> KvLayout:
    """The layout of one rank: groups are found over the whole model, and a rank keeps its own layers of each.

    Args:
        layers: all decoder layers; those that share another's KV, encoders and mixers without state hold none.
        held: the layers of the rank; None holds all.
        windows: False where sliding layers are allocated as full attention.
        group_ratio: the largest kind sets the group size when it is less than this times the smallest.
        state_blocks: blocks of a request in each state group: 2 with prefix caching, else 1, plus draft tokens.
        in_flight_tokens: max_num_batched_tokens times the batches in flight.
    """
    own = [
        (index, layer)
        for index, layer in enumerate(layers)
        if layer.shares_kv_with is None and layer.kind not in ("encoder", "none")
    ]
    attention = [
        _Page(index, kind)
        for index, layer in own
        if layer.kind != "state"
        for kind in pages_of(layer, fmt, block_size, tensor_parallel_size, windows)
    ]
    states = [
        (index, state_bytes(layer.state, dtype, tensor_parallel_size, draft_tokens))
        for index, layer in own
        if layer.state is not None
    ]
    pages = _with_state_pages(attention, states, block_size)
    if not pages:
        return KvLayout((), 0)
    held = range(len(layers)) if held is None else held
    if len({page.kind.kind for page in pages}) == 1 and len({page.kind.window for page in pages}) == 1:
        return _one_group(pages, held, state_blocks + draft_tokens, in_flight_tokens)
    groups = _split(_unify(pages), group_ratio, held)
    size = max(group.num_layers for group in groups)
    padding = sum(size - group.num_layers for group in groups)
    block_bytes = size * groups[0].page.page_bytes
    return KvLayout(groups, block_bytes, padding, state_blocks + draft_tokens, in_flight_tokens)


def _with_state_pages(attention: list[_Page], states: list[tuple[int, int]], block_size: int) -> list[_Page]:
    """Attention blocks grow until one page holds a state; states are padded up to that page."""
    if not states:
        return attention
    largest = max(size for _, size in states)
    if not attention:
        return [_Page(layer, PageKind("state", block_size, 0, largest)) for layer, _ in states]
    token = max(page.kind.token_bytes for page in attention)
    tokens = ALIGNMENT_TOKENS * math.ceil(largest / (ALIGNMENT_TOKENS * token))
    tokens = max(tokens, block_size)
    grown = [
        replace(page, kind=replace(page.kind, block_tokens=tokens, page_bytes=page.kind.token_bytes * tokens))
        for page in attention
    ]
    return grown + [_Page(layer, PageKind("state", tokens, 0, token * tokens)) for layer, _ in states]


def _one_group(pages: list[_Page], held: range, state_blocks: int, in_flight_tokens: int) -> KvLayout:
    """One kind of attention: one group, even where layers differ in width."""
    own = [page.kind for page in pages if page.layer in held]
    if not own:
        return KvLayout((), 0)
    block_bytes = sum(kind.page_bytes for kind in own)
    return KvLayout((KvGroup(own[0], len(own)),), block_bytes, 0, state_blocks, in_flight_tokens)


def _unify(pages: list[_Page]) -> list[_Page]:
    """Equal page bytes: smaller pages take more tokens where that divides evenly, else they are padded."""
    largest = max(page.kind.page_bytes for page in pages)
    return [replace(page, kind=_grown(page.kind, largest)) for page in pages]


def _grown(kind: PageKind, page_bytes: int) -> PageKind:
    divides = kind.kind != "state" and page_bytes % kind.page_bytes == 0
    factor = page_bytes // kind.page_bytes if divides else 1
    return replace(kind, block_tokens=kind.block_tokens * factor, page_bytes=page_bytes)


def _split(pages: list[_Page], group_ratio: float, held: range) -> tuple[KvGroup, ...]:
    """Groups of equal layer count; the smallest kind sets it, or the largest if it is hardly larger.

    Every n-th layer of a kind goes to the same of its n groups, so that the layers of a pipeline stage spread evenly.
    """
    kinds: dict[PageKind, list[int]] = {}
    for page in pages:
        kinds.setdefault(page.kind, []).append(page.layer)
    counts = [len(indices) for indices in kinds.values()]
    smallest, largest = min(counts), max(counts)
    size = largest if largest < smallest * group_ratio else smallest
    groups: list[KvGroup] = []
    for kind in sorted(kinds, key=lambda kind: kind.kind not in ("full", "mla")):
        num_groups = math.ceil(len(kinds[kind]) / size)
        parts = [kinds[kind][first::num_groups] for first in range(num_groups)]
        groups += [KvGroup(kind, sum(index in held for index in part)) for part in parts]
    return tuple(groups)
