"""A card's own ceilings in five seconds: bytes read, and bf16 products."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from labkit.errors import UnsupportedError
from labkit.measure.roofline import Ceilings

READ_BYTES = 2 * 2**30
MATMUL_SIZE = 8192
REPEATS = 15


def measure_ceilings() -> Ceilings:
    """Bytes a second of a sum over 2 GiB and FLOP/s of an 8192³ bf16 product: medians of repeated launches.

    Raises:
        UnsupportedError: no card, or too little of its memory is free.
    """
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("no NVIDIA card here has ceilings to measure", works="the data sheet's")
    num_bytes = READ_BYTES
    while num_bytes > torch.cuda.mem_get_info()[0] // 2:
        num_bytes //= 2
    if num_bytes < READ_BYTES // 16:
        raise UnsupportedError("too little of the card's memory is free to measure its bandwidth", works="256 MiB free")
    values = torch.ones(num_bytes // 4, dtype=torch.float32, device="cuda")
    read_s = _median_s(values.sum)
    del values
    left = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16)
    product_s = _median_s(lambda: left @ left)
    return Ceilings(num_bytes / read_s, 2 * MATMUL_SIZE**3 / product_s, f"measured on {torch.cuda.get_device_name()}")


def _median_s(call: Callable[[], object]) -> float:
    import torch

    call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3
