"""The grid of hard cases: published test shapes of vLLM and FlashInfer, and the edges those leave out."""

from __future__ import annotations

from dataclasses import replace

import torch

from labkit_kernels.testing import LAYOUTS, CaseSpec

EDGES = (0, 1, 15, 16, 17, 64, 65, 300)


def decode_cases(dtype: torch.dtype) -> dict[str, CaseSpec]:
    """Decode with one query token a sequence, and up to 8."""
    base = CaseSpec(EDGES, dtype=dtype)
    cases = {
        "edges": base,
        "one sequence, split": replace(base, seq_lens=(4500,)),
        "flashinfer 17x97": replace(base, seq_lens=(97,) * 17, q_heads=32, kv_heads=4, head_dim=128, block_size=8),
        "skewed": replace(base, seq_lens=(3000, 5, 5, 900)),
        "shared prefix blocks": replace(base, seq_lens=(200, 210, 190), shared_blocks=8),
        "window": replace(base, window=64),
        "window over splits": replace(base, seq_lens=(4000, 129, 3), window=2500),
        "softcap": replace(base, softcap=20.0),
        "sinks": replace(base, sinks=True),
        "window softcap sinks": replace(base, window=100, softcap=30.0, sinks=True, seq_lens=(0, 1, 3000)),
    }
    for size in (1, 5, 8, 32, 64, 128, 256):
        lens = (0, 1, size - 1, size, size + 1, 2 * size + 3)
        cases[f"block {size}"] = replace(base, block_size=size, seq_lens=lens)
    for size in (80, 96, 128, 192, 256):
        cases[f"head size {size}"] = replace(base, head_dim=size)
    for q_heads, kv_heads in ((4, 4), (6, 2), (5, 1), (12, 2), (7, 1), (28, 4), (16, 1), (24, 1)):
        cases[f"heads {q_heads}/{kv_heads}"] = replace(base, q_heads=q_heads, kv_heads=kv_heads)
    for layout in LAYOUTS[1:]:
        cases[layout] = replace(base, layout=layout)
    for query_len in (2, 3, 8):
        lens = (query_len, query_len + 1, 16 + query_len, 700)
        cases[f"{query_len} query tokens"] = replace(base, seq_lens=lens, query_lens=(query_len,) * 4)
    cases["8 query tokens, window"] = replace(base, seq_lens=(8, 2000), query_lens=(8, 8), window=33)
    cases["uneven query tokens"] = replace(base, seq_lens=(1, 9, 300, 40, 0), query_lens=(1, 4, 2, 0, 0))
    return cases


def quantised_cases(dtype: torch.dtype, kinds: tuple[torch.dtype, ...]) -> dict[str, CaseSpec]:
    """Decode over 8-bit caches: static scales, a scale for each head, a scale for each token and head."""
    base = CaseSpec(EDGES, dtype=dtype)
    cases = {}
    for kind in kinds:
        name = str(kind).removeprefix("torch.")
        cases[name] = replace(base, kv_dtype=kind)
        cases[f"{name} split, scale for each head"] = replace(
            base, kv_dtype=kind, seq_lens=(3000, 77), scale_tensors=True, head_dim=128
        )
        cases[f"{name} query tokens"] = replace(base, kv_dtype=kind, seq_lens=(4, 90), query_lens=(4, 4), block_size=5)
    for kind in (torch.int8, torch.uint8):
        name = str(kind).removeprefix("torch.")
        cases[f"{name} token scales"] = replace(base, kv_dtype=kind, token_scales=True)
        cases[f"{name} token scales softcap"] = replace(base, kv_dtype=kind, token_scales=True, softcap=20.0)
    return cases


def prefill_cases(dtype: torch.dtype) -> dict[str, CaseSpec]:
    """Prefills and chunks mixed with single tokens."""
    base = CaseSpec((133, 18, 463), (129, 5, 1), dtype=dtype)
    cases = {
        "mixed": base,
        "vllm 1": replace(base, seq_lens=(1328, 18, 463), query_lens=(1, 5, 129)),
        "vllm 2": replace(base, seq_lens=(523, 37, 2011), query_lens=(1, 1, 1)),
        "flashinfer 127 over 450": replace(base, seq_lens=(577, 127), query_lens=(127, 127), block_size=5),
        "one long": replace(base, seq_lens=(700,), query_lens=(700,)),
        "empty among": replace(base, seq_lens=(0, 50, 20), query_lens=(0, 50, 0)),
        "window": replace(base, window=64),
        "window small": replace(base, window=5),
        "softcap": replace(base, softcap=20.0),
        "sinks window": replace(base, sinks=True, window=40),
        "block 1": replace(base, block_size=1),
        "block 256": replace(base, block_size=256),
        "int8": replace(base, kv_dtype=torch.int8),
        "uint8 e4m3": replace(base, kv_dtype=torch.uint8),
        "int8 token scales": replace(base, kv_dtype=torch.int8, token_scales=True),
    }
    for layout in LAYOUTS[1:]:
        cases[layout] = replace(base, layout=layout)
    for size in (80, 96, 128, 192, 256):
        cases[f"head size {size}"] = replace(base, head_dim=size)
    for q_heads, kv_heads in ((4, 4), (5, 1), (28, 4), (16, 1)):
        cases[f"heads {q_heads}/{kv_heads}"] = replace(base, q_heads=q_heads, kv_heads=kv_heads)
    return cases
