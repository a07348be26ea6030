"""Memory that ends at the n-th operation, on whatever device: torch's own refusal, raised where torch would."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class FailAt(TorchDispatchMode):
    """Counts operations in its `with` block and refuses number `number`; `reached` says whether it came."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.count = 0

    @property
    def reached(self) -> bool:
        return self.count >= self.number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.number:
            raise torch.OutOfMemoryError(f"CUDA out of memory at operation {self.number}")
        return func(*args, **(kwargs or {}))
