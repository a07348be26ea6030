"""Whole numbers of a launch. Triton's own functions of these names serve kernels too and take microseconds a call."""

from __future__ import annotations


def cdiv(number: int, divisor: int) -> int:
    """`number` over `divisor`, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`, which is 1 or more."""
    return 1 << (number - 1).bit_length()
