"""Whole numbers of a launch against Triton's own functions."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")


def test_they_are_tritons():
    from labkit_kernels.sizes import cdiv, next_power_of_2

    for number in [*range(1, 70), 127, 128, 129, 151936, 2**31 - 1, 2**31]:
        assert next_power_of_2(number) == triton.next_power_of_2(number)
        for divisor in (1, 2, 3, 16, 100):
            assert cdiv(number - 1, divisor) == triton.cdiv(number - 1, divisor)
