"""Shared-prefix decode, split chunks and the fused rotate-and-write on a card, against their references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from labkit_kernels import rope_write
from labkit_kernels.cascade import SharedPrefix, cascade_decode
from labkit_kernels.grid import prefill_cases
from labkit_kernels.kv_write import KVTarget
from labkit_kernels.paged_decode import make_workspace, paged_decode
from labkit_kernels.paged_prefill import paged_prefill
from labkit_kernels.reference import dequantise, paged_attention, rms_norm, rope
from labkit_kernels.rope_write import Rotary, rope_and_write
from labkit_kernels.teaching import VARIANTS, variant_workspace
from labkit_kernels.testing import CaseSpec, difference, make_case

SHARED = {
    "plain": {},
    "sinks, soft cap": {"sinks": True, "softcap": 10.0},
    "sinks, soft cap, int8": {"sinks": True, "softcap": 10.0, "kv_dtype": torch.int8},
    "scale for each head": {"kv_dtype": torch.float8_e4m3fn, "scale_tensors": True},
    "token scales": {"kv_dtype": torch.int8, "token_scales": True},
    "head size 80, group 7": {"head_dim": 80, "q_heads": 14},
}


@pytest.mark.parametrize("name", SHARED)
def test_cascade_equals_reference(name):
    spec = CaseSpec((3000, 3010, 2800), (2, 2, 2), shared_blocks=160, dtype=torch.bfloat16)
    case = make_case(replace(spec, **SHARED[name]), "cuda")
    shared = 160 * 16
    prefix = SharedPrefix.make(case.block_tables[0, :160].contiguous(), shared, case.q.shape[0])
    lse = torch.empty(case.q.shape[:2], device="cuda")
    out = cascade_decode(
        case.q, case.k_cache, case.v_cache, prefix, case.block_tables[:, 160:], case.seq_lens - shared, case.scores,
        lse=lse,
    )  # fmt: skip
    found = difference(out, lse, case.answer)
    assert found.within(8e-3), found


@pytest.mark.parametrize("batch", [1, 2, 40, 200])
def test_cascade_replays_with_changed_lengths(batch):
    """One launch for rows of one and of many blocks; a graph follows new own lengths, 0 among them."""
    generator = torch.Generator().manual_seed(batch)
    shared, most = 160 * 16, 700
    lens = torch.randint(0, most + 1, (batch,), generator=generator)
    lens[0] = most
    spec = CaseSpec(tuple((lens + shared).tolist()), shared_blocks=160, head_dim=128, dtype=torch.bfloat16)
    case = make_case(spec, "cuda")
    prefix = SharedPrefix.make(case.block_tables[0, :160].contiguous(), shared, batch)
    tables, own = case.block_tables[:, 160:].contiguous(), (case.seq_lens - shared).clone()
    workspace = make_workspace(case.q, case.k_cache, tables, case.scores)
    lse, out = torch.empty(case.q.shape[:2], device="cuda"), torch.empty_like(case.q)
    args = (case.q, case.k_cache, case.v_cache, prefix, tables, own, case.scores)

    def step():
        workspace.plan(own)
        cascade_decode(*args, workspace=workspace, out=out, lse=lse)

    step()
    found = difference(out, lse, case.answer)
    assert found.within(8e-3), found
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    first = out.clone()
    for lengths in ((case.seq_lens - shared) // 2, case.seq_lens - shared):
        own.copy_(lengths)
        graph.replay()
    assert torch.equal(out, first)
    assert not workspace.cascade_counters.any()
    own.copy_((case.seq_lens - shared) // 2)
    graph.replay()
    answer = paged_attention(
        case.q, case.k_cache, case.v_cache, case.block_tables, own + shared, scale=case.scores.scale
    )
    found = difference(out, lse, answer)
    assert found.within(8e-3), found


@pytest.mark.parametrize("splits", [2, 3, 7])
@pytest.mark.parametrize("name", ["mixed", "window", "sinks window", "int8 token scales", "empty among"])
def test_split_chunks_equal_reference(name, splits):
    case = make_case(prefill_cases(torch.bfloat16)[name], "cuda")
    lse = torch.empty(case.q.shape[:2], device="cuda")
    out = paged_prefill(
        *case.inputs, case.query_start_loc, case.scores, max_query_len=case.query_len, lse=lse, num_splits=splits
    )  # fmt: skip
    found = difference(out, lse, case.answer)
    assert found.within(8e-3), found


@pytest.mark.parametrize("variant", VARIANTS)
def test_teaching_variants_give_the_same(variant):
    case = make_case(CaseSpec((3000, 5, 0, 900), dtype=torch.bfloat16, head_dim=128), "cuda")
    workspace = variant_workspace(variant, case.q, case.k_cache, case.block_tables, case.scores)
    workspace.plan(case.seq_lens)
    lse = torch.empty(case.q.shape[:2], device="cuda")
    found = difference(paged_decode(*case.inputs, case.scores, workspace=workspace, lse=lse), lse, case.answer)
    assert found.within(8e-3), found


@pytest.mark.parametrize("kv", [torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("many", [False, True])
def test_rope_and_write_equals_reference(kv, interleaved, norm, many, monkeypatch):
    monkeypatch.setattr(rope_write, "MANY_ROWS", 1 if many else 10**6)
    torch.manual_seed(0)
    tokens, q_heads, heads, dim, rotary, block_size = 70, 6, 2, 128, 64, 16
    q, key, value = (torch.randn(tokens, n, dim, device="cuda").bfloat16() for n in (q_heads, heads, heads))
    positions = torch.randint(0, 5000, (tokens,), device="cuda")
    angles = torch.arange(5000)[:, None] * 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1).float().cuda()
    weight = (torch.rand(dim, device="cuda") + 0.5) if norm else None
    slots = torch.randperm(160, device="cuda")[:tokens]
    slots[3] = -1
    caches = [torch.zeros(10, block_size, heads, dim, dtype=kv, device="cuda") for _ in range(2)]
    scale = 1.0 if kv is torch.bfloat16 else 0.05
    rotary_record = Rotary(cos_sin, interleaved, weight, weight)
    out = rope_and_write(q, key, value, positions, slots, rotary_record, KVTarget(*caches, scale, scale))
    turned = q.clone()
    rope_and_write(turned, key, value, positions, slots, rotary_record, KVTarget(*caches, scale, scale), out=turned)
    assert torch.equal(turned, out)

    def want(x):
        x = rms_norm(x.double(), weight) if norm else x.double()
        return rope(x, positions, cos_sin, interleaved=interleaved)

    keep = slots >= 0
    where = slots[keep] // block_size, slots[keep] % block_size
    coarse = {torch.bfloat16: 5e-3, torch.int8: 2e-2}.get(kv, 4e-2)
    for have, target, tolerance in (
        (out.double(), want(q), 5e-3),
        (dequantise(caches[0][where]) * scale, want(key)[keep], coarse),
        (dequantise(caches[1][where]) * scale, value[keep].double(), coarse),
    ):
        assert (have - target).norm() / target.norm() < tolerance
