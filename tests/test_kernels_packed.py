"""The packed kernels' instructions (``kernels/nvfp4/packed_ptx.py``), interpreted on the CPU, against the reference bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_quads.kernels.nvfp4 import packed_ptx, reference

U = NDArray[np.uint32]
F = NDArray[np.float32]


def saturated(x: F) -> F:
    return np.clip(x, np.float32(0), np.float32(1))


def fma(a: F, b: F, c: F) -> F:
    """a * b + c rounded once: the sum in fp64, rounded to odd, keeps what decides."""
    p, w = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    s = p + w
    t = s - p
    error = (p - (s - t)) + (w - t)
    even = (s.view(np.int64) & 1) == 0
    away = (error > 0) == (s > 0)
    s = np.where((error != 0) & even, (s.view(np.int64) + np.where(away, 1, -1)).view(np.float64), s)
    return s.astype(np.float32)


def bf16(x: F) -> U:
    return torch.from_numpy(x.copy()).bfloat16().view(torch.int16).numpy().astype(np.uint16).astype(np.uint32)


def wide(half: U) -> F:
    return (half << np.uint32(16)).view(np.float32)


def lanes(f: Callable[[U, U], U], a: U, b: U) -> U:
    low = f(a & np.uint32(0xFFFF), b & np.uint32(0xFFFF)) & np.uint32(0xFFFF)
    return low | (f(a >> np.uint32(16), b >> np.uint32(16)) << np.uint32(16))


def signed(x: U) -> NDArray[np.int32]:
    return ((x.astype(np.int32) & 0xFFFF) ^ 0x8000) - 0x8000


def lop3(a: U, b: U, c: U, table: U) -> U:
    out = np.zeros_like(a)
    for i in range(8):
        if int(table.flat[0]) >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def prmt(a: U, b: U, selector: U) -> U:
    source = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.zeros_like(a)
    for i in range(4):
        n = int(selector.flat[0]) >> 4 * i & 15
        out |= ((source >> np.uint64(8 * n)) & np.uint64(255)).astype(np.uint32) << np.uint32(8 * i)
    return out


def f(x: U) -> F:
    return x.view(np.float32)


def u(x: F) -> U:
    return np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)


MAGNITUDE = np.uint32(0x7FFF)
OPS: dict[str, Callable[..., U]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "shr.s32": lambda a, b: (a.view(np.int32) >> b.view(np.int32)).view(np.uint32),
    "add.u32": lambda a, b: a + b,
    "add.s32": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b,
    "sub.u32": lambda a, b: a - b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "max.u32": np.maximum,
    "abs.f32": lambda a: a & np.uint32(0x7FFFFFFF),
    "neg.f32": lambda a: a ^ np.uint32(0x80000000),
    "mul.rn.f32": lambda a, b: u(f(a) * f(b)),
    "add.rn.f32": lambda a, b: u(f(a) + f(b)),
    "sub.rn.f32": lambda a, b: u(f(a) - f(b)),
    "mul.rn.sat.f32": lambda a, b: u(saturated(f(a) * f(b))),
    "fma.rn.sat.f32": lambda a, b, c: u(saturated(fma(f(a), f(b), f(c)))),
    "fma.rn.f32": lambda a, b, c: u(fma(f(a), f(b), f(c))),
    "min.f32": lambda a, b: u(np.minimum(f(a), f(b))),
    "max.f32": lambda a, b: u(np.maximum(f(a), f(b))),
    "shf.l.wrap.b32": lambda a, b, n: (b << n) | (a >> (np.uint32(32) - n)),
    "lop3.b32": lop3,
    "prmt.b32": prmt,
    "add.s16x2": lambda a, b: lanes(lambda x, y: x + y, a, b),
    "min.relu.s16x2": lambda a, b: lanes(
        lambda x, y: np.maximum(np.minimum(signed(x), signed(y)), 0).astype(np.uint32), a, b
    ),
    "cvt.rn.bf16x2.f32": lambda a, b: (bf16(f(a)) << np.uint32(16)) | bf16(f(b)),
    "add.rn.bf16x2": lambda a, b: lanes(lambda x, y: bf16(wide(x) + wide(y)), a, b),
    "mul.rn.bf16x2": lambda a, b: lanes(lambda x, y: bf16(wide(x) * wide(y)), a, b),
    "max.xorsign.abs.bf16x2": lambda a, b: lanes(
        lambda x, y: np.maximum(x & MAGNITUDE, y & MAGNITUDE) | ((x ^ y) & np.uint32(0x8000)), a, b
    ),
}


def run(text: str, outputs: int, *inputs: U) -> list[U]:
    """Interpret straight PTX over arrays: inputs are operands from ``outputs`` on."""
    r: dict[str, U] = {f"${outputs + i}": x.view(np.uint32) for i, x in enumerate(inputs)}
    shape = inputs[0].shape

    def value(name: str) -> U:
        if name in r:
            return r[name]
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full(shape, number & 0xFFFFFFFF, np.uint32)

    for line in text.strip("{}").split(";"):
        op, _, rest = line.strip().partition(" ")
        if op and op != ".reg":
            to, *names = (n.strip() for n in rest.split(","))
            r[to] = OPS[op](*map(value, names))
    return [r[f"${i}"] for i in range(outputs)]


def words(x: Tensor) -> list[U]:
    """BF16 [blocks, 16] -> eight uint32 [blocks]."""
    flat = x.contiguous().view(torch.int32).numpy().view(np.uint32)
    return [np.ascontiguousarray(flat[:, i]) for i in range(8)]


def blocks(kind: str, n: int = 1 << 13) -> Tensor:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(n, 16, generator=g)
    if kind == "heavy":
        x = x**5
    elif kind == "grid":
        x = torch.randint(-24, 25, (n, 16), generator=g) / 4
    elif kind == "ties":  # every significand beside the boundaries of many steps
        x = (1 + torch.randint(0, 128, (n, 16), generator=g) / 128) * 2.0 ** torch.randint(-3, 3, (n, 16), generator=g)
    x[::7, 3], x[1::7, 5] = 0.0, -0.0
    x[5] = 0
    return x.bfloat16()


def scales(kind: str, x: Tensor) -> Tensor:
    """Per-block fp32 scales [blocks, 1]: of the block, a power of two, or such that steps lie beside x / boundary."""
    if kind == "own":
        return reference.row_scale(x).clamp(min=2.0**-80)  # below, other instructions are used
    if kind == "round":
        return torch.full((x.shape[0], 1), 2.0**-9)
    g = torch.Generator().manual_seed(6)
    boundary = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])[torch.randint(0, 7, (x.shape[0],), generator=g)]
    step = (x[:, 1].float().abs() + 1e-3) / boundary
    s8 = reference.block_scale(x, reference.row_scale(x))[:, 0].float()
    near = (step / s8).view(torch.int32) + torch.randint(-3, 4, (x.shape[0],), generator=g, dtype=torch.int32)
    return near.view(torch.float32)[:, None]


def as_codes(pair: list[U]) -> Tensor:
    return torch.from_numpy(np.stack(pair, 1).view(np.uint8))


@pytest.mark.parametrize("scale_kind", ["own", "round", "near"])
@pytest.mark.parametrize("kind", ["normal", "heavy", "grid", "ties"])
def test_instructions_against_the_reference(kind: str, scale_kind: str) -> None:
    x = blocks(kind)
    scale = scales(scale_kind, x)
    codes, s8 = reference.quantize(x, scale)
    step = (s8.float() * scale)[:, 0].numpy()
    *clean, top = run(packed_ptx.CLEAN.value, 9, *words(x), np.zeros(len(x), np.uint32))
    assert np.array_equal(f(top), x.float().abs().amax(1).numpy())
    thresholds = run(packed_ptx.THRESHOLDS.value, 4, u(step), u(-step))
    two126 = np.full(len(x), 0x7E807E80, np.uint32)
    c0, c1, *values = run(packed_ptx.ENCODE.value, 10, *clean, *thresholds, two126)
    assert torch.equal(as_codes([c0, c1]), codes)

    plain = run(packed_ptx.VALUES.value, 8, *values, u(step))
    exact = reference.qdq(x, scale)
    assert all(np.array_equal(a, b) for a, b in zip(plain, words(exact), strict=True))

    *rest, rest_top = run(packed_ptx.RESIDUAL.value, 17, *clean, *values, u(step))
    r = x.float() - reference.qdq(x.float(), scale)
    assert np.array_equal(np.stack([f(v) for v in rest], 1), r.numpy())
    assert np.array_equal(f(rest_top), r.abs().amax(1).numpy())

    rest_codes, rest_s8 = reference.quantize(r, scale)
    rest_step = (rest_s8.float() * scale)[:, 0].numpy()
    y = (1 / rest_step.astype(np.float64)).astype(np.float32)
    e = fma(-rest_step, y, np.float32(1) + 0 * y)
    low = fma(e, e, e) * y
    eighth = np.float32(0.125)
    pair = run(packed_ptx.ENCODE_RESIDUAL.value, 2, *rest, u(y * eighth), u(low * eighth))
    assert torch.equal(as_codes(pair), rest_codes)
    both = run(
        packed_ptx.SUM.value, 8, *values, *rest, u(step), u(y), u(low), u(rest_step * np.float32(6)), u(rest_step)
    )
    expected = (reference.qdq(x.float(), scale) + reference.qdq(r, scale)).bfloat16()
    assert all(np.array_equal(a, b) for a, b in zip(both, words(expected), strict=True))


def test_every_instruction_is_covered() -> None:
    texts = [
        packed_ptx.CLEAN,
        packed_ptx.THRESHOLDS,
        packed_ptx.ENCODE,
        packed_ptx.RESIDUAL,
        packed_ptx.ENCODE_RESIDUAL,
        packed_ptx.SUM,
    ]
    used = {m for t in texts for m in re.findall(r"(?:^|;)\s*([a-z][a-z0-9.]+) ", t.value)}
    assert used <= set(OPS) and len(used) > 20
