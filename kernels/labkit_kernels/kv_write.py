"""Writing new keys and values to the paged cache, quantised on the way; for decode fused with RoPE and q/k norm.

References: `quantise`, `token_head_scales` and `rope` in `labkit_kernels.reference`. A negative slot is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl

from labkit_kernels.checks import (
    EIGHT_BIT_DTYPES,
    KernelTypeError,
    KernelValueError,
    check_device,
    check_dtype,
    check_heads,
    check_last_stride,
    check_scale,
    check_shape,
    check_token_scales,
)
from labkit_kernels.launches import Launches, addresses_of, looks_of
from labkit_kernels.ops import begin, capability, overlap_options
from labkit_kernels.sizes import cdiv, next_power_of_2

LARGEST = {torch.float8_e4m3fn: 448.0, torch.uint8: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
KINDS = {torch.float8_e4m3fn: "e4m3", torch.uint8: "e4m3_bits", torch.float8_e5m2: "e5m2", torch.int8: "int8"}


_LAUNCHES = Launches()


@dataclass(frozen=True)
class KVTarget:
    """The cache to write: k_cache, v_cache `[blocks, block size, KV heads, D]`, and how values become its numbers.

    k_scale, v_scale: stored = value / scale. Token scales float32 `[blocks, block size, KV heads]`, both or none: each
    row gets its own scale, written beside it.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: float | torch.Tensor = 1.0
    v_scale: float | torch.Tensor = 1.0
    k_token_scales: torch.Tensor | None = None
    v_token_scales: torch.Tensor | None = None

    @property
    def _fields(self) -> tuple[torch.Tensor | float | None, ...]:
        return (
            self.k_cache, self.v_cache, self.k_scale, self.v_scale, self.k_token_scales, self.v_token_scales
        )  # fmt: skip

    @cached_property
    def looks(self) -> tuple:
        """See `labkit_kernels.launches.Fixed`."""
        return looks_of(*self._fields)

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Those of `tensors`, in its order."""
        return addresses_of(*self._fields)

    @property
    def kind(self) -> str:
        """Number format of the cache as the kernels name it."""
        kind = KINDS.get(self.k_cache.dtype, "native")
        if kind == "e4m3" and capability(self.k_cache.device) < 89:
            return "e4m3_bits"
        return kind

    def check(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Raises KernelValueError or KernelTypeError naming the bad argument."""
        heads, head_dim = key.shape[-2:]
        check_shape("key", key, (None, None, None))
        check_shape("value", value, key.shape)
        check_dtype("value", value, (key.dtype,))
        for name, tensor in (("k_cache", self.k_cache), ("v_cache", self.v_cache)):
            check_dtype(name, tensor, (key.dtype, *EIGHT_BIT_DTYPES))
            check_shape(name, tensor, (None, None, heads, head_dim))
        check_shape("v_cache", self.v_cache, self.k_cache.shape)
        check_dtype("v_cache", self.v_cache, (self.k_cache.dtype,))
        for name, tensor in (("key", key), ("value", value), ("k_cache", self.k_cache), ("v_cache", self.v_cache)):
            check_last_stride(name, tensor)
            check_device(name, tensor, key.device)
        check_heads(heads, heads, head_dim)
        check_dtype("slot_mapping", slot_mapping, (torch.int64,))
        check_shape("slot_mapping", slot_mapping, (key.shape[0],))
        check_device("slot_mapping", slot_mapping, key.device)
        check_scale("k_scale", self.k_scale, heads, key.device)
        check_scale("v_scale", self.v_scale, heads, key.device)
        if (self.k_token_scales is None) != (self.v_token_scales is None):
            raise KernelValueError("k_token_scales and v_token_scales must be given together")
        if self.k_token_scales is not None and self.v_token_scales is not None:
            if self.kind == "native":
                raise KernelTypeError(f"token scales need an 8-bit cache; k_cache has dtype {self.k_cache.dtype}")
            check_token_scales("k_token_scales", self.k_token_scales, self.k_cache)
            check_token_scales("v_token_scales", self.v_token_scales, self.v_cache)
            if self.k_token_scales.stride() != self.v_token_scales.stride():
                raise KernelValueError("k_token_scales and v_token_scales must have the same strides")

    def tensors(self, placeholder: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cache, scale and token-scale tensors in the kernels' order."""
        bits = self.kind == "e4m3_bits"
        caches = [cache.view(torch.uint8) if bits else cache for cache in (self.k_cache, self.v_cache)]
        scales = [s if isinstance(s, torch.Tensor) else placeholder for s in (self.k_scale, self.v_scale)]
        tokens = [placeholder if s is None else s for s in (self.k_token_scales, self.v_token_scales)]
        return (*caches, *scales, *tokens)

    def numbers(self) -> tuple[float | int, ...]:
        """Static scales, strides of per-head scales, strides of token scales and of both caches."""
        scales = [1.0 if isinstance(s, torch.Tensor) else s for s in (self.k_scale, self.v_scale)]
        strides = [int(isinstance(s, torch.Tensor) and s.numel() > 1) for s in (self.k_scale, self.v_scale)]
        token = (0, 0, 0) if self.k_token_scales is None else self.k_token_scales.stride()
        return (*scales, *strides, *token, *self.k_cache.stride()[:3], *self.v_cache.stride()[:3])

    def switches(self) -> dict[str, object]:
        """Compile-time facts of the target."""
        return {
            "KIND": self.kind,
            "LARGEST": LARGEST.get(self.k_cache.dtype, 1.0),
            "K_SCALE_TENSOR": isinstance(self.k_scale, torch.Tensor),
            "V_SCALE_TENSOR": isinstance(self.v_scale, torch.Tensor),
            "TOKEN_SCALES": self.k_token_scales is not None,
            "BLOCK_SIZE": self.k_cache.shape[1],
        }


@triton.jit
def _e4m3_bits(x):
    """e4m3 byte of each float32 of magnitude at most 448, rounded half to even, by integer arithmetic alone.

    From 2⁻⁶ up the mantissa is rounded by adding half of its last place less one, plus its last bit; below, adding
    2¹⁴ makes the float unit round to multiples of 2⁻⁹ (the subnormals, which run into the first normal).
    """
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    shifted = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True)
    subnormal = shifted - 0x46800000
    return (tl.where(magnitude < 0x3C800000, subnormal, normal) | sign).to(tl.uint8)


@triton.jit
def _round_half_even(x):
    """Whole number nearest to x, |x| < 2²²: adding and taking away 1.5·2²³ makes the float unit round."""
    bits = (x + 12582912.0).to(tl.int32, bitcast=True)
    return bits - 0x4B400000


@triton.jit
def _encode(x, scale, KIND: tl.constexpr, LARGEST: tl.constexpr):
    """Float32 values over their scale in the cache's numbers, clamped to its largest finite one."""
    x = tl.minimum(tl.maximum(x / scale, -LARGEST), LARGEST)
    if KIND == "int8":
        y = _round_half_even(x).to(tl.int8)
    elif KIND == "e4m3_bits":
        y = _e4m3_bits(x)
    elif KIND == "e4m3":
        y = x.to(tl.float8e4nv)
    else:
        y = x.to(tl.float8e5)
    return y


@triton.jit
def store_rows(
    x, cache, token_scales, slots, head, inside, scale_ptr, scale, scale_stride,
    ts_stride_block, ts_stride_slot, ts_stride_head, stride_block, stride_slot, stride_head,
    KIND: tl.constexpr, LARGEST: tl.constexpr, SCALE_TENSOR: tl.constexpr, TOKEN_SCALES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Quantises rows `[tokens, DP]` of one head and writes them to their slots."""
    d = tl.arange(0, DP)
    block = slots // BLOCK_SIZE
    slot = slots % BLOCK_SIZE
    if SCALE_TENSOR:
        scale *= tl.load(scale_ptr + head * scale_stride)
    if TOKEN_SCALES:
        x = x.to(tl.float32)
        own = tl.max(tl.abs(x), 1) / LARGEST
        own = tl.where(own == 0.0, 1.0, own)
        tl.store(
            token_scales + block * ts_stride_block + slot * ts_stride_slot + head * ts_stride_head, own, mask=inside
        )
        stored = _encode(x, own[:, None], KIND, LARGEST)
    elif KIND != "native":
        stored = _encode(x.to(tl.float32), scale, KIND, LARGEST)
    else:
        stored = x.to(cache.dtype.element_ty)
    at = block * stride_block + slot * stride_slot + head.to(tl.int64) * stride_head
    tl.store(cache + at[:, None] + d[None, :], stored, mask=inside[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _write_kernel(
    key, value, slot_mapping, k_cache, v_cache, k_scale_ptr, v_scale_ptr, k_tokens, v_tokens,
    k_scale, v_scale, ks_stride, vs_stride, ts_stride_block, ts_stride_slot, ts_stride_head,
    k_stride_block, k_stride_slot, k_stride_head, v_stride_block, v_stride_slot, v_stride_head,
    num_tokens, key_stride_token, key_stride_head, value_stride_token, value_stride_head,
    KIND: tl.constexpr, LARGEST: tl.constexpr, K_SCALE_TENSOR: tl.constexpr, V_SCALE_TENSOR: tl.constexpr,
    TOKEN_SCALES: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    TOKENS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    token = (tl.program_id(0) // HEADS * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    d = tl.arange(0, DP)
    here = token < num_tokens
    begin(OVERLAP)
    # Rows are read beside their slots, those of skipped tokens too, instead of after them.
    mask = here[:, None] & (d < D)[None, :]
    slots = tl.load(slot_mapping + token, mask=here, other=-1)
    k = tl.load(key + (token * key_stride_token + head * key_stride_head)[:, None] + d[None, :], mask=mask, other=0.0)
    v = tl.load(
        value + (token * value_stride_token + head * value_stride_head)[:, None] + d[None, :], mask=mask, other=0.0
    )
    inside = slots >= 0
    store_rows(
        k, k_cache, k_tokens, slots, head, inside, k_scale_ptr, k_scale, ks_stride, ts_stride_block, ts_stride_slot,
        ts_stride_head, k_stride_block, k_stride_slot, k_stride_head, KIND, LARGEST, K_SCALE_TENSOR, TOKEN_SCALES,
        BLOCK_SIZE, D, DP,
    )  # fmt: skip
    store_rows(
        v, v_cache, v_tokens, slots, head, inside, v_scale_ptr, v_scale, vs_stride, ts_stride_block, ts_stride_slot,
        ts_stride_head, v_stride_block, v_stride_slot, v_stride_head, KIND, LARGEST, V_SCALE_TENSOR, TOKEN_SCALES,
        BLOCK_SIZE, D, DP,
    )  # fmt: skip


def write_kv(key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor, target: KVTarget) -> None:
    """Writes key, value `[tokens, KV heads, D]` to `target`; slot_mapping int64 `[tokens]` = block · size + offset.

    A negative slot is skipped (padding of a CUDA graph). Raises KernelValueError or KernelTypeError naming it.
    """
    parts = (key, value, slot_mapping, target)
    if _LAUNCHES.again(parts):
        return
    target.check(key, value, slot_mapping)
    num_tokens, heads, head_dim = key.shape
    if num_tokens == 0:
        return
    tokens = 1 if num_tokens <= 256 else (4 if num_tokens <= 1024 else 16)
    _LAUNCHES.first(
        parts, (), _write_kernel, (cdiv(num_tokens, tokens) * heads,),
        key, value, slot_mapping, *target.tensors(key), *target.numbers(), num_tokens,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), **target.switches(), HEADS=heads, D=head_dim,
        DP=next_power_of_2(head_dim), TOKENS=tokens, num_warps=1 if tokens <= 4 else 4,
        **overlap_options(key.device),
    )  # fmt: skip
