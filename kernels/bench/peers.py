"""Other people's kernels on the same inputs, where they can be imported: FlashAttention-3, FlashInfer, vLLM's Triton.

They are never part of the project: put them on PYTHONPATH. Each function returns a call to be timed, or raises.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from shapes import Inputs

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
VLLM_SEGMENTS, VLLM_MIN_GRID = 16, 128


def fa3(inputs: Inputs, *, metadata: bool = True) -> Callable[[], torch.Tensor]:
    """FlashAttention-3; with fp8 KV it takes an fp8 query. metadata: the split is planned once, outside the call."""
    from vllm_flash_attn import flash_attn_interface as fa

    if not fa.FA3_AVAILABLE:
        raise ImportError(f"FlashAttention-3 does not load: {fa.FA3_UNAVAILABLE_REASON}")
    shape, batch = inputs.shape, len(inputs.shape.lens)
    fp8 = inputs.k.dtype in FP8
    q = inputs.q.to(inputs.k.dtype) if fp8 else inputs.q
    out = torch.empty_like(inputs.q)
    one = torch.ones(batch, shape.kv_heads, device="cuda")
    scales = {"q_descale": one, "k_descale": one, "v_descale": one} if fp8 else {}
    plan = None
    if metadata:
        plan = fa.get_scheduler_metadata(
            batch, shape.new, max(shape.lens), shape.q_heads, shape.kv_heads, shape.head_dim, inputs.lens,
            qkv_dtype=q.dtype, cu_seqlens_q=inputs.starts, page_size=inputs.block_size, causal=True,
        )  # fmt: skip
    return lambda: fa.flash_attn_varlen_func(
        q, inputs.k, inputs.v, max_seqlen_q=shape.new, cu_seqlens_q=inputs.starts, max_seqlen_k=max(shape.lens),
        seqused_k=inputs.lens, softmax_scale=shape.head_dim**-0.5, causal=True, block_table=inputs.tables, out=out,
        scheduler_metadata=plan, fa_version=3, **scales,
    )  # fmt: skip


def flashinfer(inputs: Inputs, *, tensor_cores: bool = True) -> Callable[[], torch.Tensor]:
    """FlashInfer's paged decode, planned on the host once."""
    import flashinfer as fi

    shape, block_size = inputs.shape, inputs.block_size
    blocks = [-(-length // block_size) for length in shape.lens]
    indptr = torch.tensor([0, *torch.tensor(blocks).cumsum(0).tolist()], dtype=torch.int32)
    indices = torch.cat([inputs.tables[i, :n] for i, n in enumerate(blocks)])
    last = torch.tensor([length - (n - 1) * block_size for length, n in zip(shape.lens, blocks, strict=True)])
    workspace = torch.zeros(256 * 1024 * 1024, dtype=torch.uint8, device="cuda")
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_cuda_graph=True, use_tensor_cores=tensor_cores,
        paged_kv_indptr_buffer=torch.empty_like(indptr, device="cuda"), paged_kv_indices_buffer=indices,
        paged_kv_last_page_len_buffer=torch.empty(len(blocks), dtype=torch.int32, device="cuda"),
    )  # fmt: skip
    wrapper.plan(
        indptr, indices, last.int(), shape.q_heads, shape.kv_heads, shape.head_dim, block_size,
        q_data_type=inputs.q.dtype, kv_data_type=inputs.k.dtype,
    )  # fmt: skip
    out = torch.empty_like(inputs.q)
    return lambda: wrapper.run(inputs.q, (inputs.k, inputs.v), out=out)


def vllm_triton(inputs: Inputs) -> Callable[[], None]:
    """vLLM's Triton unified attention with the settings of its own backend."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    shape = inputs.shape
    threshold = VLLM_MIN_GRID // shape.kv_heads
    segments = torch.empty(threshold, shape.q_heads, VLLM_SEGMENTS, shape.head_dim, device="cuda")
    stats = torch.empty(2, threshold, shape.q_heads, VLLM_SEGMENTS, device="cuda")
    one = torch.ones(1, device="cuda")
    out = torch.empty_like(inputs.q)
    mode = KVQuantMode.FP8_PER_TENSOR if inputs.k.dtype in FP8 else KVQuantMode.NONE
    return lambda: unified_attention(
        inputs.q, inputs.k, inputs.v, out, inputs.starts, shape.new, inputs.lens, max(shape.lens),
        shape.head_dim**-0.5, True, (-1, -1), inputs.tables, 0, None, one, one, seq_threshold_3D=threshold,
        num_par_softmax_segments=VLLM_SEGMENTS, softmax_segm_output=segments, softmax_segm_max=stats[0],
        softmax_segm_expsum=stats[1], kv_quant_mode=mode,
    )  # fmt: skip
