"""How much of a model's weights is read by now, for who waits for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from labkit.memory.tensors import Sharing
from labkit.memory.weights import StageLayers, stage_tensors, tensor_bytes
from labkit.specs.model_spec import ModelSpec, WeightFormat

# Bytes that are read by now, and of all that this rank reads.
OnRead = Callable[[int, int], object]


class ReadTally:
    """Counts the tensors that were read.

    Args:
        total_bytes: what there is to read, as `bytes_to_read` counts it.
        on_read: called after each tensor; what it raises ends the reading.
    """

    def __init__(self, total_bytes: int, on_read: OnRead) -> None:
        self._total_bytes, self._on_read = total_bytes, on_read
        self._done_bytes = 0

    def add(self, tensor: torch.Tensor) -> None:
        """`tensor` was read."""
        self._done_bytes += tensor.nbytes
        self._on_read(min(self._done_bytes, self._total_bytes), self._total_bytes)


def bytes_to_read(model: ModelSpec, fmt: WeightFormat, dtype: str, size: int) -> int:
    """Bytes that one rank of `size` reads of `model`, in the type it reads them into.

    fp8 is made of 16-bit weights, so that those are read; AWQ matrices are read whole by each rank. Exact for one rank
    of a 16-bit model; repeated KV heads and padded rows are counted as the rank keeps them.
    """
    layers = StageLayers(0, model.num_layers, model.num_layers)
    stored = fmt if fmt.kind == "awq" else WeightFormat()
    total = 0
    for tensor, number in stage_tensors(model, layers, Sharing(size)):
        is_packed = stored.kind == "awq" and tensor.is_matrix and tensor.part not in stored.unquantized
        if is_packed or size == 1:
            tensor = dataclasses.replace(tensor, rank_elements=tensor.elements)
        # The decoder alone is read.
        if tensor.part != "extra":
            total += number * tensor_bytes(tensor, stored, dtype)
    return total


def nothing(done_bytes: int, total_bytes: int) -> None:
    """An `OnRead` where nobody waits."""
