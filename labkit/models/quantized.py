"""Weights below 16 bit: fp8 made of 16-bit ones at loading, and AWQ's 4-bit ones, each with its own product.

fp8 as vLLM makes it with `--quantization fp8`: e4m3, a scale of max |w| / 448 for each output channel or for the whole
matrix. For few rows on a card the product reads these weights and the inputs as they are. For more rows, on cards with
fp8 units (compute capability 8.9 and later), the inputs are quantised too, each row by its own largest number, as vLLM
always does; elsewhere the weights are widened for the product.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from labkit_kernels import reference_ops
from labkit_kernels.reference_ops import E4M3_MAX, SMALLEST_SCALE

FIRST_FP8_UNITS = (8, 9)
# What `torch._scaled_mm` asks of both widths.
FP8_MULTIPLE = 16
# `few_rows_matmul` wants inputs in such groups; up to so many rows it is faster than products in fp8.
FEW_ROWS_MULTIPLE, FEW_ROWS = 128, 32
_ROWS_AT_ONCE = 4096
# As labkit's kernels name it: the first cards whose matrix instruction makes turned 4-bit words worth it.
HOPPER = 90


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Matrix:
    """A weight `[out, in]` as e4m3 with scales; use `quantize_fp8` to make one.

    Attributes:
        weight: float8_e4m3fn `[out, in]`.
        scale: float32 `[out, 1]`, or `[1, 1]` for the whole matrix.
        multiplies_fp8: the card multiplies in fp8 and the widths suit it.
        is_interleaved: inputs are in the order of `labkit_kernels.few_rows`, whose product takes few rows.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    multiplies_fp8: bool = False
    is_interleaved: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """`(out, in)`."""
        return tuple(self.weight.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of weights and scales."""
        return self.weight.nbytes + self.scale.nbytes

    def project(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `labkit.models.linear.Matrix.project`."""
        if self.is_interleaved and x.dtype != torch.float32 and 0 < x.shape[0] <= FEW_ROWS:
            return _kernels("few_rows").few_rows_matmul(x, self.weight, self.scale, bias)
        # Scales of rows and columns come with bfloat16 results only.
        if not self.multiplies_fp8 or x.dtype != torch.bfloat16:
            return F.linear(x, self.dequantize(x.dtype), bias)
        rows, row_scales = quantize_rows(x, interleaved=self.is_interleaved)
        column_scales = self.scale.expand(self.weight.shape[0], 1).contiguous().t()
        return torch._scaled_mm(
            rows, self.weight.t(), scale_a=row_scales, scale_b=column_scales, bias=bias, out_dtype=x.dtype,
            use_fast_accum=True,
        )  # fmt: skip

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The plain weight `[out, in]`; products are rounded once, to `dtype`."""
        out = torch.empty(self.weight.shape, dtype=dtype, device=self.weight.device)
        for start in range(0, self.weight.shape[0], _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            scale = self.scale[rows] if self.scale.shape[0] > 1 else self.scale
            weight = self.weight[rows]
            if self.is_interleaved:
                weight = _kernels("few_rows").deinterleave(weight)
            out[rows] = weight.float() * scale
        return out


def quantize_fp8(weight: torch.Tensor, *, per_channel: bool) -> Fp8Matrix:
    """`weight` `[out, in]` in e4m3, with a scale for each output channel or one for all."""
    largest = weight.abs().amax(dim=1, keepdim=True).float()
    if not per_channel:
        largest = largest.amax(dim=0, keepdim=True)
    scale = (largest / E4M3_MAX).clamp_(min=SMALLEST_SCALE)
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    is_interleaved = weight.is_cuda and weight.shape[1] % FEW_ROWS_MULTIPLE == 0
    for start in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        ratio = weight[rows].float() / (scale[rows] if per_channel else scale)
        rounded = ratio.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        stored[rows] = _kernels("few_rows").interleave(rounded) if is_interleaved else rounded
    return Fp8Matrix(stored, scale, _multiplies_fp8(weight), is_interleaved)


def quantize_rows(x: torch.Tensor, *, interleaved: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row of `x` `[T, in]` in e4m3, and its scale float32 `[T, 1]`: vLLM's dynamic per-token quantisation."""
    if x.is_cuda:
        return _kernels("quantise").quantise_rows(x, interleaved=interleaved)
    rows, scales = reference_ops.quantise_rows(x)
    return _kernels("few_rows").interleave(rows) if interleaved else rows, scales


def _multiplies_fp8(weight: torch.Tensor) -> bool:
    suits = all(width % FP8_MULTIPLE == 0 for width in weight.shape)
    return suits and weight.is_cuda and torch.cuda.get_device_capability(weight.device) >= FIRST_FP8_UNITS


@dataclass(frozen=True, slots=True, eq=False)
class AwqMatrix:
    """A weight `[out, in]` in 4 bits as AutoAWQ's GEMM format stores it, or with its words turned along the inputs.

    Attributes:
        qweight: int32 `[in, out / 8]`; turned as `labkit_kernels.awq_words` has them, `[out, in / 8]`.
        qzeros: int32 `[groups, out / 8]`.
        scales: float16 `[groups, out]`.
        kernel: labkit's kernel over these tensors; None where there is none to run it, as on a CPU.
        is_turned: which of the two.
    """

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor
    kernel: Any = None
    is_turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """`(out, in)`."""
        return self.scales.shape[1], self.qweight.numel() * 8 // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of weights, zero points and scales."""
        return self.qweight.nbytes + self.qzeros.nbytes + self.scales.nbytes

    def project(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `labkit.models.linear.Matrix.project`."""
        if self.kernel is None or x.dtype == torch.float32:
            return F.linear(x, self.dequantize(x.dtype), bias)
        if self.is_turned:
            out = _kernels("awq_words").words_matmul(x, self.kernel)
        else:
            out = _kernels("awq_matmul").awq_matmul(x, self.kernel)
        return out if bias is None else out.add_(bias)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The plain weight `[out, in]`: (q - zero) · scale, rounded once, to `dtype`."""
        qweight = _kernels("awq_words").turn_back(self.qweight) if self.is_turned else self.qweight
        dense = reference_ops.awq_dequantise(qweight, self.qzeros, self.scales, torch.float32)
        return dense.t().to(dtype).contiguous()


def awq_matrix(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> AwqMatrix:
    """With labkit's kernel where the tensors are on a card, or where Triton interprets kernels."""
    runs = qweight.is_cuda
    if not runs and importlib.util.find_spec("triton") is not None:
        runs = _kernels("ops").interpreting()
    if not runs:
        return AwqMatrix(qweight, qzeros, scales)
    words = _kernels("awq_words")
    if _kernels("ops").capability(qweight.device) >= HOPPER and words.takes_groups(qweight.shape[0], qzeros.shape[0]):
        turned = words.turn_words(qweight)
        return AwqMatrix(turned, qzeros, scales, words.AwqWords(turned, qzeros, scales), is_turned=True)
    return AwqMatrix(qweight, qzeros, scales, _kernels("awq_matmul").AwqWeight(qweight, qzeros, scales))


def _kernels(module: str) -> Any:
    """labkit's kernels of `module`; Triton is imported where there is something to run on."""
    return importlib.import_module(f"labkit_kernels.{module}")
