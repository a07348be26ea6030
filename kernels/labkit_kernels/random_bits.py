"""Random numbers that depend only on a request's seed, a position and a token id: Philox-4x32 with 7 rounds.

Salmon et al. 2011 (doi 10.1145/2063384.2063405); 7 rounds are the fewest that pass BigCrush there. The counter is
(token id // 4, position, 0, 0), the key the 64-bit seed; token id % 4 picks one of the four words. Reference:
`reference_ops.random_words`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _words(counter, seed, position):
    zero = counter * 0
    return tl.philox(seed, counter, zero + position, zero, zero, n_rounds=7)


@triton.jit
def neighbour_words(first, seed, position, COUNT: tl.constexpr):
    """Random uint32 of the COUNT token ids from `first` on (both multiples of 4): one Philox call for four ids."""
    r0, r1, r2, r3 = _words(first // 4 + tl.arange(0, COUNT // 4), seed, position)
    return tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), (COUNT,))


@triton.jit
def scattered_words(ids, seed, position):
    """Random uint32 of arbitrary token ids."""
    r0, r1, r2, r3 = _words(ids // 4, seed, position)
    lane = ids % 4
    return tl.where(lane < 2, tl.where(lane == 0, r0, r1), tl.where(lane == 2, r2, r3))


@triton.jit
def log2_exponential(words):
    """log₂ of an exponentially distributed number from each uint32, exact in relative terms where it is small.

    E = -ln(1 - u), u = (word + ½) · 2⁻³²: small E decide a draw, so u near 0 goes by the series u + u²/2 + u³/3 + u⁴/4.
    """
    u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    plain = -tl.log(tl.maximum(1.0 - u, 2.9802322387695312e-08))
    return tl.log2(tl.where(u < 0.01, series, plain))
