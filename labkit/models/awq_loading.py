"""AWQ matrices from their three stored tensors, for one rank of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from labkit.errors import OutOfRangeError
from labkit.models.quantized import AwqMatrix, awq_matrix
from labkit.text import plain

COLUMNS_OF_WORD = 8
# Inputs that a tile of the kernel covers at least.
INPUT_MULTIPLE = 32
# Tensor name, shape, type → the whole tensor.
ReadTensor = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class AwqPart:
    """One stored matrix: its name without ".qweight", its widths, and this rank's share of one of them."""

    name: str
    outputs: int
    inputs: int
    cut: slice


class AwqReader:
    """Puts matrices together from a source.

    Args:
        read: reads one tensor whole.
        group_size: inputs that share a scale, 0 for all.
        device: where the matrices go.
    """

    def __init__(self, read: ReadTensor, group_size: int, device: torch.device) -> None:
        self._read = read
        self._group_size = group_size
        self._device = device

    def rows(self, parts: Sequence[AwqPart]) -> AwqMatrix:
        """The parts' outputs one after the other, each cut to this rank's.

        Raises:
            OutOfRangeError: widths that 4-bit words or groups do not divide.
        """
        stored = []
        for part in parts:
            _check_multiple(part, part.cut.start, part.cut.stop, COLUMNS_OF_WORD)
            words = slice(part.cut.start // COLUMNS_OF_WORD, part.cut.stop // COLUMNS_OF_WORD)
            qweight, qzeros, scales = self._tensors(part)
            stored.append((qweight[:, words], qzeros[:, words], scales[:, part.cut]))
        return self._matrix(*(torch.cat(tensors, dim=1) for tensors in zip(*stored, strict=True)))

    def columns(self, part: AwqPart) -> AwqMatrix:
        """One matrix, its inputs cut to this rank's; see `rows`."""
        qweight, qzeros, scales = self._tensors(part)
        group = part.inputs // qzeros.shape[0]
        groups = slice(None)
        if part.cut != slice(0, part.inputs) and qzeros.shape[0] > 1:
            _check_multiple(part, part.cut.start, part.cut.stop, group)
            groups = slice(part.cut.start // group, part.cut.stop // group)
        _check_multiple(part, part.cut.start, part.cut.stop, INPUT_MULTIPLE)
        return self._matrix(qweight[part.cut], qzeros[groups], scales[groups])

    def _tensors(self, part: AwqPart) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        group = self._group_size or part.inputs
        _check_multiple(part, 0, part.inputs, group)
        _check_multiple(part, 0, part.inputs, INPUT_MULTIPLE)
        _check_multiple(part, 0, part.outputs, COLUMNS_OF_WORD)
        words, groups = part.outputs // COLUMNS_OF_WORD, part.inputs // group
        return (
            self._read(f"{part.name}.qweight", (part.inputs, words), torch.int32),
            self._read(f"{part.name}.qzeros", (groups, words), torch.int32),
            self._read(f"{part.name}.scales", (groups, part.outputs), torch.float16),
        )

    def _matrix(self, *tensors: torch.Tensor) -> AwqMatrix:
        return awq_matrix(*(tensor.contiguous().to(self._device) for tensor in tensors))


def _check_multiple(part: AwqPart, first: int, last: int, multiple: int) -> None:
    if first % multiple == 0 and last % multiple == 0:
        return
    is_share = (first, last) not in ((0, part.inputs), (0, part.outputs))
    raise OutOfRangeError(
        f"{plain(part.name, 100)!r}: columns {first} to {last} of a 4-bit matrix are no multiples of {multiple}",
        works="fewer ranks, or the model in 16 bit" if is_share else "the model in 16 bit, or in smaller groups",
        knob="tensor_parallel_size" if is_share else "quantization",
    )
