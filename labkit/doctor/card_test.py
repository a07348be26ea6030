"""The true test on a card: paged attention compiled for it against its reference, memory taken and returned, a copy."""

from __future__ import annotations

import math
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING

from labkit import format as shown
from labkit.doctor.check import Check

if TYPE_CHECKING:
    from labkit.memory.records import MemoryPlan

# fp16 products summed in another order than the float64 reference.
TOLERANCE = 2e-3
SEQ_LENS = (1, 16, 37, 130)
PIECE_BYTES = 256 * 2**20
SLOW_BYTES_PER_S = 2e9
# The driver keeps some of the memory that a data sheet names.
SAME_CARD = 0.06


def check_card_attention(device: str = "cuda") -> Check:
    """Decode of four sequences over scattered blocks in fp16, compiled for this card, against float64."""
    name = "card-attention"
    if find_spec("triton") is None:
        return Check(
            name, "unknown", "Triton is not installed", "the kernel cannot be compiled", "pip install labkit[triton]"
        )
    import torch
    from labkit_kernels.paged_decode import paged_decode
    from labkit_kernels.testing import CaseSpec, difference, make_case

    case = make_case(CaseSpec(SEQ_LENS), device)
    lse = torch.empty(case.q.shape[:2], dtype=torch.float32, device=device)
    out = paged_decode(*case.inputs, case.scores, lse=lse)
    found = difference(out, lse, case.answer)
    evidence = f"{len(SEQ_LENS)} sequences, {sum(SEQ_LENS)} tokens: relative difference {found.relative:.1e}"
    if not found.within(TOLERANCE):
        return Check(
            name, "problem", evidence, f"more than {TOLERANCE:g}: kernels compute wrongly on this card",
            "update driver and Triton together; nvidia-smi -q shows memory errors (ECC)",
        )  # fmt: skip
    return Check(name, "ok", evidence)


def check_card_pool() -> Check:
    """Take a piece of the card's free memory and give it back; what stays taken is a leak or another process."""
    import torch

    free, total = torch.cuda.mem_get_info()
    size = min(PIECE_BYTES, free // 4)
    piece = torch.empty(size, dtype=torch.uint8, device="cuda")
    during = torch.cuda.mem_get_info()[0]
    del piece
    torch.cuda.empty_cache()
    after = torch.cuda.mem_get_info()[0]
    evidence = (
        f"{shown.memory(free)} of {shown.memory(total)} free; {shown.memory(size)} taken ({shown.memory(during)} then "
        f"free) and given back ({shown.memory(after)} free)"
    )
    if free - after > size // 2:
        return Check(
            "card-pool", "warning", evidence, "memory changed meanwhile: another process is at work on the card",
            "start servers one after the other",
        )  # fmt: skip
    return Check("card-pool", "ok", evidence)


def check_planned_pool(found: MemoryPlan) -> Check:
    """Take weights and KV pool of a plan on this machine's card, as one server would, and give them back.

    Returns:
        "unknown" where this machine has no such card, "problem" where the card does not give the bytes.
    """
    import torch

    name = "planned-pool"
    pool_bytes = found.num_gpu_blocks * found.block_bytes
    planned = f"{shown.memory(found.breakdown.weights_bytes)} of weights and {shown.memory(pool_bytes)} of KV pool"
    if not torch.cuda.is_available():
        return Check(name, "unknown", f"{planned}; torch sees no card here", "the plan is for a card that is not here")
    free, total = torch.cuda.mem_get_info()
    if abs(total - found.gpu.total_bytes) > SAME_CARD * found.gpu.total_bytes:
        here = f"{torch.cuda.get_device_name()} with {shown.memory(total)}"
        return Check(name, "unknown", f"{planned}; here is {here}", f"the plan is for {found.gpu.name}")
    pieces = []
    try:
        for num_bytes in (found.breakdown.weights_bytes, pool_bytes):
            pieces.append(torch.empty(int(num_bytes), dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        share = max(0.0, math.floor(100 * free / total - 1) / 100)
        return Check(
            name, "problem", f"{planned}; {shown.memory(free)} of {shown.memory(total)} free",
            "another process or an earlier server holds the memory",
            f"nvidia-smi names it; or --gpu-memory-utilization {share:.2f}",
        )  # fmt: skip
    finally:
        pieces.clear()
        torch.cuda.empty_cache()
    return Check(name, "ok", f"{planned} taken and given back")


def check_card_copy() -> Check:
    """Copy 64 MiB from pinned host memory to the card."""
    import torch

    source = torch.ones(64 * 2**20, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device="cuda")
    target.copy_(source)
    torch.cuda.synchronize()
    start = time.perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    speed = source.nbytes / max(time.perf_counter() - start, 1e-9)
    evidence = f"pinned host memory to the card: {shown.bandwidth(speed)}"
    if speed < SLOW_BYTES_PER_S:
        return Check(
            "card-copy", "warning", evidence, "the card hangs on few or slow PCIe lanes: loading and swapping are slow",
            "nvidia-smi -q -d PCIE shows width and generation; seat the card in another slot",
        )  # fmt: skip
    return Check("card-copy", "ok", evidence)
