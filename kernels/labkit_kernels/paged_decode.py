"""Paged decode attention: 1 to 8 query tokens a sequence, the query heads of a KV head in one program, split over KV.

Reference: `labkit_kernels.reference.paged_attention`. The softmax is the online one of FlashAttention (arXiv
2205.14135) in base 2; partial results are merged by their log-sum-exp (arXiv 2402.05099) by the program that finishes
last, in a fixed order, so repeated runs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from labkit_kernels.checks import KernelTypeError, KernelValueError, check_cache, check_lengths, check_out
from labkit_kernels.decode_plan import DecodeWorkspace, read_item
from labkit_kernels.launches import look
from labkit_kernels.merge import Partials, fold_partials, store_partial
from labkit_kernels.ops import (
    block_ids,
    cache_kind,
    load_rows,
    overlaps_launches,
    readable,
    row_offsets,
    soft_cap,
    to_compute,
)
from labkit_kernels.scores import Scores, by_row, by_token, finish_heads, score_arguments, sequence_rows
from labkit_kernels.sizes import next_power_of_2
from labkit_kernels.words import as_words, unpack, word_factor, word_kind


@triton.jit
def _finish_scores(
    s, tokens, limit, k_tokens, qk_scale, softcap, window,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TOKEN_SCALES: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Base-2 scores of a tile from its products, -inf where a row may not look."""
    if TOKEN_SCALES:
        s = s * by_token(k_tokens, SWAP)
    s = s * qk_scale
    if SOFTCAP:
        s = soft_cap(s * 0.6931471805599453, softcap) * 1.4426950408889634
    visible = by_token(tokens, SWAP) <= by_row(limit, SWAP)
    if WINDOW:
        visible = visible & (by_token(tokens, SWAP) > by_row(limit - window, SWAP))
    return tl.where(visible, s, float("-inf"))


@triton.jit
def _softmax_step(s, m, sums, SWAP: tl.constexpr):
    """Weights of a tile and the running maximum, sums and rescale factor of the online softmax, base 2."""
    m_new = tl.maximum(m, tl.max(s, 0 if SWAP else 1))
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = by_row(tl.exp2(m - safe), SWAP)
    p = tl.exp2(s - by_row(safe, SWAP))
    return p, alpha, m_new, sums * alpha + p


@triton.jit
def attend(
    q, limit, k_base, v_base, k_tokens, v_tokens, table, start, end, qk_scale, softcap, window, fence,
    k_stride_block, k_stride_slot, v_stride_block, v_stride_slot, ts_stride_block, ts_stride_slot,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TOKEN_SCALES: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SWAP: tl.constexpr, PREFETCH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, EVICT: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
):  # fmt: skip
    """Online softmax over tokens start … end: output not yet divided, row maxima (base 2), row sums."""
    TOKENS: tl.constexpr = 0 if SWAP else 1
    offs = tl.arange(0, TILE)
    d = tl.arange(0, DP)
    m = tl.full([N], float("-inf"), tl.float32)
    if SWAP:
        sums = tl.zeros([TILE, N], tl.float32)
        acc = tl.zeros([DP, N], tl.float32)
    else:
        sums = tl.zeros([N, TILE], tl.float32)
        acc = tl.zeros([N, DP], tl.float32)
    ahead = block_ids(table, start, offs, end, BLOCK_SIZE, TILE)
    for at in tl.range(start, end, TILE, num_stages=STAGES):
        if PREFETCH:
            blocks = ahead
            ahead = block_ids(table, at + TILE, offs, end, BLOCK_SIZE, TILE)
        else:
            blocks = block_ids(table, at, offs, end, BLOCK_SIZE, TILE)
        tokens = at + offs
        # Keys past the end are masked as scores; values there must be 0, since 0 times NaN is NaN.
        inside = (d < D)[None, :]
        k_at = row_offsets(blocks, at, offs, k_stride_block, k_stride_slot, BLOCK_SIZE, TILE)
        k = to_compute(load_rows(k_base, k_at[:, None] + d[None, :], inside, D != DP, EVICT), fence, KIND, ASM)
        ks = tokens
        if TOKEN_SCALES:
            ts_at = row_offsets(blocks, at, offs, ts_stride_block, ts_stride_slot, BLOCK_SIZE, TILE)
            ks = tl.load(k_tokens + ts_at, mask=tokens < end, other=0.0)
        if SWAP:
            s = tl.dot(k, q, input_precision=PRECISION)
        if not SWAP:
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s = _finish_scores(
            s, tokens, limit, ks, qk_scale, softcap, window, WINDOW, SOFTCAP, TOKEN_SCALES, SWAP
        )  # fmt: skip
        p, alpha, m, sums = _softmax_step(s, m, sums, SWAP)
        if TOKEN_SCALES:
            # 2⁸ keeps weights times small scales out of fp16's subnormals; `value_scale` takes it back.
            p = p * (by_token(tl.load(v_tokens + ts_at, mask=tokens < end, other=0.0), SWAP) * 256.0)
        v_at = k_at
        if not SAME_STRIDES:
            v_at = row_offsets(blocks, at, offs, v_stride_block, v_stride_slot, BLOCK_SIZE, TILE)
        written = inside & (tokens < end)[:, None]
        v = to_compute(load_rows(v_base, v_at[:, None] + d[None, :], written, True, EVICT), fence, KIND, ASM)
        if SWAP:
            acc = tl.dot(tl.trans(v), p.to(v.dtype), acc * alpha, input_precision=PRECISION)
        else:
            acc = tl.dot(p.to(v.dtype), v, acc * alpha, input_precision=PRECISION)
    if SWAP:
        acc = tl.trans(acc)
    return acc, m, tl.sum(sums, TOKENS)


@triton.jit
def _attend_words(
    q, limit, k_base, v_base, k_tokens, v_tokens, table, start, end, qk_scale, softcap, window,
    k_stride_block, k_stride_slot, v_stride_block, v_stride_slot, ts_stride_block, ts_stride_slot,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TOKEN_SCALES: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr, EVICT: tl.constexpr, SAME_STRIDES: tl.constexpr,
):  # fmt: skip
    """`attend` over an 8-bit cache read as words; q is four tiles of every fourth head dimension."""
    q0, q1, q2, q3 = q
    offs = tl.arange(0, TILE)
    w = tl.arange(0, DP // 4)
    m = tl.full([N], float("-inf"), tl.float32)
    sums = tl.zeros([N, TILE], tl.float32)
    acc0 = tl.zeros([N, DP // 4], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    ahead = block_ids(table, start, offs, end, BLOCK_SIZE, TILE)
    for at in tl.range(start, end, TILE, num_stages=STAGES):
        blocks = ahead
        ahead = block_ids(table, at + TILE, offs, end, BLOCK_SIZE, TILE)
        tokens = at + offs
        inside = (w < D // 4)[None, :]
        k_at = row_offsets(blocks, at, offs, k_stride_block, k_stride_slot, BLOCK_SIZE, TILE)
        k0, k1, k2, k3 = unpack(load_rows(k_base, k_at[:, None] + w[None, :], inside, D != DP, EVICT), KIND, ASM)
        ks = tokens
        if TOKEN_SCALES:
            ts_at = row_offsets(blocks, at, offs, ts_stride_block, ts_stride_slot, BLOCK_SIZE, TILE)
            ks = tl.load(k_tokens + ts_at, mask=tokens < end, other=0.0)
        s = tl.dot(q1, tl.trans(k1), tl.dot(q0, tl.trans(k0)))
        s = tl.dot(q3, tl.trans(k3), tl.dot(q2, tl.trans(k2), s))
        s = _finish_scores(
            s, tokens, limit, ks, qk_scale, softcap, window, WINDOW, SOFTCAP, TOKEN_SCALES, False
        )  # fmt: skip
        p, alpha, m, sums = _softmax_step(s, m, sums, False)
        if TOKEN_SCALES:
            p = p * (tl.load(v_tokens + ts_at, mask=tokens < end, other=0.0)[None, :] * 256.0)
        v_at = k_at
        if not SAME_STRIDES:
            v_at = row_offsets(blocks, at, offs, v_stride_block, v_stride_slot, BLOCK_SIZE, TILE)
        written = inside & (tokens < end)[:, None]
        v0, v1, v2, v3 = unpack(load_rows(v_base, v_at[:, None] + w[None, :], written, True, EVICT), KIND, ASM)
        p = p.to(tl.float16)
        acc0 = tl.dot(p, v0, acc0 * alpha)
        acc1 = tl.dot(p, v1, acc1 * alpha)
        acc2 = tl.dot(p, v2, acc2 * alpha)
        acc3 = tl.dot(p, v3, acc3 * alpha)
    acc = tl.reshape(tl.join(tl.join(acc0, acc2), tl.join(acc1, acc3)), [N, DP])
    return acc, m, tl.sum(sums, 1)


@triton.jit
def query_rows(
    q, q_start, q_head, rows, valid, q_stride_token, q_stride_head, KIND: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, SWAP: tl.constexpr, FIRST: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Query rows of one program, token-major then head, dimensions FIRST, FIRST + EVERY, …; fp16 for 8-bit caches."""
    d = FIRST + EVERY * tl.arange(0, DP // EVERY)
    at = (q_start + rows // HEADS).to(tl.int64) * q_stride_token + (q_head + rows % HEADS) * q_stride_head
    x = tl.load(q + at[:, None] + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
    if KIND != "native":
        x = x.to(tl.float16)
    if SWAP:
        x = tl.trans(x)
    return x


@triton.jit
def _query_words(
    q, q_start, q_head, rows, valid, q_stride_token, q_stride_head, KIND: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Query rows as four tiles, as `unpack` gives the keys."""
    q0 = query_rows(q, q_start, q_head, rows, valid, q_stride_token, q_stride_head, KIND, HEADS, D, DP, False, 0, 4)
    q1 = query_rows(q, q_start, q_head, rows, valid, q_stride_token, q_stride_head, KIND, HEADS, D, DP, False, 1, 4)
    q2 = query_rows(q, q_start, q_head, rows, valid, q_stride_token, q_stride_head, KIND, HEADS, D, DP, False, 2, 4)
    q3 = query_rows(q, q_start, q_head, rows, valid, q_stride_token, q_stride_head, KIND, HEADS, D, DP, False, 3, 4)
    return q0, q1, q2, q3


@triton.jit
def _write_rows(
    acc, m, total, out, lse, sinks, shared_out, shared_lse, q_heads, shared_stride, q_start, q_head, rows, value_scale,
    out_stride_token, out_stride_head, lse_stride_token, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    N: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, SHARED: tl.constexpr, WAIT: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Finishes the rows of one sequence and program, adding SHARED results over keys before its own."""
    r = tl.arange(0, N)
    valid = r < rows
    head = q_head + r % HEADS
    token = (q_start + r // HEADS).to(tl.int64)
    if SHARED > 0:
        if WAIT:
            tl.extra.cuda.gdc_wait()
        first = q_start.to(tl.int64) * q_heads + q_head
        row = r // HEADS * q_heads + r % HEADS
        acc, m, total = fold_partials(
            acc, m, total, shared_out + first * D, shared_lse + first, row, valid, shared_stride.to(tl.int64), SHARED,
            D, DP, N, STEP,
        )  # fmt: skip
    finish_heads(
        acc, m, total, out, lse, sinks, token, head, valid, value_scale, out_stride_token, out_stride_head,
        lse_stride_token, D, DP, SINKS, LSE,
    )  # fmt: skip


@triton.jit
def _arrive(counter, count):
    """Whether this program is the last of `count` to come here; the last one sets the counter back to 0.

    The barrier and the release order every thread's partial results before the count.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit(do_not_specialize=["window", "max_items", "table_stride", "shared_stride"])
def _decode_kernel(
    q, k_cache, v_cache, block_tables, query_start_loc, out, lse, meta, items, counters, partial_out, partial_lse,
    shared_out, shared_lse, sinks, k_scale_ptr, v_scale_ptr, k_tokens, v_tokens, scale, softcap, window, k_scale,
    v_scale, fence, ks_stride, vs_stride, ts_stride_block, ts_stride_slot, ts_stride_head, max_items, table_stride,
    shared_stride, q_stride_token, q_stride_head, k_stride_block, k_stride_slot, k_stride_head, v_stride_block,
    v_stride_slot, v_stride_head, out_stride_token, out_stride_head, lse_stride_token, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SCALE_TENSORS: tl.constexpr, TOKEN_SCALES: tl.constexpr,
    KIND: tl.constexpr, ASM: tl.constexpr, LSE: tl.constexpr, RAGGED: tl.constexpr, QUERY_LEN: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, PROGRAMS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    N: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, SWAP: tl.constexpr,
    PREFETCH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, EVICT: tl.constexpr, STEP: tl.constexpr,
    SAME_STRIDES: tl.constexpr, WORDS: tl.constexpr, SHARED: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    item, program = tl.program_id(0) // PROGRAMS, tl.program_id(0) % PROGRAMS
    # All fields at once, before the exit: one round trip to memory instead of a chain of them.
    num_items = tl.load(meta)
    seq, start, end, seq_len, first, count, index = read_item(items, max_items, item)
    if item >= num_items:
        return
    q_start, query_len = sequence_rows(query_start_loc, seq, QUERY_LEN, RAGGED)
    kv_head = (program * HEADS // GROUP).to(tl.int64)
    r, rows = tl.arange(0, N), query_len * HEADS
    limit = tl.where(r < rows, seq_len - query_len + r // HEADS, -1)
    if SCALE_TENSORS:
        k_scale *= tl.load(k_scale_ptr + kv_head * ks_stride)
        v_scale *= tl.load(v_scale_ptr + kv_head * vs_stride)
    if TOKEN_SCALES:
        v_scale *= 0.00390625
    k_base, v_base = k_cache + kv_head * k_stride_head, v_cache + kv_head * v_stride_head
    ks_base, vs_base = k_tokens + kv_head * ts_stride_head, v_tokens + kv_head * ts_stride_head
    table = block_tables + seq.to(tl.int64) * table_stride
    qk_scale = scale * k_scale * 1.4426950408889634
    if WORDS:
        queries = _query_words(
            q, q_start, program * HEADS, r, r < rows, q_stride_token, q_stride_head, KIND, HEADS, D, DP
        )
        acc, m, total = _attend_words(
            queries, limit, k_base, v_base, ks_base, vs_base, table, start, end, qk_scale, softcap, window,
            k_stride_block, k_stride_slot, v_stride_block, v_stride_slot, ts_stride_block, ts_stride_slot,
            WINDOW, SOFTCAP, TOKEN_SCALES, KIND, ASM, D, DP, N, TILE, BLOCK_SIZE, STAGES, EVICT, SAME_STRIDES,
        )  # fmt: skip
    else:
        queries = query_rows(
            q, q_start, program * HEADS, r, r < rows, q_stride_token, q_stride_head, KIND, HEADS, D, DP, SWAP, 0, 1
        )
        acc, m, total = attend(
            queries, limit, k_base, v_base, ks_base, vs_base, table, start, end, qk_scale, softcap, window,
            tl.full([], fence, tl.float16), k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
            ts_stride_block, ts_stride_slot, WINDOW, SOFTCAP, TOKEN_SCALES, KIND, ASM, D, DP, N, TILE, BLOCK_SIZE, SWAP,
            PREFETCH, STAGES, PRECISION, EVICT, SAME_STRIDES,
        )  # fmt: skip
    q_heads = PROGRAMS * HEADS
    if count == 1:
        _write_rows(
            acc, m, total, out, lse, sinks, shared_out, shared_lse, q_heads, shared_stride, q_start, program * HEADS,
            rows, v_scale, out_stride_token, out_stride_head, lse_stride_token, HEADS, D, DP, N, SINKS, LSE, SHARED,
            WAIT, STEP * ROWS // N if STEP * ROWS > N else 1,
        )  # fmt: skip
    else:
        # Scratch rows: partial result of the sequence, program, row of the program.
        base = (first.to(tl.int64) * PROGRAMS + program) * N
        store_partial(acc, m, total, partial_out, partial_lse, base + index * (PROGRAMS * N) + r, r < rows, D, DP)
        if _arrive(counters + seq * PROGRAMS + program, count):
            part = tl.arange(0, ROWS)
            acc2, m2, total2 = fold_partials(
                tl.zeros([ROWS, DP], tl.float32), tl.full([ROWS], float("-inf"), tl.float32),
                tl.zeros([ROWS], tl.float32), partial_out + base * D, partial_lse + base, part, part < rows,
                PROGRAMS * N, count, D, DP, ROWS, STEP,
            )  # fmt: skip
            _write_rows(
                acc2, m2, total2, out, lse, sinks, shared_out, shared_lse, q_heads, shared_stride, q_start,
                program * HEADS, rows, v_scale, out_stride_token, out_stride_head, lse_stride_token, HEADS, D, DP,
                ROWS, SINKS, LSE, SHARED, WAIT, STEP,
            )  # fmt: skip


def check_workspace(
    workspace: DecodeWorkspace, q: torch.Tensor, k_cache: torch.Tensor, scores: Scores, num_seqs: int | None
) -> None:
    """Raises KernelValueError or KernelTypeError unless the workspace was made for such a call; num_seqs: sequences
    that have equally many query tokens, None where they have not."""
    wanted = (workspace.num_q_heads, workspace.num_kv_heads, workspace.head_dim)
    given = (q.shape[1], k_cache.shape[2], q.shape[2])
    if wanted != given:
        raise KernelValueError(f"the workspace is for (q heads, KV heads, head size) {wanted}; the call has {given}")
    if workspace.window != scores.window:
        raise KernelValueError(f"the workspace was planned for window {workspace.window}; the call has {scores.window}")
    if workspace.kv_dtype != k_cache.dtype:
        raise KernelTypeError(f"the workspace is for KV dtype {workspace.kv_dtype}; the cache has {k_cache.dtype}")
    if num_seqs is not None and q.shape[0] != num_seqs * workspace.query_len:
        raise KernelValueError(
            f"q has {q.shape[0]} tokens; {num_seqs} sequences of {workspace.query_len} tokens have "
            f"{num_seqs * workspace.query_len}"
        )


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scores: Scores,
    *,
    workspace: DecodeWorkspace | None = None,
    query_start_loc: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    shared: Partials | None = None,
) -> torch.Tensor:
    """Attention of each sequence's last tokens over its cached keys; returns `out [tokens, q heads, head size]`.

    q `[tokens, q heads, head size]` bf16, fp16 or fp32; k_cache, v_cache `[blocks, block size, KV heads, head size]` in
    q's dtype, fp8 e4m3/e5m2, int8, or uint8 (e4m3 as bits), any strides with a contiguous last dimension; block_tables
    int32 `[sequences, blocks]`; seq_lens int32 `[sequences]` with the query tokens counted (0 gives zeros).
    query_start_loc int32 `[sequences + 1]` where sequences have different numbers of query tokens. lse float32
    `[tokens, q heads]` is filled where given. With a `workspace` the caller has run `workspace.plan(seq_lens)` for this
    step; without one a plan is made and dropped. shared: results of the same queries over keys before these, which the
    launch just before this one makes; they are added. Raises KernelValueError or KernelTypeError naming the argument.
    """
    out = torch.empty_like(q) if out is None else out
    settings = () if query_start_loc is None else look(seq_lens)
    if workspace is not None:
        parts = _parts(
            q, k_cache, v_cache, block_tables, seq_lens, scores, workspace, query_start_loc, out, lse, shared
        )
        if workspace.launches.again(parts, *settings):
            return out
    check_cache(q, k_cache, v_cache, block_tables)
    check_lengths(q, block_tables, seq_lens, query_start_loc)
    scores.check(q, k_cache)
    batch = seq_lens.shape[0]
    check_out("out", out, q.shape, q.dtype, q.device)
    if lse is not None:
        check_out("lse", lse, q.shape[:2], torch.float32, q.device)
    if batch == 0 or q.shape[0] == 0:
        return out
    if workspace is None:
        if query_start_loc is not None:
            raise KernelValueError("query_start_loc needs a workspace made with the largest query_len")
        workspace = make_workspace(q, k_cache, block_tables, scores)
        workspace.plan(seq_lens)
    check_workspace(workspace, q, k_cache, scores, batch if query_start_loc is None else None)
    _launch(q, k_cache, v_cache, block_tables, seq_lens, scores, workspace, query_start_loc, out, lse, shared)
    return out


def _parts(q, k_cache, v_cache, block_tables, seq_lens, scores, workspace, query_start_loc, out, lse, shared) -> tuple:
    """The kernel's pointers as `Launches` takes them."""
    lens = seq_lens if query_start_loc is None else query_start_loc
    partials = (None, None) if shared is None else (shared.out, shared.lse)
    return (q, k_cache, v_cache, block_tables, lens, out, lse, workspace, *partials, scores)


def make_workspace(
    q: torch.Tensor, k_cache: torch.Tensor, block_tables: torch.Tensor, scores: Scores, **options
) -> DecodeWorkspace:
    """A workspace that fits one call; `options` go to `DecodeWorkspace`."""
    settings = {
        "max_batch": block_tables.shape[0],
        "max_seq_len": max(1, block_tables.shape[1] * k_cache.shape[1]),
        "num_q_heads": q.shape[1],
        "num_kv_heads": k_cache.shape[2],
        "head_dim": q.shape[2],
        "kv_dtype": k_cache.dtype,
        "device": q.device,
        "query_len": max(1, q.shape[0] // block_tables.shape[0]),
        "window": scores.window,
    }
    return DecodeWorkspace(**(settings | options))


def _launch(q, k_cache, v_cache, block_tables, seq_lens, scores, workspace, query_start_loc, out, lse, shared) -> None:
    config, programs = workspace.config, workspace.programs
    kind = cache_kind(k_cache)
    arguments = score_arguments(scores, q, kind)
    k_words, v_words = as_words(k_cache), as_words(v_cache)
    words = config.words and k_words is not None and v_words is not None
    switches = dict(arguments.switches)
    if words:
        k, v, switches["KIND"] = k_words, v_words, word_kind(k_cache, kind)
        factor = word_factor(switches["KIND"], bool(switches["ASM"]))
        arguments = arguments.with_scale_factor(factor)
    else:
        k, v = readable(k_cache, kind), readable(v_cache, kind)
    padded = next_power_of_2(q.shape[2])
    rows = next_power_of_2(workspace.heads_per_program * workspace.query_len)
    shared_tensors = (out, out) if shared is None else (shared.out, shared.lse)
    overlaps = shared is not None and overlaps_launches(q.device)
    items = workspace.max_items if workspace.fixed else workspace.max_items + seq_lens.shape[0] - workspace.max_batch
    workspace.launches.first(
        _parts(q, k_cache, v_cache, block_tables, seq_lens, scores, workspace, query_start_loc, out, lse, shared),
        () if query_start_loc is None else look(seq_lens), _decode_kernel, (items * programs,),
        q, k, v, block_tables, seq_lens if query_start_loc is None else query_start_loc, out,
        out if lse is None else lse, workspace.meta, workspace.items, workspace.counters, workspace.partial_out,
        workspace.partial_lse, *shared_tensors, *arguments.tensors, *arguments.numbers, workspace.max_items,
        block_tables.stride(0), q.shape[0] * q.shape[1], q.stride(0), q.stride(1), *k.stride()[:3],
        *v.stride()[:3], out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0), **switches,
        LSE=lse is not None, RAGGED=query_start_loc is not None, QUERY_LEN=workspace.query_len,
        GROUP=q.shape[1] // k_cache.shape[2], HEADS=workspace.heads_per_program, PROGRAMS=programs,
        D=q.shape[2], DP=padded, N=workspace.rows, ROWS=rows, TILE=config.tile, BLOCK_SIZE=k_cache.shape[1],
        SWAP=config.swap and not words, PREFETCH=config.prefetch, STAGES=config.stages, EVICT=config.evict,
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32", STEP=max(1, config.merge // (rows * padded)),
        SAME_STRIDES=k.stride() == v.stride(), WORDS=words, SHARED=0 if shared is None else shared.out.shape[0],
        WAIT=overlaps, num_warps=config.warps, **({"launch_pdl": True} if overlaps else {}),
    )  # fmt: skip
