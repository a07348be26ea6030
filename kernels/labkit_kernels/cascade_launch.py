"""A shared prefix and each sequence's own keys in one launch: partial results of both, folded by the last programs.

Programs come in three kinds, in the order in which a card starts them: items over the shared keys, whose rows are the
queries of all sequences; items of the plan over each sequence's own keys; and one program for each sequence and KV head
that waits until all its partial results are counted, then folds them. A program waits only for programs before it, so
it waits for running ones. Counters are back at 0 after a launch. Reference: `reference.paged_attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from labkit_kernels.decode_plan import DecodeWorkspace, read_item
from labkit_kernels.heuristics import PrefillConfig
from labkit_kernels.merge import fold_partials, store_partial
from labkit_kernels.ops import cache_kind
from labkit_kernels.paged_decode import attend, query_rows
from labkit_kernels.paged_prefill import attend_tiles
from labkit_kernels.scores import Scores, finish_heads, score_arguments
from labkit_kernels.sizes import next_power_of_2


@triton.jit
def _count(counter):
    """Counts a stored partial result; the barrier and the release order every thread's stores before it."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def _wait_for(counter, count):
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < count:
        pass


@triton.jit
def _attend_shared(
    item, kv, q, k_cache, v_cache, blocks, partial_out, partial_lse, counters, num_tokens, length, row_blocks, qk_scale,
    softcap, fence, q_stride_token, q_stride_head, k_stride_block, k_stride_slot, k_stride_head, v_stride_block,
    v_stride_slot, v_stride_head,
    SOFTCAP: tl.constexpr, ASM: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, SAME_STRIDES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One share of the shared keys for ROWS rows (token, head of the group) of a KV head."""
    row_block, split = item % row_blocks, item // row_blocks // KV_HEADS
    share = tl.cdiv(tl.cdiv(length, TILE), SPLITS) * TILE
    start = split * share
    end = tl.minimum(start + share, length)
    masked_from = tl.maximum(start + (end - start) // TILE * TILE, start)
    r = row_block * ROWS + tl.arange(0, ROWS)
    token = (r // GROUP).to(tl.int64)
    valid = token < num_tokens
    head = kv * GROUP + r % GROUP
    d = tl.arange(0, DP)
    inside = valid[:, None] & (d < D)[None, :]
    queries = tl.load(q + (token * q_stride_token + head * q_stride_head)[:, None] + d[None, :], mask=inside, other=0.0)
    limit = r * 0 + length - 1
    k_base, v_base = k_cache + kv.to(tl.int64) * k_stride_head, v_cache + kv.to(tl.int64) * v_stride_head
    acc = tl.zeros([ROWS, DP], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for part in tl.static_range(2):
        acc, m, total = attend_tiles(
            acc, m, total, queries, limit, k_base, v_base, q, q, blocks, start if part == 0 else masked_from,
            masked_from if part == 0 else end, qk_scale, softcap, 0, tl.full([], fence, tl.float16), k_stride_block,
            k_stride_slot, v_stride_block, v_stride_slot, 0, 0, part == 1, False, SOFTCAP, False, "native", ASM, D, DP,
            TILE, BLOCK_SIZE, STAGES if part == 0 else 1, PRECISION, SAME_STRIDES,
        )  # fmt: skip
    row = (split * num_tokens + token) * (KV_HEADS * GROUP) + head
    store_partial(acc, m, total, partial_out, partial_lse, row, valid, D, DP)
    _count(counters + kv)


@triton.jit
def _attend_own(
    seq, start, end, seq_len, first, index, kv, q, k_cache, v_cache, table, partial_out, partial_lse, counters,
    qk_scale, softcap, fence, q_stride_token, q_stride_head, k_stride_block, k_stride_slot, k_stride_head,
    v_stride_block, v_stride_slot, v_stride_head,
    SOFTCAP: tl.constexpr, ASM: tl.constexpr, QUERY_LEN: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SWAP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, EVICT: tl.constexpr, SAME_STRIDES: tl.constexpr,
):  # fmt: skip
    """One item of the plan over a sequence's own keys, for a KV head."""
    r, rows = tl.arange(0, N), QUERY_LEN * GROUP
    limit = tl.where(r < rows, seq_len - QUERY_LEN + r // GROUP, -1)
    queries = query_rows(
        q, seq * QUERY_LEN, kv * GROUP, r, r < rows, q_stride_token, q_stride_head, "native", GROUP, D, DP, SWAP, 0, 1
    )  # fmt: skip
    k_base, v_base = k_cache + kv.to(tl.int64) * k_stride_head, v_cache + kv.to(tl.int64) * v_stride_head
    acc, m, total = attend(
        queries, limit, k_base, v_base, q, q, table, start, end, qk_scale, softcap, 0, tl.full([], fence, tl.float16),
        k_stride_block, k_stride_slot, v_stride_block, v_stride_slot, 0, 0, False, SOFTCAP, False, "native", ASM, D, DP,
        N, TILE, BLOCK_SIZE, SWAP, True, STAGES, PRECISION, EVICT, SAME_STRIDES,
    )  # fmt: skip
    row = ((first + index).to(tl.int64) * KV_HEADS + kv) * N + r
    store_partial(acc, m, total, partial_out, partial_lse, row, r < rows, D, DP)
    _count(counters + KV_HEADS * 2 + seq * KV_HEADS + kv)


@triton.jit
def _fold(
    seq, first, count, kv, own_out, own_lse, shared_out, shared_lse, out, lse, sinks, counters, num_tokens, num_seqs,
    shared_items, v_scale, out_stride_token, out_stride_head, lse_stride_token,
    SINKS: tl.constexpr, LSE: tl.constexpr, QUERY_LEN: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Waits for all partial results of a sequence and KV head, and writes their sum."""
    own, passed = counters + KV_HEADS * 2 + seq * KV_HEADS + kv, counters + KV_HEADS + kv
    _wait_for(own, count)
    _wait_for(counters + kv, shared_items)
    before = tl.atomic_add(passed, 1, sem="relaxed", scope="gpu")
    r = tl.arange(0, ROWS)
    valid = r < QUERY_LEN * GROUP
    base = (first.to(tl.int64) * KV_HEADS + kv) * N
    acc, m, total = fold_partials(
        tl.zeros([ROWS, DP], tl.float32), tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32),
        own_out + base * D, own_lse + base, r, valid, KV_HEADS * N, count, D, DP, ROWS, STEP,
    )  # fmt: skip
    heads: tl.constexpr = KV_HEADS * GROUP
    at = seq.to(tl.int64) * (QUERY_LEN * heads) + kv * GROUP
    acc, m, total = fold_partials(
        acc, m, total, shared_out + at * D, shared_lse + at, r // GROUP * heads + r % GROUP, valid,
        num_tokens.to(tl.int64) * heads, SPLITS, D, DP, ROWS, STEP,
    )  # fmt: skip
    head = kv * GROUP + r % GROUP
    token = (seq * QUERY_LEN + r // GROUP).to(tl.int64)
    finish_heads(
        acc, m, total, out, lse, sinks, token, head, valid, v_scale, out_stride_token, out_stride_head,
        lse_stride_token, D, DP, SINKS, LSE,
    )  # fmt: skip
    # The last sequence of a KV head to get here sets its counters back: all others have waited already.
    tl.store(own, 0)
    last = before == num_seqs - 1
    tl.store(passed, 0, mask=last)
    tl.store(counters + kv, 0, mask=last)


@triton.jit(do_not_specialize=[
    "max_items", "table_stride", "shared_items", "own_items", "num_tokens", "length", "num_seqs", "row_blocks",
])  # fmt: skip
def _cascade_decode_kernel(
    q, k_cache, v_cache, blocks, block_tables, out, lse, meta, items, counters, own_out, own_lse, shared_out,
    shared_lse, sinks, k_scale_ptr, v_scale_ptr, scale, softcap, k_scale, v_scale, fence, ks_stride, vs_stride,
    max_items, table_stride, shared_items, own_items, num_tokens, length, num_seqs, row_blocks, q_stride_token,
    q_stride_head, k_stride_block, k_stride_slot, k_stride_head, v_stride_block, v_stride_slot, v_stride_head,
    out_stride_token, out_stride_head, lse_stride_token,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SCALE_TENSORS: tl.constexpr, ASM: tl.constexpr, LSE: tl.constexpr,
    QUERY_LEN: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    N: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, SWAP: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, EVICT: tl.constexpr, STEP: tl.constexpr, SAME_STRIDES: tl.constexpr,
    SHARED_ROWS: tl.constexpr, SHARED_TILE: tl.constexpr, SHARED_STAGES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    kv = tl.where(at < shared_items, at // row_blocks, at - shared_items) % KV_HEADS
    if SCALE_TENSORS:
        k_scale *= tl.load(k_scale_ptr + kv * ks_stride)
        v_scale *= tl.load(v_scale_ptr + kv * vs_stride)
    qk_scale = scale * k_scale * 1.4426950408889634
    if at < shared_items:
        _attend_shared(
            at, kv, q, k_cache, v_cache, blocks, shared_out, shared_lse, counters, num_tokens, length, row_blocks,
            qk_scale, softcap, fence, q_stride_token, q_stride_head, k_stride_block, k_stride_slot, k_stride_head,
            v_stride_block, v_stride_slot, v_stride_head, SOFTCAP, ASM, KV_HEADS, GROUP, D, DP, SHARED_ROWS,
            SHARED_TILE, BLOCK_SIZE, SHARED_STAGES, PRECISION, SAME_STRIDES, SPLITS,
        )  # fmt: skip
    else:
        at = (at - shared_items) // KV_HEADS
        item = at % own_items
        num_items = tl.load(meta)
        seq, start, end, seq_len, first, count, index = read_item(items, max_items, item)
        if item < num_items:
            if at < own_items:
                _attend_own(
                    seq, start, end, seq_len, first, index, kv, q, k_cache, v_cache,
                    block_tables + seq.to(tl.int64) * table_stride, own_out, own_lse, counters, qk_scale, softcap,
                    fence, q_stride_token, q_stride_head, k_stride_block, k_stride_slot, k_stride_head, v_stride_block,
                    v_stride_slot, v_stride_head, SOFTCAP, ASM, QUERY_LEN, KV_HEADS, GROUP, D, DP, N, TILE, BLOCK_SIZE,
                    SWAP, STAGES, PRECISION, EVICT, SAME_STRIDES,
                )  # fmt: skip
            elif index == 0:
                _fold(
                    seq, first, count, kv, own_out, own_lse, shared_out, shared_lse, out, lse, sinks, counters,
                    num_tokens, num_seqs, shared_items // KV_HEADS, v_scale, out_stride_token, out_stride_head,
                    lse_stride_token, SINKS, LSE, QUERY_LEN, KV_HEADS, GROUP, D, DP, N, ROWS, STEP, SPLITS,
                )  # fmt: skip


def launch_cascade(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    blocks: torch.Tensor,
    length: int,
    block_tables: torch.Tensor,
    scores: Scores,
    workspace: DecodeWorkspace,
    config: PrefillConfig,
    splits: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """The launch on checked arguments: a cache of q's dtype, and a workspace planned for the own keys.

    blocks and length: the shared prefix. config: rows, tile and stages of the items over it, cut into `splits` shares;
    warps are those of the workspace's own settings.
    """
    own, kv_heads, group = workspace.config, k_cache.shape[2], q.shape[1] // k_cache.shape[2]
    arguments = score_arguments(scores, q, cache_kind(k_cache))
    padded = next_power_of_2(q.shape[2])
    rows = next_power_of_2(group * workspace.query_len)
    num_seqs = block_tables.shape[0]
    items = workspace.max_items if workspace.fixed else workspace.max_items + num_seqs - workspace.max_batch
    row_blocks = triton.cdiv(q.shape[0] * group, config.rows)
    shared_items = row_blocks * kv_heads * splits
    shared_out = torch.empty(splits, *q.shape, dtype=torch.float32, device=q.device)
    shared_lse = torch.empty(splits, *q.shape[:2], dtype=torch.float32, device=q.device)
    scale, softcap, _, k_scale, v_scale, fence, ks_stride, vs_stride = arguments.numbers[:8]
    switches = {name: arguments.switches[name] for name in ("SOFTCAP", "SINKS", "SCALE_TENSORS", "ASM")}
    _cascade_decode_kernel[(shared_items + 2 * items * kv_heads,)](
        q, k_cache, v_cache, blocks, block_tables, out, out if lse is None else lse, workspace.meta, workspace.items,
        workspace.cascade_counters, workspace.partial_out, workspace.partial_lse, shared_out, shared_lse,
        *arguments.tensors[:3], scale, softcap, k_scale, v_scale, fence, ks_stride, vs_stride, workspace.max_items,
        block_tables.stride(0), shared_items, items, q.shape[0], length, num_seqs, row_blocks, q.stride(0), q.stride(1),
        *k_cache.stride()[:3], *v_cache.stride()[:3], out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0),
        **switches, LSE=lse is not None, QUERY_LEN=workspace.query_len, KV_HEADS=kv_heads, GROUP=group, D=q.shape[2],
        DP=padded, N=workspace.rows, ROWS=rows, TILE=own.tile, BLOCK_SIZE=k_cache.shape[1], SWAP=own.swap,
        STAGES=own.stages, PRECISION="ieee" if q.dtype is torch.float32 else "tf32", EVICT=own.evict,
        STEP=max(1, own.merge // (rows * padded)), SAME_STRIDES=k_cache.stride() == v_cache.stride(),
        SHARED_ROWS=config.rows, SHARED_TILE=config.tile, SHARED_STAGES=config.stages, SPLITS=splits,
        num_warps=own.warps,
    )  # fmt: skip
