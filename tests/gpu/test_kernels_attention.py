"""Attention kernels on a card against the float64 reference: the whole grid, graphs, determinism, large pools."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from labkit_kernels.grid import decode_cases, prefill_cases, quantised_cases
from labkit_kernels.paged_decode import make_workspace, paged_decode
from labkit_kernels.paged_prefill import paged_prefill
from labkit_kernels.reference import paged_attention
from labkit_kernels.testing import CaseSpec, difference, make_case

TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 1e-5}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
DECODE = decode_cases(torch.bfloat16) | quantised_cases(torch.bfloat16, FP8)
PREFILL = prefill_cases(torch.bfloat16) | {
    "fp8": CaseSpec((133, 18, 463), (129, 5, 1), dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
}


def run_decode(case, **options):
    uneven = bool(case.spec.query_lens) and len(set(case.spec.query_lens)) > 1
    starts = case.query_start_loc if uneven else None
    workspace = make_workspace(
        case.q, case.k_cache, case.block_tables, case.scores, query_len=case.query_len, **options
    )
    workspace.plan(case.seq_lens, starts)
    out = torch.full_like(case.q, float("nan"))
    lse = torch.full(case.q.shape[:2], float("nan"), device=case.q.device)
    paged_decode(*case.inputs, case.scores, workspace=workspace, query_start_loc=starts, out=out, lse=lse)
    return out, lse


@pytest.mark.parametrize("name", DECODE)
def test_decode_equals_reference(name):
    case = make_case(DECODE[name], "cuda")
    found = difference(*run_decode(case), case.answer)
    assert found.within(TOLERANCE[torch.bfloat16]), found


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["edges", "one sequence, split", "8 query tokens", "heads 28/4"])
def test_decode_in_other_dtypes(name, dtype):
    case = make_case(decode_cases(dtype)[name], "cuda")
    found = difference(*run_decode(case), case.answer)
    assert found.within(TOLERANCE[dtype]), found


@pytest.mark.parametrize("name", ["skewed", "heads 28/4", "8 query tokens"])
def test_one_program_for_each_query_head_gives_the_same(name):
    case = make_case(DECODE[name], "cuda")
    found = difference(*run_decode(case, pack_heads=False), case.answer)
    assert found.within(TOLERANCE[torch.bfloat16]), found


@pytest.mark.parametrize("name", PREFILL)
def test_prefill_equals_reference(name):
    case = make_case(PREFILL[name], "cuda")
    out = torch.full_like(case.q, float("nan"))
    lse = torch.full(case.q.shape[:2], float("nan"), device="cuda")
    paged_prefill(
        *case.inputs, case.query_start_loc, case.scores, max_query_len=case.query_len, out=out, lse=lse
    )  # fmt: skip
    found = difference(out, lse, case.answer)
    assert found.within(TOLERANCE[torch.bfloat16]), found


def test_graph_replays_with_other_lengths():
    spec = CaseSpec((3000, 700, 40, 1), dtype=torch.bfloat16, head_dim=128)
    case = make_case(spec, "cuda")
    workspace = make_workspace(case.q, case.k_cache, case.block_tables, case.scores)
    out = torch.empty_like(case.q)

    def step():
        workspace.plan(case.seq_lens)
        paged_decode(*case.inputs, case.scores, workspace=workspace, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lens in ((3000, 700, 40, 1), (17, 700, 0, 1), (2999, 1, 40, 0), (64, 64, 33, 1)):
        case.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        want, _ = paged_attention(*case.inputs, scale=case.scores.scale)
        error = (out.double() - want).norm() / want.norm()
        assert error < TOLERANCE[torch.bfloat16], lens


def test_same_bits_when_repeated():
    case = make_case(CaseSpec((5000, 300, 40), dtype=torch.bfloat16, head_dim=128), "cuda")
    first = run_decode(case)
    for _ in range(20):
        again = run_decode(case)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


def test_deterministic_mode_does_not_depend_on_the_batch():
    spec = CaseSpec((5000, 300, 40, 2048), dtype=torch.bfloat16, head_dim=128)
    case = make_case(spec, "cuda")
    together, _ = run_decode(case, deterministic=True)
    for i in range(4):
        alone = replace(
            case,
            q=case.q[i : i + 1],
            block_tables=case.block_tables[i : i + 1],
            seq_lens=case.seq_lens[i : i + 1],
            query_start_loc=case.query_start_loc[:2],
            answer=tuple(part[i : i + 1] for part in case.answer),
        )
        assert torch.equal(run_decode(alone, deterministic=True)[0], together[i : i + 1])


def test_pool_beyond_32_bit_offsets():
    block_size, heads, dim = 16, 8, 128
    blocks = 2**31 // (block_size * heads * dim) + 10
    pool = torch.empty(blocks, block_size, heads, dim, dtype=torch.bfloat16, device="cuda")
    table = torch.tensor([[blocks - 1, 0, blocks - 2]], dtype=torch.int32, device="cuda")
    for block in table[0].tolist():
        pool[block] = torch.randn(block_size, heads, dim, device="cuda")
    q = torch.randn(1, 32, dim, dtype=torch.bfloat16, device="cuda")
    lens = torch.tensor([45], dtype=torch.int32, device="cuda")
    case = make_case(CaseSpec((1,), head_dim=dim, q_heads=32, kv_heads=heads, dtype=torch.bfloat16), "cuda")
    want, _ = paged_attention(q, pool, pool, table, lens, scale=case.scores.scale)
    out = paged_decode(q, pool, pool, table, lens, case.scores)
    starts = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    chunk = paged_prefill(q, pool, pool, table, lens, starts, case.scores, max_query_len=1)
    for result in (out, chunk):
        assert (result.double() - want).norm() / want.norm() < TOLERANCE[torch.bfloat16]
