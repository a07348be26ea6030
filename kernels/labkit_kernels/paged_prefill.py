"""Paged attention of prefills and chunks of any length, mixed in one launch, causal over the cached context.

Reference: `labkit_kernels.reference.paged_attention`. Rows of the matrix instruction are (token, head of the group), so
a KV tile is read once for all query heads of its KV head. The new tokens are read from the cache, written before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from labkit_kernels.checks import KernelValueError, check_cache, check_lengths, check_out
from labkit_kernels.heuristics import (
    MAX_SPLITS,
    MIN_TILES_OF_SPLIT,
    DecodeConfig,
    PrefillConfig,
    num_slots,
    prefill_config,
)
from labkit_kernels.launches import Launches
from labkit_kernels.merge import Partials, merge_splits, store_partial
from labkit_kernels.ops import (
    block_ids,
    cache_kind,
    capability,
    load_rows,
    readable,
    row_offsets,
    soft_cap,
    to_compute,
)
from labkit_kernels.scores import Scores, finish_rows, score_arguments
from labkit_kernels.sizes import next_power_of_2

_LAUNCHES = Launches()


@triton.jit
def _find_sequence(query_start_loc, block, batch, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Sequence of a row block: the last i with query_start_loc[i] · GROUP // ROWS + i <= block, or -1.

    Each sequence thus owns at least as many blocks as it has rows to fill; the blocks left over return at once.
    """
    low = 0
    high = batch
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) * GROUP // ROWS + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _tile_scores(
    q, k, tokens, limit, ks, qk_scale, softcap, window,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TOKEN_SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores `[rows, tokens]` in base 2 after `multiplier`, which stays out of them where one FMA can take it along."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if TOKEN_SCALES:
        s = s * ks[None, :]
    if SOFTCAP:
        s = soft_cap(s * (qk_scale * 0.6931471805599453), softcap) * 1.4426950408889634
    if MASKED:
        visible = tokens[None, :] <= limit[:, None]
        if WINDOW:
            visible = visible & (tokens[None, :] > (limit - window)[:, None])
        s = tl.where(visible, s, float("-inf"))
    return s


@triton.jit
def attend_tiles(
    acc, m, total, q, limit, k_base, v_base, k_tokens, v_tokens, table, start, end, qk_scale, softcap, window, fence,
    k_stride_block, k_stride_slot, v_stride_block, v_stride_slot, ts_stride_block, ts_stride_slot,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TOKEN_SCALES: tl.constexpr,
    KIND: tl.constexpr, ASM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, SAME_STRIDES: tl.constexpr,
):  # fmt: skip
    """Online softmax over tokens start … end, start being a whole number of tiles."""
    offs = tl.arange(0, TILE)
    d = tl.arange(0, DP)
    multiplier = qk_scale
    if SOFTCAP:
        multiplier = 1.0
    ahead = block_ids(table, start, offs, end, BLOCK_SIZE, TILE)
    for at in tl.range(start, end, TILE, num_stages=STAGES):
        blocks = ahead
        ahead = block_ids(table, at + TILE, offs, end, BLOCK_SIZE, TILE)
        tokens = at + offs
        mask = (d < D)[None, :]
        if MASKED:
            mask = mask & (tokens < end)[:, None]
        k_at = row_offsets(blocks, at, offs, k_stride_block, k_stride_slot, BLOCK_SIZE, TILE)
        k = to_compute(load_rows(k_base, k_at[:, None] + d[None, :], mask, MASKED or D != DP, ""), fence, KIND, ASM)
        ks = tokens
        if TOKEN_SCALES:
            ts_at = row_offsets(blocks, at, offs, ts_stride_block, ts_stride_slot, BLOCK_SIZE, TILE)
            ks = tl.load(k_tokens + ts_at, mask=tokens < end, other=0.0)
        s = _tile_scores(
            q, k, tokens, limit, ks, qk_scale, softcap, window, MASKED, WINDOW, SOFTCAP, TOKEN_SCALES, PRECISION
        )
        m_new = tl.maximum(m, tl.max(s, 1) * multiplier)
        safe = m_new
        if MASKED:
            safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - safe)
        p = tl.exp2(s * multiplier - safe[:, None])
        total = total * alpha + tl.sum(p, 1)
        m = m_new
        if TOKEN_SCALES:
            p = p * (tl.load(v_tokens + ts_at, mask=tokens < end, other=0.0)[None, :] * 256.0)
        v_at = k_at
        if not SAME_STRIDES:
            v_at = row_offsets(blocks, at, offs, v_stride_block, v_stride_slot, BLOCK_SIZE, TILE)
        v = to_compute(load_rows(v_base, v_at[:, None] + d[None, :], mask, MASKED or D != DP, ""), fence, KIND, ASM)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, m, total


@triton.jit
def _key_range(
    context, query_len, row_start, window, split,
    GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """First and last key of a program's share, and from where on not every row sees every key."""
    start = 0
    end = context + query_len
    masked_from = end // TILE * TILE
    if CAUSAL:
        end = context + tl.minimum((row_start + ROWS - 1) // GROUP, query_len - 1) + 1
        masked_from = (context + row_start // GROUP + 1) // TILE * TILE
    if WINDOW:
        start = tl.maximum(context + row_start // GROUP - window + 1, 0) // TILE * TILE
        masked_from = start
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end - start, TILE), SPLITS) * TILE
        start += split * share
        end = tl.minimum(start + share, end)
        masked_from = tl.minimum(tl.maximum(masked_from, start), end)
    return start, end, masked_from


@triton.jit(do_not_specialize=["batch", "window", "table_stride", "num_rows"])
def _prefill_kernel(
    q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, out, lse, partial_out, partial_lse,
    sinks, k_scale_ptr, v_scale_ptr, k_tokens, v_tokens,
    scale, softcap, window, k_scale, v_scale, fence, ks_stride, vs_stride,
    ts_stride_block, ts_stride_slot, ts_stride_head, batch, table_stride, num_rows,
    q_stride_token, q_stride_head, k_stride_block, k_stride_slot, k_stride_head,
    v_stride_block, v_stride_slot, v_stride_head, out_stride_token, out_stride_head, lse_stride_token,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SCALE_TENSORS: tl.constexpr,
    TOKEN_SCALES: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr, LSE: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr, TAIL_TILE: tl.constexpr, TAIL_STAGES: tl.constexpr,
    PRECISION: tl.constexpr, SAME_STRIDES: tl.constexpr, CAUSAL: tl.constexpr,
    SPLITS: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    # Blocks from the end first: they see the most keys, and short ones fill the tail.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    seq = _find_sequence(query_start_loc, block, batch, GROUP, ROWS)
    if seq < 0:
        return
    q_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - q_start
    row_start = (block - (q_start * GROUP // ROWS + seq)) * ROWS
    if row_start >= query_len * GROUP:
        return
    r = row_start + tl.arange(0, ROWS)
    valid = r < query_len * GROUP
    context = tl.load(seq_lens + seq) - query_len
    query = tl.minimum(r // GROUP, query_len - 1)
    limit = context + query
    head = tl.program_id(1) * GROUP + r % GROUP
    token = (q_start + query).to(tl.int64)
    d = tl.arange(0, DP)
    inside = valid[:, None] & (d < D)[None, :]
    queries = tl.load(q + (token * q_stride_token + head * q_stride_head)[:, None] + d[None, :], mask=inside, other=0.0)
    if KIND != "native":
        queries = queries.to(tl.float16)
    if SCALE_TENSORS:
        k_scale *= tl.load(k_scale_ptr + kv_head * ks_stride)
        v_scale *= tl.load(v_scale_ptr + kv_head * vs_stride)
    if TOKEN_SCALES:
        v_scale *= 0.00390625
    start, end, masked_from = _key_range(
        context, query_len, row_start, window, tl.program_id(2), GROUP, ROWS, TILE, WINDOW, CAUSAL, SPLITS
    )
    if not CAUSAL:
        limit = limit * 0 + context + query_len - 1
    qk_scale = scale * k_scale * 1.4426950408889634
    acc = tl.zeros([ROWS, DP], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for part in tl.static_range(2):
        if part == 1 or not WINDOW:
            acc, m, total = attend_tiles(
                acc, m, total, queries, limit, k_cache + kv_head * k_stride_head, v_cache + kv_head * v_stride_head,
                k_tokens + kv_head * ts_stride_head, v_tokens + kv_head * ts_stride_head,
                block_tables + seq.to(tl.int64) * table_stride, start if part == 0 else masked_from,
                masked_from if part == 0 else end, qk_scale, softcap, window, tl.full([], fence, tl.float16),
                k_stride_block, k_stride_slot, v_stride_block, v_stride_slot, ts_stride_block, ts_stride_slot,
                part == 1, WINDOW, SOFTCAP, TOKEN_SCALES, KIND, ASM, D, DP,
                TILE if part == 0 else TAIL_TILE, BLOCK_SIZE, STAGES if WINDOW or part == 0 else TAIL_STAGES,
                PRECISION, SAME_STRIDES,
            )  # fmt: skip
    if SPLITS > 1:
        row = (tl.program_id(2) * num_rows + token) * tl.num_programs(1) * GROUP + head
        store_partial(acc, m, total, partial_out, partial_lse, row, valid, D, DP)
    else:
        sink = m
        if SINKS:
            sink = tl.load(sinks + head) * 1.4426950408889634
        finish_rows(
            acc, m, total, out, lse, token * out_stride_token + head * out_stride_head,
            token * lse_stride_token + head, valid, sink, v_scale, D, DP, SINKS, LSE,
        )  # fmt: skip


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scores: Scores,
    *,
    max_query_len: int,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    config: PrefillConfig | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Attention of chunks over their cached context; returns `out [tokens, q heads, head size]`.

    Sequence i brings the query tokens query_start_loc[i] … query_start_loc[i + 1] of q, the last of its seq_lens[i]
    tokens; K and V of all of them are in the cache. Rows of q before the first and after the last sequence belong to
    nobody: their output is left as it is. max_query_len chooses the launch settings only: any bound that does not
    change under a CUDA graph. num_splits cuts the keys for batches too small to fill the card (None: chosen
    from the shapes). Tensors as in `paged_decode`. Raises KernelValueError or KernelTypeError naming the argument.
    """
    out = torch.empty_like(q) if out is None else out
    tensors = (q, k_cache, v_cache, block_tables, seq_lens, query_start_loc)
    if config is not None and num_splits is not None and _again(tensors, scores, config, num_splits, out, lse):
        return out
    check_cache(q, k_cache, v_cache, block_tables)
    check_lengths(q, block_tables, seq_lens, query_start_loc)
    scores.check(q, k_cache)
    if max_query_len < 1:
        raise KernelValueError(f"max_query_len is {max_query_len}; it must be at least 1")
    check_out("out", out, q.shape, q.dtype, q.device)
    if lse is not None:
        check_out("lse", lse, q.shape[:2], torch.float32, q.device)
    if seq_lens.shape[0] == 0 or q.shape[0] == 0:
        return out
    group = q.shape[1] // k_cache.shape[2]
    kind = cache_kind(k_cache)
    config = config or prefill_config(capability(q.device), kind, q.shape[2], max_query_len * group)
    splits = num_splits or choose_splits(q, k_cache, block_tables, config)
    if splits == 1:
        launch_prefill(*tensors, scores, config, out=out, lse=lse)
        return out
    partials = launch_prefill(*tensors, scores, config, splits=splits)
    merge_splits(partials, scores, out, lse, bounds=query_start_loc)
    return out


def _again(tensors, scores, config, splits, out, lse) -> bool:
    """`paged_prefill` where it was launched with arguments like these; False where it was not."""
    partials = _partials(tensors[0], splits)
    target = (out, lse) if partials is None else (None, None)
    if not _LAUNCHES.again(_parts(tensors, scores, *target, partials), config, splits, True, False):
        return False
    if partials is not None:
        merge_splits(partials, scores, out, lse, bounds=tensors[-1])
    return True


def _parts(tensors, scores, out, lse, partials) -> tuple:
    """The kernel's pointers as `Launches` takes them."""
    return (*tensors, out, lse, *((None, None) if partials is None else (partials.out, partials.lse)), scores)


def _partials(q: torch.Tensor, splits: int) -> Partials | None:
    if splits == 1:
        return None
    return Partials(
        torch.empty(splits, *q.shape, dtype=torch.float32, device=q.device),
        torch.empty(splits, *q.shape[:2], dtype=torch.float32, device=q.device),
    )


def choose_splits(q: torch.Tensor, k_cache: torch.Tensor, block_tables: torch.Tensor, config: PrefillConfig) -> int:
    """Shares of the keys that fill the card, from shapes alone; 1 where the row blocks fill half of it already."""
    group = q.shape[1] // k_cache.shape[2]
    programs = (q.shape[0] * group // config.rows + block_tables.shape[0]) * k_cache.shape[2]
    slots = num_slots(q.device, DecodeConfig(ctas_per_sm=1))
    tiles = block_tables.shape[1] * k_cache.shape[1] // config.tile
    return max(1, min(slots // programs, tiles // MIN_TILES_OF_SPLIT, MAX_SPLITS)) if 2 * programs <= slots else 1


def launch_prefill(
    q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, scores, config, *, splits=1, causal=True, out=None,
    lse=None, trigger=False,
) -> Partials | None:  # fmt: skip
    """One launch on checked arguments; with splits > 1 its partial results, to be merged.

    trigger: a next launch that asks for it may begin at once, and waits itself for what it needs of this one.
    """
    kind, group = cache_kind(k_cache), q.shape[1] // k_cache.shape[2]
    arguments = score_arguments(scores, q, kind)
    blocks = q.shape[0] * group // config.rows + seq_lens.shape[0]
    partials = _partials(q, splits)
    tensors = (q, k_cache, v_cache, block_tables, seq_lens, query_start_loc)
    parts = _parts(tensors, scores, out, lse, partials)
    out = q if out is None else out
    _LAUNCHES.first(
        parts, (config, splits, causal, trigger), _prefill_kernel, (blocks, k_cache.shape[2], splits),
        q, readable(k_cache, kind), readable(v_cache, kind), block_tables, seq_lens, query_start_loc, out,
        out if lse is None else lse, q if partials is None else partials.out, q if partials is None else partials.lse,
        *arguments.tensors, *arguments.numbers, seq_lens.shape[0], block_tables.stride(0), q.shape[0],
        q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
        out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0), **arguments.switches, LSE=lse is not None,
        GROUP=group, D=q.shape[2], DP=next_power_of_2(q.shape[2]), ROWS=config.rows, TILE=config.tile,
        BLOCK_SIZE=k_cache.shape[1], STAGES=config.stages, TAIL_TILE=min(config.tile, config.tail_tile),
        TAIL_STAGES=config.tail_stages, PRECISION="ieee" if q.dtype is torch.float32 else "tf32",
        SAME_STRIDES=k_cache.stride() == v_cache.stride(), CAUSAL=causal, SPLITS=splits, TRIGGER=trigger,
        num_warps=config.warps,
    )  # fmt: skip
    return partials
