"""The attention kernels in Triton's interpreter on the CPU: fp16 and fp32, since its bf16 products are wrong."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from labkit_kernels import cascade, rope_write
from labkit_kernels.cascade import SharedPrefix, cascade_decode
from labkit_kernels.decode_plan import DecodeWorkspace
from labkit_kernels.grid import decode_cases, prefill_cases, quantised_cases
from labkit_kernels.heuristics import DecodeConfig
from labkit_kernels.kv_write import KVTarget, write_kv
from labkit_kernels.paged_decode import make_workspace, paged_decode
from labkit_kernels.paged_prefill import paged_prefill
from labkit_kernels.reference import quantise, rms_norm, rope, token_head_scales
from labkit_kernels.rope_write import Rotary, rope_and_write
from labkit_kernels.teaching import VARIANTS, variant_workspace
from labkit_kernels.testing import CaseSpec, difference, make_case

HALF = torch.float16

if not triton.knobs.runtime.interpret:
    pytest.skip("Triton compiles in this process: tests/gpu covers the card", allow_module_level=True)
DECODE = {
    name: decode_cases(HALF)[name]
    for name in (
        "edges", "window softcap sinks", "block 1", "block 5", "head size 80", "heads 7/1", "interleaved",
        "uneven query tokens", "8 query tokens, window",
    )
} | {
    name: quantised_cases(HALF, (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8))[name]
    for name in ("float8_e4m3fn", "float8_e5m2", "int8 token scales softcap", "uint8 query tokens")
}  # fmt: skip
PREFILL = {
    name: prefill_cases(HALF)[name]
    for name in ("mixed", "empty among", "sinks window", "softcap", "block 1", "int8 token scales", "heads 5/1")
}
# Parts of the keys are put together row by row, which the interpreter is slow at: fewer rows, still of two tiles.
PREFILL["in parts"] = replace(PREFILL["sinks window"], query_lens=(70, 5, 1))


def run_decode(case, **options):
    uneven = len(set(case.spec.query_lens)) > 1
    starts = case.query_start_loc if uneven else None
    workspace = make_workspace(
        case.q, case.k_cache, case.block_tables, case.scores, query_len=case.query_len, **options
    )
    workspace.plan(case.seq_lens, starts)
    out, lse = torch.full_like(case.q, float("nan")), torch.full(case.q.shape[:2], float("nan"))
    paged_decode(*case.inputs, case.scores, workspace=workspace, query_start_loc=starts, out=out, lse=lse)
    return out, lse


@pytest.mark.parametrize("name", DECODE)
def test_decode(name):
    case = make_case(DECODE[name])
    found = difference(*run_decode(case), case.answer)
    assert found.within(2e-3), found


def test_decode_in_float32_with_queries_as_rows():
    case = make_case(CaseSpec((0, 5, 130), dtype=torch.float32))
    found = difference(*run_decode(case, config=DecodeConfig(swap=False)), case.answer)
    assert found.within(1e-5), found


@pytest.mark.parametrize(("name", "splits"), [*((name, 1) for name in PREFILL), ("in parts", 3)])
def test_prefill(name, splits):
    case = make_case(PREFILL[name])
    lse = torch.empty(case.q.shape[:2])
    out = paged_prefill(
        *case.inputs, case.query_start_loc, case.scores, max_query_len=case.query_len, lse=lse, num_splits=splits
    )  # fmt: skip
    found = difference(out, lse, case.answer)
    assert found.within(2e-3), found


@pytest.mark.parametrize("splits", [1, 3])
def test_prefill_leaves_rows_of_nobody_alone(splits):
    """Sequences begin at row 10 of a padded step; the rows before and after them hold NaN and keep their output."""
    case = make_case(PREFILL["empty among"])
    first, count, total = 10, case.q.shape[0], 80
    q = torch.full((total, *case.q.shape[1:]), float("nan"), dtype=case.q.dtype)
    q[first : first + count] = case.q
    out, lse = torch.full_like(q, 7.0), torch.full(q.shape[:2], 7.0)
    paged_prefill(
        q, *case.inputs[1:], case.query_start_loc + first, case.scores, max_query_len=total, out=out, lse=lse,
        num_splits=splits,
    )  # fmt: skip
    rows = slice(first, first + count)
    found = difference(out[rows], lse[rows], case.answer)
    assert found.within(2e-3), found
    for tensor in (out, lse):
        assert bool((tensor[:first] == 7).all() and (tensor[first + count :] == 7).all())


def test_cascade():
    case = make_case(CaseSpec((300, 310, 301), (2, 2, 2), shared_blocks=17, sinks=True, kv_dtype=torch.int8))
    prefix = SharedPrefix.make(case.block_tables[0, :17].contiguous(), 272, 6)
    lse = torch.empty(case.q.shape[:2])
    out = cascade_decode(
        case.q, case.k_cache, case.v_cache, prefix, case.block_tables[:, 17:], case.seq_lens - 272, case.scores, lse=lse
    )
    found = difference(out, lse, case.answer)
    assert found.within(2e-3), found


ONE_LAUNCH = {
    "two query tokens, sinks": CaseSpec((300, 310, 301), (2, 2, 2), sinks=True),
    "own part split, group 7, soft cap": CaseSpec((300, 310, 1100), q_heads=7, kv_heads=1, softcap=9.0),
    "nothing of their own": CaseSpec((272, 272)),
    "a scale for each head": CaseSpec((275, 310), scale_tensors=True, head_dim=80),
    "more rows than a program takes": CaseSpec((280, 300, 310), q_heads=32, kv_heads=1),
}


@pytest.mark.parametrize("name", ONE_LAUNCH)
def test_cascade_in_one_launch(name, monkeypatch):
    """The same bits when repeated, counters back at 0, and no other launch; the prefix in 3 shares, the last uneven."""
    monkeypatch.setattr(cascade, "launch_prefill", None)
    monkeypatch.setattr(cascade, "shared_splits", lambda *_: 3)
    case = make_case(replace(ONE_LAUNCH[name], shared_blocks=17))
    prefix = SharedPrefix.make(case.block_tables[0, :17].contiguous(), 272, case.q.shape[0])
    tables = torch.cat([case.block_tables[:, 17:], torch.zeros(len(case.seq_lens), 1, dtype=torch.int32)], 1)
    lens = case.seq_lens - 272
    workspace = make_workspace(case.q, case.k_cache, tables, case.scores)
    workspace.plan(lens)
    assert (int(workspace.meta[0]) > len(lens)) == ("split" in name)
    results = []
    for _ in range(2):
        out, lse = torch.full_like(case.q, float("nan")), torch.full(case.q.shape[:2], float("nan"))
        cascade_decode(
            case.q, case.k_cache, case.v_cache, prefix, tables, lens, case.scores, workspace=workspace, out=out, lse=lse
        )
        found = difference(out, lse, case.answer)
        assert found.within(2e-3), found
        assert not workspace.cascade_counters.any()
        results.append(out)
    assert torch.equal(*results)


@pytest.mark.parametrize("variant", VARIANTS)
def test_teaching_variants(variant):
    case = make_case(CaseSpec((0, 40, 300)))
    workspace = variant_workspace(variant, case.q, case.k_cache, case.block_tables, case.scores)
    workspace.plan(case.seq_lens)
    lse = torch.empty(case.q.shape[:2])
    found = difference(paged_decode(*case.inputs, case.scores, workspace=workspace, lse=lse), lse, case.answer)
    assert found.within(2e-3), found


@pytest.mark.parametrize("lens", [(0,), (4500,), (64, 64, 64), (0, 1, 700, 6000, 63), (5000,) * 3])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("deterministic", [False, True])
def test_plan_covers_every_token_once(lens, window, deterministic):
    workspace = DecodeWorkspace(
        max_batch=6, max_seq_len=8192, num_q_heads=4, num_kv_heads=1, head_dim=64, kv_dtype=HALF, device="cpu",
        window=window, deterministic=deterministic,
    )  # fmt: skip
    workspace.plan(torch.tensor(lens, dtype=torch.int32))
    count, tile = int(workspace.meta[0]), workspace.config.tile
    assert count <= workspace.max_items
    items = workspace.items[:, :count].T.tolist()
    taken = []
    for seq, length in enumerate(lens):
        spans = sorted((start, end, at) for at, (s, start, end, *_) in enumerate(items) if s == seq)
        first = 0 if window is None else max(0, length - window) // tile * tile
        assert spans[0][0] == first
        assert spans[-1][1] == length
        assert all(before[1] == after[0] for before, after in pairwise(spans))
        for chunk, (_, _, at) in enumerate(spans):
            _, _, _, stored_length, begin, parts, part = items[at]
            assert (stored_length, parts, part) == (length, len(spans), chunk)
            taken.append(begin + part)
    assert sorted(taken) == list(range(count))


@pytest.mark.parametrize("kv", [HALF, torch.int8, torch.uint8])
@pytest.mark.parametrize("token_scales", [False, True])
def test_write(kv, token_scales):
    if token_scales and kv is HALF:
        pytest.skip("a 16-bit cache has no scales")
    torch.manual_seed(0)
    key, value = torch.randn(37, 3, 80).half() * 3, torch.randn(37, 3, 80).half() * 300
    key[3], key[4] = 0, key[4] * 1e-3
    slots = torch.randperm(100)[:37]
    slots[5] = -1
    caches = [torch.zeros(20, 5, 3, 80, dtype=kv) for _ in range(2)]
    scales = [torch.zeros(20, 5, 3) for _ in range(2)] if token_scales else [None, None]
    per_head = torch.tensor([0.5, 0.25, 2.0])
    write_kv(key, value, slots, KVTarget(*caches, 0.05, per_head, *scales))
    keep = slots >= 0
    where = slots[keep] // 5, slots[keep] % 5
    for rows, cache, own, factor in (
        (key, caches[0], scales[0], 0.05),
        (value, caches[1], scales[1], per_head[:, None]),
    ):
        if token_scales:
            factor = token_head_scales(rows[keep], kv)[..., None]
            assert torch.equal(own[where], factor[..., 0])
        assert torch.equal(cache[where], quantise(rows[keep], kv, factor))
    assert int(caches[0].view(torch.uint8).any(-1).sum()) <= 36 * 3


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("many", [False, True])
def test_rope_and_write(interleaved, norm, many, monkeypatch):
    """Seven tokens: fewer than a program takes of many, more than one."""
    monkeypatch.setattr(rope_write, "MANY_ROWS", 1 if many else 10**6)
    monkeypatch.setattr(rope_write, "TOKENS_OF_MANY", 4)
    torch.manual_seed(0)
    q, key, value = torch.randn(7, 6, 80).half(), torch.randn(7, 2, 80).half(), torch.randn(7, 2, 80).half()
    positions, slots = torch.randint(0, 50, (7,)), torch.randperm(100)[:7]
    angles = torch.arange(50)[:, None] * 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1).float()
    weight = torch.rand(80) + 0.5 if norm else None
    caches = [torch.zeros(20, 5, 2, 80, dtype=HALF) for _ in range(2)]
    out = rope_and_write(
        q, key, value, positions, slots, Rotary(cos_sin, interleaved, weight, weight), KVTarget(*caches)
    )

    def want(x):
        x = rms_norm(x.double(), weight) if norm else x.double()
        return rope(x, positions, cos_sin, interleaved=interleaved)

    torch.testing.assert_close(out.double(), want(q), atol=4e-3, rtol=2e-3)
    torch.testing.assert_close(caches[0][slots // 5, slots % 5].double(), want(key), atol=4e-3, rtol=2e-3)
    assert torch.equal(caches[1][slots // 5, slots % 5], value)
