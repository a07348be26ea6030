"""Matrix products with plain weights: few-row products that read them fast, on the CPU from oneDNN's own blocked order.

At few rows a product is bound by reading the weights. MKL and plain oneDNN calls reorder or walk them in a way that
takes up to twice the memory time; weights reordered once, at loading, do not (1.5 to 2 times faster up to 32 rows).
One row in 16 bits on a card goes through labkit's kernel, which begins to read before the launch before has ended.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Protocol

import torch
import torch.nn.functional as F

# Rows that the reordered layout is chosen for; it serves one row to thousands about as well.
_ROWS_HINT = 8
# Below this many rows, rows are added: the four-row kernel takes less time than those for one to three.
_FEWEST_ROWS = 4
_HALVES = (torch.float16, torch.bfloat16)


class Matrix(Protocol):
    """A weight `[out, in]` that is stored in another form than a plain tensor and multiplies by itself."""

    @property
    def shape(self) -> tuple[int, ...]:
        """`(out, in)`."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored, scales included."""
        ...

    def project(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x @ weight.T + bias`: `[T, in]` → `[T, out]`, contiguous."""
        ...


Weight = torch.Tensor | Matrix


class PackedMatrix:
    """A weight `[out, in]` in oneDNN's blocked order; it replaces the plain tensor and takes the same memory.

    Args:
        weight: float32 or bfloat16 on the CPU.
    """

    __slots__ = ("_packed", "dtype", "nbytes", "shape")

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape, self.dtype, self.nbytes = tuple(weight.shape), weight.dtype, weight.nbytes
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)

    def project(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x @ weight.T + bias`: `[T, in]` → `[T, out]`, contiguous."""
        num_rows = x.shape[0]
        if num_rows == 1:
            return self._product(x.expand(_FEWEST_ROWS, -1).contiguous(), bias)[:1]
        if num_rows < _FEWEST_ROWS:
            return self._product(F.pad(x, (0, 0, 0, _FEWEST_ROWS - num_rows)), bias)[:num_rows]
        return self._product(x, bias)

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")

    def to_dense(self) -> torch.Tensor:
        """The plain weight again, as a copy."""
        return self._packed.to_dense()


def pack(weight: torch.Tensor) -> torch.Tensor | PackedMatrix:
    """`weight` in oneDNN's order, or as it is where oneDNN has no such order for this machine, device or dtype."""
    if weight.device.type != "cpu" or weight.ndim != 2 or not torch.backends.mkldnn.is_available():
        return weight
    try:
        return PackedMatrix(weight)
    except (RuntimeError, AttributeError):
        # Such as float16 without AVX512-FP16, or a torch without these internal operators.
        return weight


def project(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias` for a plain weight or one that is stored otherwise."""
    if not isinstance(weight, torch.Tensor):
        return weight.project(x, bias)
    if x.is_cuda and _is_one_row(x, weight) and importlib.util.find_spec("triton") is not None:
        return importlib.import_module("labkit_kernels.few_rows").few_rows_matmul(x, weight, None, bias)
    return F.linear(x, weight, bias)


def _is_one_row(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether labkit's kernel takes the product: one row in 16 bits, and a weight whose rows are whole."""
    return x.shape[0] == 1 and x.dtype in _HALVES and weight.dtype == x.dtype and weight.stride(-1) == 1


def project_few(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """`x @ weight.T` where `weight` is large and must stay plain, such as a head tied to the embedding.

    For up to eight float32 rows MKL computes `weight @ x.T` up to three times faster than `x @ weight.T`.
    """
    num_rows = x.shape[0]
    is_slow = x.dtype == torch.float32 and x.device.type == "cpu" and num_rows <= 8
    if not isinstance(weight, torch.Tensor) or not is_slow:
        return project(x, weight)
    if num_rows == 1:
        x = torch.cat((x, torch.zeros_like(x)))
    return (weight @ x.t()).t()[:num_rows].contiguous()
