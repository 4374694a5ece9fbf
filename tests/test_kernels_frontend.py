"""The kernels' front ends on a CPU: lists of weights, selections, and faults that are named before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_quads.kernels import nvfp4, rac
from megatron_quads.kernels.nvfp4 import reference
from megatron_quads.kernels.nvfp4.checks import check_scale


def weights(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    shapes = [(4, 16), (1, 48), (33, 208), (0, 64), (2, 3, 80)]
    return [(torch.randn(s, generator=g) * 10**i).to(dtype) for i, s in enumerate(shapes)]


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_grouped_is_the_reference_of_each_weight(dtype: torch.dtype) -> None:
    xs, groups = weights(dtype), [0, 0, 1, 3, 3]
    xs[0].zero_()
    amax = nvfp4.grouped_amax(xs, groups)
    assert amax.dtype == torch.float32 and amax.shape == (4,)
    assert amax[0] == xs[1].abs().max() and amax[2] == 0 and amax[3] == xs[4].abs().max()
    values, codes, s8 = nvfp4.grouped(xs, amax, groups, want_packed=True)
    only = nvfp4.grouped_quantize(xs, amax, groups)
    for i, (x, g) in enumerate(zip(xs, groups, strict=True)):
        scale = reference.tensor_scale(amax[g])
        expected = reference.quantize(x, scale)
        assert same(values[i], reference.qdq(x, scale))
        assert same(codes[i], expected[0]) and same(s8[i], expected[1])
        assert same(only[0][i], expected[0]) and same(only[1][i], expected[1])
    assert nvfp4.grouped_amax(xs).shape == (5,)  # by default a group each


def test_grouped_writes_into_buffers_and_in_place() -> None:
    xs = weights()
    amax = nvfp4.grouped_amax(xs)
    expected = nvfp4.grouped_qdq(xs, amax)
    wide = [torch.full_like(x, 7, dtype=torch.float32) for x in xs]
    assert nvfp4.grouped_qdq(xs, amax, out=wide)[2] is wide[2]
    assert all(same(w.bfloat16(), e) for w, e in zip(wide, expected, strict=True))
    nvfp4.grouped_qdq(xs, amax, out=xs)
    assert all(same(x, e) for x, e in zip(xs, expected, strict=True))


def test_empty_lists_and_no_tokens() -> None:
    assert nvfp4.grouped_amax([]).shape == (0,)
    assert nvfp4.grouped([], torch.zeros(0), want_packed=True) == ([], [], [])
    x = torch.empty(0, 64, dtype=torch.bfloat16)
    q = rac.quantize_with_residual(x, None, rac.Blocks.prefix(2, 64, "cpu"), swizzled=True)
    assert q.codes.shape == (0, 48) and q.block_scales.numel() == 0 and q.scale.shape == (0,)
    assert rac.qdq_with_residual(x, None, None).shape == (0, 64)


def test_parameters_are_not_tracked() -> None:
    w = torch.nn.Parameter(torch.randn(4, 32))
    values = nvfp4.grouped_qdq([w], nvfp4.grouped_amax([w]))
    assert not values[0].requires_grad


def test_a_scale_for_each_expert_of_a_stacked_weight() -> None:
    w, scale = torch.randn(3, 4, 32), torch.tensor([0.5, 2.0, 0.01])
    flat = check_scale(scale[:, None, None], w)  # what the kernels read: one for each row
    assert same(flat.reshape(-1), scale.repeat_interleave(4)) and flat.is_contiguous()
    stacked = nvfp4.qdq(w, scale[:, None, None])
    assert all(same(stacked[e], nvfp4.qdq(w[e], scale[e])) for e in range(3))
    assert check_scale(scale.double()[0], w).dtype == torch.float32


def test_blocks_prepared_or_not_select_the_same() -> None:
    x = torch.randn(9, 112)
    index = torch.tensor([6, 0, 3])
    bare, prepared = rac.qdq_with_residual(x, None, index), rac.qdq_with_residual(x, None, rac.Blocks.of(index, 112))
    assert same(bare, prepared)
    assert rac.Blocks.of(index, 112).order.tolist() == [6, 0, 3, 1, 2, 4, 5]
    leading = rac.qdq_with_residual(x, None, rac.Blocks.prefix(3, 112, "cpu"))
    assert same(leading, rac.qdq_with_residual(x, None, torch.arange(3))) and not same(leading, bare)
    h = torch.randn(9, 224)
    out = torch.empty_like(x)
    assert rac.qdq_with_residual(x, None, index, out=out) is out and same(out, bare)
    fused = rac.qdq_with_residual(h, None, index, silu=True)
    assert same(fused, rac.qdq_with_residual(rac.silu_and_mul(h), None, index))


def stored(experts: int = 2, n: int = 8, k: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    w = torch.randn(experts, n, k)
    amax = nvfp4.grouped_amax(list(w))
    codes, s8 = nvfp4.grouped_quantize(list(w), amax)
    return torch.stack(codes), torch.stack([t.view(torch.uint8) for t in s8]).view(torch.float8_e4m3fn), amax / 2688


def test_grouped_gemm_reads_prepared_blocks() -> None:
    codes, s8, scale = stored()
    blocks = rac.Blocks.of(torch.tensor([3, 1]), 64)
    x, offsets = torch.randn(5, 64), torch.tensor([0, 3, 5])
    out = rac.grouped_gemm(rac.quantize_with_residual(x, None, blocks), codes, s8, scale, offsets, blocks)
    assert out.shape == (5, 8) and out.dtype == torch.bfloat16
    plain = rac.grouped_gemm(rac.quantize_with_residual(x, None, None), codes, s8, scale, offsets, None)
    w = nvfp4.dequantize(codes, s8, scale[:, None, None])
    exact = torch.cat([x[:3] @ w[0].T, x[3:] @ w[1].T])
    assert (out - exact).norm() < (plain - exact).norm()


X = torch.randn(8, 64)
ONE = torch.ones(())
FAULTS: list[tuple[str, Any]] = [
    (r"x must be bfloat16, float16 or float32, got torch\.float64", lambda: nvfp4.qdq(X.double(), ONE)),
    (r"got torch\.int32", lambda: rac.qdq_with_residual(X.int(), None, None)),
    (r"multiple of 16, got x of shape \(8, 24\)", lambda: nvfp4.quantize(X[:, :24], ONE)),
    (r"got x of shape \(\)", lambda: nvfp4.qdq(ONE, ONE)),
    ("scale must hold one value", lambda: nvfp4.qdq(X, ONE.expand(3))),
    ("does not match the rows", lambda: nvfp4.qdq(X.view(2, 4, 64), torch.ones(4, 2, 1))),
    (r"xs\[1\] of shape \(8, 32\) is not contiguous", lambda: nvfp4.grouped_amax([X, X[:, :32]])),
    (r"xs\[1\] is torch\.float16 on cpu, xs\[0\] is torch\.float32", lambda: nvfp4.grouped_amax([X, X.half()])),
    ("a group for each of 2 tensors, got 1", lambda: nvfp4.grouped_amax([X, X], [0])),
    ("from 0 on got -1", lambda: nvfp4.grouped_amax([X], [-1])),
    ("below 1, one of amax's", lambda: nvfp4.grouped_qdq([X, X], torch.ones(1))),
    (r"amax must be float32 \[groups\]", lambda: nvfp4.grouped_qdq([X], torch.ones(1).double())),
    ("out must hold one tensor of the same shape", lambda: nvfp4.grouped_qdq([X], torch.ones(1), out=[X[:4]])),
    (r"x must be \[tokens, K\]", lambda: rac.qdq_with_residual(X[0], None, None)),
    ("out must be contiguous", lambda: rac.qdq_with_residual(X, None, None, out=torch.empty_like(X.double()))),
    ("out must be contiguous", lambda: rac.qdq_with_residual(X, None, None, out=X.new_empty(1, 64))),
    ("out must be contiguous", lambda: rac.qdq_with_residual(X, None, None, silu=True, out=torch.empty_like(X))),
    ("multiple of 16, got 8", lambda: rac.qdq_with_residual(X[:, :16], None, None, silu=True)),
    ("rows of K from 16 to 16384", lambda: rac.quantize_with_residual(torch.zeros(1, 16400), None, None)),
    ("contiguous along K", lambda: rac.quantize_with_residual(X.t().contiguous().t(), None, None)),
    ("distinct and from 0 to 3, got", lambda: rac.qdq_with_residual(X, None, torch.tensor([4]))),
    ("distinct and from 0 to 3, got", lambda: rac.Blocks.of(torch.tensor([1, 1]), 64)),
    (r"blocks must be int64 \[S\]", lambda: rac.qdq_with_residual(X, None, torch.tensor([1], dtype=torch.int32))),
    ("prepared for K = 128, not 64", lambda: rac.qdq_with_residual(X, None, rac.Blocks.prefix(1, 128, "cpu"))),
    ("5 leading blocks of a K of 64", lambda: rac.Blocks.prefix(5, 64, "cpu")),
]


@pytest.mark.parametrize(("message", "call"), FAULTS, ids=[m for m, _ in FAULTS])
def test_faults_are_named(message: str, call: Any) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_grouped_gemm_faults() -> None:
    codes, s8, scale = stored()
    q, offsets = rac.quantize_with_residual(X, None, None), torch.tensor([0, 3, 8])
    rac.grouped_gemm(q, codes, s8, scale, offsets, None)
    with pytest.raises(ValueError, match=r"codes must be contiguous torch\.uint8 \(8, 48\)"):
        rac.grouped_gemm(q, codes, s8, scale, offsets, rac.Blocks.prefix(2, 64, "cpu"))
    with pytest.raises(ValueError, match=r"offsets must be contiguous .*\(3,\)"):
        rac.grouped_gemm(q, codes, s8, scale, offsets[:2], None)
    with pytest.raises(ValueError, match="offsets must be"):
        rac.grouped_gemm(q, codes, s8, scale, offsets.float(), None)
    with pytest.raises(ValueError, match="weight_codes must be contiguous"):
        rac.grouped_gemm(q, codes.transpose(1, 2).contiguous().transpose(1, 2), s8, scale, offsets, None)
    with pytest.raises(ValueError, match=r"weight_codes \[E, N, K/2\]"):
        rac.grouped_gemm(q, codes[0], s8, scale, offsets, None)
    with pytest.raises(ValueError, match="dtype must be"):
        rac.grouped_gemm(q, codes, s8, scale, offsets, None, dtype=torch.float64)
