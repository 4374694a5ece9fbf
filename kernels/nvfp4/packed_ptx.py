"""The instructions of ``packed.py``: PTX over the 32-bit words of one block, made once. tests/test_kernels_packed.py runs them.

BF16 has 8 significant bits, so under one step all values that take a code lie between two BF16 numbers. ``THRESHOLDS``
finds those once for a block, exactly as the IEEE quotient would decide, and ``ENCODE`` compares both values of a word at
once, as integers:

* above 1.25 steps E2M1 has two codes in an octave. With i the bits of a value (7 of them below the exponent), the codes
  beyond 2 are the octaves since 1.25 steps, ((i - T(1.25)) >> 7) + 1, and those since 1.75, each 0 at least;
* codes 1 and 2 begin at .25 and .75 steps.

Residuals are fp32. Their quotient is a y + a y' with 1/b = y + y' to 47 bits, another way to the precision of
``device.reciprocal``'s (tests/test_kernels_division.py looks at both).
"""

from __future__ import annotations

import struct

import triton.language as tl

_WORDS = range(8)


def _asm(registers: str, *lines: str) -> tl.constexpr:
    return tl.constexpr("{.reg .b32 " + registers + ";" + "".join(lines) + "}")


def _tree(op: str, names: list[str], to: str) -> str:
    """``to`` = names reduced by a two-operand instruction."""
    text = ""
    for i, name in enumerate(names[1:]):
        text += f"{op} {to}, {names[0] if i == 0 else to}, {name};"
    return text


# $0-7 words, -0 made +0; $8 bits of the largest magnitude; $9-16 words
CLEAN = _asm(
    "t, u, v",
    *(f"add.rn.bf16x2 ${i}, ${i + 9}, $17;" for i in _WORDS),
    _tree("max.xorsign.abs.bf16x2", [f"${i}" for i in range(4)], "t"),
    _tree("max.xorsign.abs.bf16x2", [f"${i}" for i in range(4, 8)], "u"),
    "max.xorsign.abs.bf16x2 t, t, u; shl.b32 u, t, 16; and.b32 t, t, 0x7FFF0000; and.b32 u, u, 0x7FFF0000;",
    "max.u32 $8, t, u;",
)


def _float(x: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"


def _thresholds(strict: float, inclusive: float, octave: int, first: int, second: int) -> str:
    """Outputs ``first`` and ``second``: ``octave`` less the least BF16 beyond ``strict`` and from ``inclusive`` steps on.

    A quotient counts as the boundary within half an ulp of it, which even significands win. g is the BF16 next to the
    boundary, d = g - boundary, exactly.
    """

    def ulp(b: float) -> float:
        return 2.0 ** ((b >= 1) - 25 - (b < 0.5))  # half of the spacing of floats at b

    return (
        f"mul.rn.f32 p, $4, {_float(strict)}; mul.rn.f32 q, $4, {_float(inclusive)}; cvt.rn.bf16x2.f32 g, q, p;"
        f"shl.b32 p, g, 16; and.b32 q, g, 0xFFFF0000;"
        f"fma.rn.f32 p, $5, {_float(strict)}, p; fma.rn.f32 q, $5, {_float(inclusive)}, q; neg.f32 p, p;"
        f"fma.rn.f32 p, $4, {_float(ulp(strict))}, p; fma.rn.f32 q, $4, {_float(ulp(inclusive))}, q;"
        f"shr.s32 p, p, 31; shr.s32 q, q, 31; add.s32 p, p, g; shr.u32 g, g, 16; sub.s32 q, g, q;"
        f"sub.s32 p, {octave - 1}, p; sub.s32 q, {octave}, q;"
        f"prmt.b32 ${first}, p, p, 0x1010; prmt.b32 ${second}, q, q, 0x1010;"
    )


# $0-3 what to add to a magnitude's bits for the codes from 1, 2, 3 and 4 on; $4 step, $5 -step
THRESHOLDS = _asm("p, q, g", _thresholds(0.25, 0.75, 1, 0, 1), _thresholds(1.25, 1.75, 128, 2, 3))


def _encode(word: int, out: str) -> str:
    """The two codes of a word in bits 12 to 15 and 28 to 31; bits below 12 and 28 are left over."""
    return (
        f"and.b32 m, ${word}, 0x7FFF7FFF;"
        "add.s16x2 a, m, $18; min.relu.s16x2 a, a, one; add.s16x2 b, m, $19; min.relu.s16x2 b, b, one;"
        "add.s16x2 u, m, $20; min.relu.s16x2 u, u, three; add.s16x2 v, m, $21; min.relu.s16x2 v, v, two;"
        "and.b32 v, v, 0x01800180; add.u32 u, u, v; add.u32 a, a, b; shl.b32 a, a, 12; mad.lo.u32 u, u, 32, a;"
        f"lop3.b32 {out}, u, ${word}, 0x7FFF7FFF, 0xE4;"
    )


def _pack(n: list[str], to: str) -> str:
    """Eight nibbles from four of ``_encode``'s words."""
    return (
        f"prmt.b32 a, {n[0]}, {n[1]}, 0x7351; prmt.b32 b, {n[2]}, {n[3]}, 0x7351; prmt.b32 u, a, b, 0x5410;"
        f"prmt.b32 v, a, b, 0x7632; shr.u32 u, u, 4; lop3.b32 {to}, u, v, 0x0F0F0F0F, 0xE4;"
    )


# $0-1 packed codes, $2-9 E2M1 values as BF16; $10-17 words, $18-21 from THRESHOLDS, $22 2^126
ENCODE = _asm(
    "a, b, m, u, v, one, two, three, n<8>",
    "mov.b32 one, 0x00010001; mov.b32 two, 0x017F017F; mov.b32 three, 0x01FF01FF;",
    *(_encode(i + 10, f"n{i}") for i in _WORDS),
    _pack(["n0", "n1", "n2", "n3"], "$0"),
    _pack(["n4", "n5", "n6", "n7"], "$1"),
    # a code six bits up is the bit pattern of its value times 2^-126
    *(
        f"shr.u32 u, n{i}, 6; and.b32 v, ${i + 10}, 0x80008000; lop3.b32 u, u, 0x01C001C0, v, 0xEA;"
        f"mul.rn.bf16x2 ${i + 2}, u, $22;"
        for i in _WORDS
    ),
)

# $0-15 x - value, fp32; $16 bits of the largest magnitude; $17-24 words, $25-32 values, $33 step
RESIDUAL = _asm(
    "p, q",
    *(
        f"shl.b32 p, ${i + 25}, 16; mul.rn.f32 p, p, $33; shl.b32 q, ${i + 17}, 16; sub.rn.f32 ${2 * i}, q, p;"
        f"and.b32 p, ${i + 25}, 0xFFFF0000; mul.rn.f32 p, p, $33; and.b32 q, ${i + 17}, 0xFFFF0000;"
        f"sub.rn.f32 ${2 * i + 1}, q, p;"
        for i in _WORDS
    ),
    "abs.f32 p, $0;",
    *(f"abs.f32 q, ${i}; max.f32 p, p, q;" for i in range(1, 16)),
    "mov.b32 $16, p;",
)


def _quotient(x: str, y: str, rest: str, top: str) -> str:
    """q = min(|x|, top) / b for 1 / b = y + rest."""
    return f"abs.f32 a, {x}; min.f32 a, a, {top}; mul.rn.f32 q, a, {rest}; fma.rn.f32 q, a, {y}, q;"


def _encode_residual(first: int, to: str) -> str:
    """Eight codes, as ``device._code`` counts them; adding up is all on the FMA pipe, which has twice the ALU's rate."""
    text = "mov.b32 n, 0;"
    for i in reversed(range(first, first + 8)):
        text += (
            f"abs.f32 a, ${i + 2}; mul.rn.f32 q, a, $19; fma.rn.sat.f32 q, a, $18, q; mul.rn.sat.f32 a, q, 0f40800000;"
            "fma.rn.sat.f32 b, q, 0f40800000, 0fBF800000; fma.rn.sat.f32 q, q, 0f40800000, 0fC0000000;"
            "fma.rn.f32 a, a, 0f40800000, 0f4B400000; fma.rn.f32 a, b, 0f40000000, a; add.rn.f32 a, q, a;"
            f"shf.l.wrap.b32 a, ${i + 2}, a, 1; shl.b32 n, n, 4; add.u32 n, n, a;"
        )
    # a nibble holds the sign below the code, and the sums' exponents have added up
    return text + f"sub.u32 n, n, 0x7E800000; shr.u32 a, n, 1; shl.b32 n, n, 3; lop3.b32 {to}, a, n, 0x77777777, 0xE4;"


# $0-1 packed codes; $2-17 residuals, $18 and $19 an eighth of the reciprocal
ENCODE_RESIDUAL = _asm("a, b, q, n", _encode_residual(0, "$0"), _encode_residual(8, "$1"))

# $0-7 words of value * step, $8-15 values, $16 step
VALUES = _asm(
    "p, q",
    *(
        f"shl.b32 p, ${i + 8}, 16; mul.rn.f32 p, p, $16; and.b32 q, ${i + 8}, 0xFFFF0000; mul.rn.f32 q, q, $16;"
        f"cvt.rn.bf16x2.f32 ${i}, q, p;"
        for i in _WORDS
    ),
)


def _sum(value: str, x: int, to: str) -> str:
    """value * step + DQ(Q(residual)); the rounding is device._round_e2m1's."""
    return (
        _quotient(f"${x}", "$33", "$34", "$35")
        + f"max.f32 a, q, {_float(1.0)}; and.b32 a, a, 0x7F800000; fma.rn.f32 q, a, {_float(2.0**22 + 3)}, q;"
        + f"fma.rn.f32 q, a, {_float(-(2.0**22) - 3)}, q; mul.rn.f32 q, q, $36; lop3.b32 q, q, ${x}, 0x80000000, 0xF8;"
        + f"mul.rn.f32 {to}, {value}, $32; add.rn.f32 {to}, {to}, q;"
    )


# $0-7 words of both parts' sums; $8-15 values, $16-31 residuals, $32 step, $33 and $34 the reciprocal, $35 6, $36 1 step
SUM = _asm(
    "a, q, s, t",
    *(
        f"shl.b32 s, ${i + 8}, 16; {_sum('s', 16 + 2 * i, 's')} and.b32 t, ${i + 8}, 0xFFFF0000;"
        f"{_sum('t', 17 + 2 * i, 't')} cvt.rn.bf16x2.f32 ${i}, t, s;"
        for i in _WORDS
    ),
)


_EXCHANGE = "shfl.sync.bfly.b32 {}, {}, 1, 31, 0xFFFFFFFF;"
# $0-3 the half to keep, $4-7 the neighbour's half of the same block; $8-11 and $12-15 halves loaded, $16 odd
TAKE = _asm(
    "t; .reg .pred p",
    "setp.ne.b32 p, $16, 0;",
    *(f"selp.b32 t, ${i + 8}, ${i + 12}, p; {_EXCHANGE.format(f'${i + 4}', 't')}" for i in range(4)),
    *(f"selp.b32 ${i}, ${i + 12}, ${i + 8}, p;" for i in range(4)),
)
GIVE = _asm(
    "t; .reg .pred p",
    "setp.ne.b32 p, $16, 0;",
    *(
        f"{_EXCHANGE.format('t', f'${i + 12}')} selp.b32 ${i}, t, ${i + 8}, p; selp.b32 ${i + 4}, ${i + 8}, t, p;"
        for i in range(4)
    ),
)


def _constraints(outputs: str, inputs: str) -> tl.constexpr:
    return tl.constexpr(",".join(["=&" + c for c in outputs] + list(inputs)))


TAKE_IO = _constraints("r" * 8, "r" * 9)
CLEAN_IO = _constraints("r" * 9, "r" * 9)
THRESHOLDS_IO = _constraints("r" * 4, "ff")
ENCODE_IO = _constraints("r" * 10, "r" * 13)
RESIDUAL_IO = _constraints("f" * 17, "r" * 16 + "f")
ENCODE_RESIDUAL_IO = _constraints("r" * 2, "f" * 18)
VALUES_IO = _constraints("r" * 8, "r" * 8 + "f")
SUM_IO = _constraints("r" * 8, "r" * 8 + "f" * 21)
