"""The Triton kernels against the reference, bit for bit, on a GPU: values, layouts, capture and compilation."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_quads.kernels import nvfp4, rac
from megatron_quads.kernels.nvfp4 import reference
from megatron_quads.kernels.nvfp4.device import NO_CONTRACTION
from megatron_quads.kernels.rac import reference as rac_reference
from megatron_quads.kernels.rac.packed import _silu_and_mul as silu_and_mul_words
from megatron_quads.kernels.rac.triton import _silu_and_mul as silu_and_mul

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CUDA = "cuda"


def bits(x: Tensor) -> Tensor:
    return x.reshape(-1).contiguous().view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def check_single(x: Tensor, scale: Tensor) -> None:
    assert same(nvfp4.qdq(x, scale), reference.qdq(x, scale))
    codes, s8 = nvfp4.quantize(x, scale)
    expected_codes, expected_s8 = reference.quantize(x, scale)
    assert same(codes, expected_codes) and same(s8, expected_s8)


def draw(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    g = torch.Generator(CUDA).manual_seed(seed)
    x = torch.randn(shape, device=CUDA, generator=g)
    if kind == "heavy":
        x = x**5
    elif kind == "rows":
        x *= torch.exp(8 * torch.randn((*shape[:-1], 1), device=CUDA, generator=g))
    elif kind == "grid":  # many exact ties: multiples of a quarter
        x = torch.randint(-24, 25, shape, device=CUDA, generator=g) / 4
    elif kind == "bits":  # any finite pattern
        narrow = torch.randint(-32768, 32768, shape, device=CUDA, generator=g, dtype=torch.int32).to(torch.int16)
        x = narrow.view(torch.bfloat16).float()
        x = torch.where(x.isfinite() & (x.abs() < 1e38), x, 0.5)
    elif kind == "zeros":
        x = torch.where(torch.rand((*shape[:-1], shape[-1] // 16, 1), device=CUDA, generator=g) < 0.5, 0.0, x.unflatten(-1, (-1, 16))).flatten(-2)  # fmt: skip
    x = x.to(dtype)
    return torch.where(x.isfinite(), x, torch.ones((), dtype=dtype, device=CUDA))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "heavy", "rows", "grid", "bits", "zeros"])
def test_a_billion_values_bit_exact(kind: str, dtype: torch.dtype) -> None:
    """6 distributions x 3 dtypes x 2^26 values = 1.2e9; tensor scale, row scale and a scale that saturates blocks."""
    x = draw(kind, (1 << 15, 2048), dtype, seed=7)
    check_single(x, reference.tensor_scale(reference.amax(x)))
    check_single(x, reference.row_scale(x))
    check_single(x[:1024], reference.tensor_scale(reference.amax(x)) / 37)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_itself_is_the_same_on_cpu(dtype: torch.dtype) -> None:
    for kind in ("normal", "rows", "bits", "grid"):
        x = draw(kind, (64, 256), dtype)
        for scale in (reference.tensor_scale(reference.amax(x)), reference.row_scale(x)):
            assert same(reference.qdq(x, scale).cpu(), reference.qdq(x.cpu(), scale.cpu()))


@pytest.mark.parametrize(
    "scale", [1e-44, 1e-38, 2.0**-81, 2.0**-80, 1e-10, 1 / 2688, 1.0, 128.0, 129.0, 1e30, 1e35, 0.0]
)
def test_every_bf16_value_under_every_kind_of_scale(scale: float) -> None:
    patterns = torch.arange(65536, dtype=torch.int32, device=CUDA).to(torch.int16).view(torch.bfloat16)
    finite = patterns[patterns.isfinite()]
    s = torch.tensor(scale, device=CUDA)
    check_single(finite.reshape(-1, 16), s)
    shuffled = finite[torch.randperm(finite.numel(), device=CUDA)].reshape(-1, 16)
    check_single(shuffled, s)
    check_single(shuffled.float(), s)
    for blocks in ([0, 2], list(range(4))):
        x = shuffled.reshape(-1, 64)
        index = torch.tensor(blocks, device=CUDA)
        assert same(rac.qdq_with_residual(x, s, index), rac_reference.qdq_with_residual(x, s, index))


def test_quotients_next_to_every_rounding_boundary() -> None:
    """Steps within 4 ulps of x / boundary: where a division that is off by one ulp picks another code."""
    x = (1 + torch.arange(128, device=CUDA) / 128).bfloat16()  # every significand
    for boundary in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0):
        near = (x.float() / boundary).view(torch.int32)
        for ulps in range(-4, 5):
            step = (near + ulps).view(torch.float32)
            # 64 as the block scale: the block's maximum is 384 steps of 1/64
            rows = torch.zeros(128, 16, device=CUDA, dtype=torch.bfloat16)
            rows[:, 0], rows[:, 1], rows[:, 2] = (step * 6).bfloat16(), x, -x
            check_single(rows, (step / 64)[:, None])


def test_cpu_and_gpu_front_ends_agree() -> None:
    x = draw("heavy", (33, 96), torch.bfloat16)
    index = torch.tensor([4, 1], device=CUDA)
    ours = rac.quantize_with_residual(x, None, index)
    theirs = rac.quantize_with_residual(x.cpu(), None, index.cpu())
    assert all(same(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))


SHAPES = [(4, 16), (1, 48), (33, 4112), (128, 2048), (0, 64), (7, 32, 80)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ragged", [False, True])
def test_grouped(ragged: bool, dtype: torch.dtype) -> None:
    shapes = SHAPES if ragged else [(96, 1056)] * 5
    xs = [draw("heavy", s, dtype, seed=i) for i, s in enumerate(shapes)]
    xs[1].zero_()
    groups = [0, 0, 1, 2, 2, 4][: len(xs)]
    amax = nvfp4.grouped_amax(xs, groups)
    for g in range(max(groups) + 1):
        members = [x for x, j in zip(xs, groups, strict=True) if j == g]
        assert amax[g] == (reference.amax(*members) if members else 0)
    values, codes, s8 = nvfp4.grouped(xs, amax, groups, want_packed=True)
    only = nvfp4.grouped_quantize(xs, amax, groups)
    wide = [torch.full_like(x, 7, dtype=torch.float32) for x in xs]
    nvfp4.grouped_qdq(xs, amax, groups, out=wide)
    scales = reference.tensor_scale(amax)
    for i, x in enumerate(xs):
        expected = reference.quantize(x, scales[groups[i]])
        assert same(values[i], reference.qdq(x, scales[groups[i]]))
        assert same(codes[i], expected[0]) and same(s8[i], expected[1])
        assert same(only[0][i], expected[0]) and same(only[1][i], expected[1])
        assert same(wide[i], reference.qdq(x.float(), scales[groups[i]]))
    expected_values = [v.clone() for v in values]
    nvfp4.grouped_qdq(xs, amax, groups, out=xs)  # in place
    assert all(same(a, b) for a, b in zip(xs, expected_values, strict=True))


def test_grouped_large_weights() -> None:
    """Weights that take the larger tile: 2^19 blocks and more."""
    xs = [draw("heavy", (4096, 2064), torch.bfloat16, seed=i) for i in range(2)]
    amax = nvfp4.grouped_amax(xs)
    for x, value, a in zip(xs, nvfp4.grouped_qdq(xs, amax), amax, strict=True):
        assert same(value, reference.qdq(x, reference.tensor_scale(a)))


def test_grouped_on_views_with_odd_offsets() -> None:
    flat = draw("normal", (16 * 4097,), torch.bfloat16)
    xs = [flat[1 : 1 + 32 * 48].view(32, 48), flat[5001 : 5001 + 64 * 16].view(64, 16)]
    amax = nvfp4.grouped_amax([x.clone() for x in xs])
    if xs[0].data_ptr() % 4:
        assert torch.equal(nvfp4.grouped_amax(xs), amax)
    values = nvfp4.grouped_qdq(xs, amax)
    assert all(same(v, reference.qdq(x, reference.tensor_scale(a))) for v, x, a in zip(values, xs, amax, strict=True))


def test_single_takes_views() -> None:
    base = draw("normal", (64, 256), torch.bfloat16)
    for x in (base[:, 32:96], base.t()[:, :32], base[::3, 16:], base[5:6], base[:0]):
        check_single(x, torch.tensor(1e-3, device=CUDA))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_amax_keeps_nan_and_inf(dtype: torch.dtype) -> None:
    xs = [draw("normal", (64, 2048), dtype, seed=i) for i in range(3)]
    xs[0][17, 5], xs[1][3, 2047], xs[1][3, 2046] = float("-inf"), float("nan"), float("inf")
    amax = nvfp4.grouped_amax(xs)
    assert amax[0].isinf() and amax[1].isnan() and amax[2] == reference.amax(xs[2])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((130, 2048), d) for d in DTYPES]
    + [
        (s, torch.bfloat16)
        for s in ((0, 64), (1, 16), (65, 48), (600, 768), (3, 7168), (5, 16384), (600, 2048), (600, 7168))
    ],
    ids=str,
)
def test_residual(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = draw("heavy", shape, dtype)
    if shape[0] > 2:
        x[1] = 0
        x[2, :16] = 0
    k, half = shape[1], (shape[1] // 16 + 1) // 2
    listed = torch.randperm(k // 16, device=CUDA)[:half]
    tensor = reference.tensor_scale(x.abs().amax().float()) if x.numel() else torch.ones((), device=CUDA)
    row = reference.row_scale(x)
    for blocks in (None, listed, rac.Blocks.prefix(half, k, CUDA), rac.Blocks.of(listed, k), torch.arange(k // 16, device=CUDA)):  # fmt: skip
        index = blocks.index if isinstance(blocks, rac.Blocks) else blocks
        for scale in (None, tensor, row, tensor / 41):
            wide = row if scale is None else scale
            expected = rac_reference.qdq_with_residual(x, wide, index)
            assert same(rac.qdq_with_residual(x, scale, blocks), expected)
            swizzled = scale is None
            ours = rac.quantize_with_residual(x, scale, blocks, swizzled=swizzled)
            theirs = rac_reference.quantize_with_residual(x, scale, index, swizzled=swizzled)
            for name, a, b in zip(ours._fields, ours, theirs, strict=True):
                assert same(a, b), name


@pytest.mark.parametrize(("rows", "k"), [(257, 768), (600, 768), (600, 2048), (600, 7168)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_variants(dtype: torch.dtype, rows: int, k: int) -> None:
    h = draw("normal", (rows, 2 * k), dtype) * 4
    index = torch.arange(20, device=CUDA)
    y = rac_reference.silu_and_mul(h)
    expected = rac_reference.qdq_with_residual(y, reference.row_scale(y), index)
    assert same(rac.qdq_with_residual(h, None, index, silu=True), expected)
    ours = rac.quantize_with_residual(h, None, index, silu=True)
    assert all(same(a, b) for a, b in zip(ours, rac_reference.quantize_with_residual(y, None, index), strict=True))


@triton.jit
def silu_kernel(x_ptr, out_ptr, PACKED: tl.constexpr):
    """silu(gate) * up of 16-bit pairs x [., 2 words]: gate's word, up's word."""
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    if PACKED:
        x_ptr, out_ptr = x_ptr.to(tl.pointer_type(tl.int32)), out_ptr.to(tl.pointer_type(tl.int32))
        tl.store(out_ptr + i, silu_and_mul_words(tl.load(x_ptr + 2 * i), tl.load(x_ptr + 2 * i + 1)))
    else:
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        at = 4 * i[:, None] + tl.arange(0, 2)[None, :]
        y = silu_and_mul(tl.load(x_ptr + at).to(tl.float32), tl.load(x_ptr + at + 2).to(tl.float32), dtype)
        tl.store(out_ptr + 2 * i[:, None] + tl.arange(0, 2)[None, :], y.to(dtype))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_silu_of_every_gate(dtype: torch.dtype, packed: bool) -> None:
    if packed and dtype == torch.float16:
        pytest.skip("the packed kernel is BF16's")
    gate = torch.arange(1 << 16, device=CUDA).to(torch.uint16).view(dtype)
    gate = torch.where(gate.isfinite(), gate, torch.ones_like(gate))
    for up in (torch.ones_like(gate), draw("normal", gate.shape, dtype), draw("heavy", gate.shape, dtype)):
        expected = rac_reference.silu_and_mul(torch.stack([gate, up], 1)).view(-1) + 0.0
        x = torch.stack([gate.view(-1, 2), up.view(-1, 2)], 1).contiguous()
        out = torch.empty_like(gate)
        silu_kernel[(256,)](x, out, PACKED=packed, **NO_CONTRACTION)
        assert same(out + 0.0, expected)


def test_rows_with_a_stride() -> None:
    base = draw("normal", (40, 512), torch.bfloat16)
    x = base[:, 128:384]
    expected = rac_reference.qdq_with_residual(x, reference.row_scale(x), torch.arange(3, device=CUDA))
    assert same(rac.qdq_with_residual(x, None, torch.arange(3, device=CUDA)), expected)


@pytest.mark.parametrize("tokens", [5, 200, 1500])
@pytest.mark.parametrize("selection", ["none", "prefix", "listed"])
def test_grouped_gemm(selection: str, tokens: int) -> None:
    experts, n, k = 5, 208, 336
    x, w = draw("heavy", (tokens, k), torch.bfloat16), draw("normal", (experts, n, k), torch.bfloat16)
    cuts = torch.tensor([0, tokens // 3, tokens // 3, tokens // 2, tokens - 2, tokens - 1], device=CUDA)
    scales = reference.tensor_scale(nvfp4.grouped_amax(list(w)))
    codes, s8 = nvfp4.quantize(w, scales[:, None, None])
    blocks = {
        "none": None,
        "prefix": rac.Blocks.prefix(9, k, CUDA),
        "listed": rac.Blocks.of(torch.tensor([20, 3, 11], device=CUDA), k),
    }[selection]
    q = rac.quantize_with_residual(x, None, blocks)
    out = rac.grouped_gemm(q, codes, s8, scales, cuts, blocks, dtype=torch.float32)
    exact = rac_reference.Quantized(q.codes, q.block_scales, q.scale)
    index = None if blocks is None else blocks.index
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = rac_reference.grouped_gemm(exact, codes, s8, scales, cuts, index, dtype=torch.float32)
    assert not out[tokens - 1 :].any()  # rows of no expert
    assert ((out - expected).norm() / expected.norm()).item() < 1e-5
