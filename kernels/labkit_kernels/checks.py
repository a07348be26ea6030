"""Argument errors of the kernels: each names the argument, what it was, and what it must be."""

from __future__ import annotations

from collections.abc import Sequence

import torch

HEAD_SIZES = (64, 80, 96, 128, 192, 256)
MAX_BLOCK_SIZE = 256
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EIGHT_BIT_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)


class KernelValueError(ValueError):
    """A kernel argument has a value, shape or stride that the kernel cannot take."""


class KernelTypeError(TypeError):
    """A kernel argument has a dtype or a device that the kernel cannot take."""


def check_dtype(name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Raises KernelTypeError unless the dtype of `tensor` is one of `allowed`."""
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype) for dtype in allowed)
        raise KernelTypeError(f"{name} has dtype {tensor.dtype}; works: {names}")


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raises KernelTypeError unless `tensor` is on `device`."""
    if tensor.device != device:
        raise KernelTypeError(f"{name} is on device {tensor.device}; it must be on {device}, where the query is")


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[int | None]) -> None:
    """Raises KernelValueError unless the shape of `tensor` matches `shape` (None = any size)."""
    found = tensor.shape
    # Dozens of these go before each layer's launches: most compare whole shapes.
    if found == shape:
        return
    if len(found) == len(shape) and all(want is None or want == have for want, have in zip(shape, found, strict=True)):
        return
    wanted = ", ".join("any" if want is None else str(want) for want in shape)
    raise KernelValueError(f"{name} has shape {tuple(found)}; it must be ({wanted})")


def check_last_stride(name: str, tensor: torch.Tensor) -> None:
    """Raises KernelValueError unless the last dimension of `tensor` is contiguous."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise KernelValueError(
            f"{name} has stride {tensor.stride(-1)} in its last dimension; it must be 1 (other strides may be anything)"
        )


def check_heads(num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raises KernelValueError for a head layout that the kernels cannot take."""
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        raise KernelValueError(f"{num_q_heads} query heads do not divide into {num_kv_heads} KV heads")
    if head_dim not in HEAD_SIZES:
        raise KernelValueError(f"head size {head_dim} is not supported; works: {', '.join(map(str, HEAD_SIZES))}")


def check_cache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor) -> None:
    """Checks the paged cache of an attention call against its query `[tokens, q heads, head size]`."""
    check_dtype("q", q, QUERY_DTYPES)
    check_shape("q", q, (None, None, None))
    head_dim = q.shape[-1]
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_dtype(name, cache, (q.dtype, *EIGHT_BIT_DTYPES))
        check_device(name, cache, q.device)
        check_shape(name, cache, (None, None, None, head_dim))
        check_last_stride(name, cache)
        if not 1 <= cache.shape[1] <= MAX_BLOCK_SIZE:
            raise KernelValueError(f"{name} has block size {cache.shape[1]}; works: 1 to {MAX_BLOCK_SIZE}")
    check_shape("v_cache", v_cache, k_cache.shape)
    check_dtype("v_cache", v_cache, (k_cache.dtype,))
    check_heads(q.shape[1], k_cache.shape[2], head_dim)
    check_last_stride("q", q)
    check_dtype("block_tables", block_tables, (torch.int32,))
    check_device("block_tables", block_tables, q.device)
    check_shape("block_tables", block_tables, (None, None))
    check_last_stride("block_tables", block_tables)


def check_lengths(
    q: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
) -> None:
    """Checks the per-sequence tensors of an attention call."""
    batch = block_tables.shape[0]
    check_dtype("seq_lens", seq_lens, (torch.int32,))
    check_device("seq_lens", seq_lens, q.device)
    check_shape("seq_lens", seq_lens, (batch,))
    if query_start_loc is None:
        if batch and q.shape[0] % batch:
            raise KernelValueError(
                f"q has {q.shape[0]} tokens for {batch} sequences; without query_start_loc each sequence must have "
                "the same number"
            )
        return
    check_dtype("query_start_loc", query_start_loc, (torch.int32,))
    check_device("query_start_loc", query_start_loc, q.device)
    check_shape("query_start_loc", query_start_loc, (batch + 1,))


def check_out(name: str, tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Checks a result tensor that the caller brought."""
    check_dtype(name, tensor, (dtype,))
    check_device(name, tensor, device)
    check_shape(name, tensor, shape)
    check_last_stride(name, tensor)


def check_scale(name: str, scale: float | torch.Tensor, num_kv_heads: int, device: torch.device) -> None:
    """Checks a KV scale: a float, or a float32 tensor of one value or one for each KV head."""
    if not isinstance(scale, torch.Tensor):
        if not scale > 0:
            raise KernelValueError(f"{name} is {scale}; it must be positive")
        return
    check_dtype(name, scale, (torch.float32,))
    check_device(name, scale, device)
    if scale.numel() not in (1, num_kv_heads):
        raise KernelValueError(f"{name} has {scale.numel()} values; works: 1 or {num_kv_heads} (one for each KV head)")


def check_token_scales(name: str, scales: torch.Tensor, cache: torch.Tensor) -> None:
    """Checks scales kept for each token and KV head: float32 `[blocks, block size, KV heads]`."""
    check_dtype(name, scales, (torch.float32,))
    check_device(name, scales, cache.device)
    check_shape(name, scales, cache.shape[:3])
