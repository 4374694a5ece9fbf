"""The kernels' short division decides as an IEEE division at every rounding boundary of E2M1 and E4M3: a search of all
pairs of fp32 significands that could tell them apart, in exact arithmetic.

Given y = RN(1/b) (asserted for every significand on the GPU) the kernels take q0 = RN(a y), r = RN(a - q0 b), q = RN(q0 +
r y). |q0 - a/b| is at most 1.5 ulp, so the last sum differs from a/b by less than 2^-22 ulp before it is rounded. q can
therefore leave RN(a/b) only if a/b is that close to the middle m between a boundary c and a float next to it.

The packed kernels take e = RN(1 - b y), which is exact, y' = RN(RN(e + e e) y) and q = RN(a y + RN(a y')). Three
roundings, each of 2^-24 of y' or a y', leave the last sum within 3 x 2^-48 of a/b: less than 2^-22 ulp again.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

# significands of the boundaries: E2M1 .25 .75 1.25 1.75 2.5 3.5 5; E4M3 17/16 .. 31/16, and 3/2 .. 15/8 of its subnormals
BOUNDARIES = [Fraction(n, 16) for n in (16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31)]


def rn(x: Fraction) -> Fraction:
    """x rounded to 24 significant bits, ties to even."""
    if x == 0:
        return x
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    if Fraction(2) ** exponent > abs(x):
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    return round(x / unit) * unit  # Fraction rounds ties to even


def short_division(a: Fraction, b: Fraction) -> Fraction:
    y = rn(1 / b)
    q = rn(a * y)
    return rn(q + rn(a - q * b) * y)


def packed_division(a: Fraction, b: Fraction) -> Fraction:
    y = rn(1 / b)
    e = rn(1 - b * y)
    rest = rn(rn(e * e + e) * y)
    return rn(a * y + rn(a * rest))


def close_pairs(middle: Fraction) -> list[tuple[Fraction, Fraction]]:
    """All (a, b), b in [1, 2) of 24 bits, with 0 < |a/b - middle| < 2^-44: a little more than 2^-22 ulp."""
    b = np.arange(1 << 23, 1 << 24, dtype=np.int64)
    product = b * middle.numerator
    unit = np.where(product >= middle.denominator << 24, 2, 1) * middle.denominator  # an ulp of a
    a = (product + unit // 2) // unit
    off = np.abs(a * unit - product)
    near = np.nonzero((off < 2.0**-44 * middle.denominator * b) & (off > 0))[0]
    step = unit[near] // middle.denominator
    return [
        (Fraction(int(a[i]) * int(u), 1 << 23), Fraction(int(b[i]), 1 << 23)) for i, u in zip(near, step, strict=True)
    ]


@pytest.mark.parametrize("boundary", BOUNDARIES, ids=str)
def test_same_side_of_the_boundary(boundary: Fraction) -> None:
    below = Fraction(1, 1 << (25 if boundary == 1 else 24))
    pairs = [p for middle in (boundary + Fraction(1, 1 << 24), boundary - below) for p in close_pairs(middle)]
    assert pairs  # the search finds what it is after
    for a, b in pairs:
        ieee = rn(a / b)
        for ours in (short_division(a, b), packed_division(a, b)):
            assert (ours < boundary, ours > boundary) == (ieee < boundary, ieee > boundary), (a, b)
