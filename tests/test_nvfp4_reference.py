"""The NVFP4 contract against ModelOpt's packed path, vLLM's dequantiser and compressed-tensors, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_quads.kernels.nvfp4 import reference as nvfp4

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def modelopt(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, block scales, tensor scale and the dequantised fp32 values by ModelOpt."""
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    q, s8, s = NVFP4QTensor.quantize(x.clone(), 16, weights_scaling_factor_2=scale)
    values = q.dequantize(torch.float32, scale=s8, double_scale=s, block_sizes={-1: 16})
    return q._quantized_data, s8, s, values


def bits(x: Tensor) -> Tensor:
    """The stored bytes, so that comparisons see the sign of zero."""
    return x.reshape(-1).contiguous().view(torch.uint8)


def assert_same_as_modelopt(x: Tensor, scale: Tensor | None = None) -> None:
    own = nvfp4.tensor_scale(nvfp4.amax(x)) if scale is None else scale
    codes, s8 = nvfp4.quantize(x, own)
    their_codes, their_s8, their_scale, their_values = modelopt(x, scale)
    assert torch.equal(bits(own), bits(their_scale))
    assert torch.equal(bits(s8), bits(their_s8))
    assert torch.equal(codes, their_codes)
    # equal numbers; ModelOpt's table holds +0 for code 8, hardware, vLLM and compressed-tensors read -0 as we do
    assert torch.equal(nvfp4.dequantize(codes, s8, own), their_values)
    assert torch.equal(bits(nvfp4.qdq(x, own)), bits(nvfp4.dequantize(codes, s8, own, x.dtype)))


def inputs(kind: str, dtype: torch.dtype) -> Tensor:
    g = torch.Generator().manual_seed(len(kind))
    x = torch.randn(64, 256, generator=g)
    if kind == "heavy":
        x = x**5
    elif kind == "rows":  # magnitudes from 1e-12 to 1e3 inside one tensor: block scales clamp at 2^-9
        x *= torch.logspace(-12, 3, 64)[:, None]
    elif kind == "zero blocks":
        x[:, 32:64] = 0
        x[5] = 0
    elif kind == "negative zero":
        x[:, ::3] = -0.0
        x[7] = -0.0
    elif kind == "ties":  # a block scale of exactly 1 and all half-way points of the grid
        half = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
        x = torch.cat([half, -half]).repeat(64, 16)
        x[0, 0] = 6.0 * 448
    elif kind == "subnormal":
        x *= 3e-8 if dtype == torch.float16 else 1e-39
    elif kind == "huge":
        x = x.clamp(-3, 3) * (2e4 if dtype == torch.float16 else 1e38)
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "kind", ["random", "heavy", "rows", "zero blocks", "negative zero", "ties", "subnormal", "huge"]
)
def test_packed_path_is_modelopts(kind: str, dtype: torch.dtype) -> None:
    x = inputs(kind, dtype)
    if kind == "subnormal" and dtype != torch.float16:
        assert 0 < x.float().abs().max() < 1e-38
    assert_same_as_modelopt(x)


@pytest.mark.parametrize("scale", [1e-38, 2.0**-20, 1e-3, 0.7, 3e5, 1e35])
def test_given_scale_far_from_the_tensors_own(scale: float) -> None:
    """Saturating block scales, and ratios that underflow to 0 (a zero block for ModelOpt too)."""
    x = inputs("random", torch.float32)
    x[3] *= 1e-12
    assert_same_as_modelopt(x, torch.tensor(scale))


def test_every_bf16_value() -> None:
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = patterns[patterns.isfinite()]
    assert finite.numel() == 65536 - 256
    assert_same_as_modelopt(finite.reshape(-1, 16))
    for scale in (1e-30, 1.0 / 2688, 7.0):
        assert_same_as_modelopt(finite.reshape(-1, 16), torch.tensor(scale))


finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
ordinary = st.floats(width=32, min_value=-1e4, max_value=1e4)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(ordinary, finite32), min_size=48, max_size=48), st.sampled_from(DTYPES))
def test_any_finite_numbers(values: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=torch.float32).to(dtype).reshape(3, 16)
    x = torch.where(x.isfinite(), x, 1.0)  # fp16 and bf16 overflow on conversion
    scale = nvfp4.tensor_scale(nvfp4.amax(x))
    codes, s8 = nvfp4.quantize(x, scale)
    again = nvfp4.dequantize(codes, s8, scale, dtype)
    assert torch.equal(bits(nvfp4.qdq(x, scale)), bits(again))
    step = (s8.float() * scale).unsqueeze(-1)
    if bool((step > 0).all()):  # where ModelOpt divides by zero the contract differs, see below
        assert_same_as_modelopt(x)


def test_where_modelopt_divides_by_zero() -> None:
    """Zero tensors, and an amax / 2688 that underflows: NaN in ModelOpt, exactly +0 here."""
    for x in (torch.zeros(2, 32), torch.full((2, 32), -0.0), torch.full((2, 32), 1e-43)):
        scale = nvfp4.tensor_scale(nvfp4.amax(x))
        assert scale == 0
        codes, s8 = nvfp4.quantize(x, scale)
        assert not codes.any() and bool((s8.float() == 1).all())
        assert not bits(nvfp4.dequantize(codes, s8, scale)).any()
        assert not bits(nvfp4.qdq(x, scale)).any()
    assert modelopt(torch.zeros(2, 32))[3].isnan().all()
    # a block of denormal ulps whose step underflows: ModelOpt stores 7s, the values are zeros in both
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16:] = 5e-42, 1.5e-45
    scale = nvfp4.tensor_scale(nvfp4.amax(x))
    codes, s8 = nvfp4.quantize(x, scale)
    assert scale > 0 and not codes[0, 8:].any()
    assert not nvfp4.dequantize(codes, s8, scale)[0, 16:].any()
    assert not modelopt(x)[3][0, 16:].any()


def test_sign_of_zero() -> None:
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1], x[0, 2] = 6.0, -1e-3, -0.0
    scale = torch.tensor(1.0)
    codes = nvfp4.unpack(nvfp4.quantize(x, scale)[0])
    assert codes[0, :4].tolist() == [7, 8, 0, 0]
    out = nvfp4.qdq(x, scale)
    assert torch.signbit(out[0, :4]).tolist() == [False, True, False, False]


def test_amax_takes_several_tensors_and_keeps_nan() -> None:
    gate, up = torch.tensor([[1.0, -3.0]]), torch.tensor([[2.0, -7.0]])
    assert nvfp4.amax(gate, up) == 7 and nvfp4.amax(gate, torch.empty(0, 2)) == 3
    assert nvfp4.amax(gate.bfloat16()).dtype == torch.float32
    assert nvfp4.amax(gate, torch.tensor([[float("nan")]])).isnan()
    assert nvfp4.amax(gate, torch.tensor([[float("-inf")]])).isinf()


def test_row_scale_makes_rows_independent() -> None:
    x = inputs("rows", torch.bfloat16)
    scale = nvfp4.row_scale(x)
    assert scale.shape == (64, 1)
    whole = nvfp4.qdq(x, scale)
    codes, s8 = nvfp4.quantize(x, scale)
    assert torch.equal(bits(nvfp4.dequantize(codes, s8, scale, x.dtype)), bits(whole))
    for i in (0, 31, 63):
        alone = x[i : i + 1]
        assert torch.equal(bits(nvfp4.qdq(alone, nvfp4.tensor_scale(nvfp4.amax(alone)))), bits(whole[i : i + 1]))


def test_a_weight_with_leading_dimensions() -> None:
    x = torch.randn(3, 8, 32)
    scale = torch.rand(3, 1, 1) * 1e-3
    for i in range(3):
        assert torch.equal(nvfp4.qdq(x, scale)[i], nvfp4.qdq(x[i], scale[i, 0, 0]))


def test_k_not_a_multiple_of_16() -> None:
    with pytest.raises(ValueError, match=r"multiple of 16.*\(4, 24\)"):
        nvfp4.quantize(torch.randn(4, 24), torch.tensor(1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_vllm_reads_the_same_values(dtype: torch.dtype) -> None:
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

    for kind in ("random", "heavy", "rows", "zero blocks", "ties"):
        x = inputs(kind, torch.bfloat16)
        scale = nvfp4.tensor_scale(nvfp4.amax(x))
        codes, s8 = nvfp4.quantize(x, scale)
        theirs = dequantize_to_dtype(codes, s8, scale, dtype, 16, swizzle=False)
        assert torch.equal(bits(theirs), bits(nvfp4.dequantize(codes, s8, scale, dtype)))
        swizzled = nvfp4.swizzle(s8)
        theirs = dequantize_to_dtype(codes, swizzled, scale, dtype, 16, swizzle=True)
        assert torch.equal(bits(theirs), bits(nvfp4.dequantize(codes, s8, scale, dtype)))


def test_compressed_tensors_reads_the_same_values() -> None:
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8

    x = inputs("random", torch.bfloat16)
    scale = nvfp4.tensor_scale(nvfp4.amax(x))
    codes, s8 = nvfp4.quantize(x, scale)
    values = unpack_fp4_from_uint8(codes, 64, 256, torch.float32)
    assert torch.equal(bits(values), bits(nvfp4.decode(nvfp4.unpack(codes))))
    assert torch.equal(pack_fp4_to_uint8(values), codes)
    blocks = values.unflatten(-1, (-1, 16)) * (s8.float() * scale).unsqueeze(-1)
    assert torch.equal(bits(blocks.flatten(-2)), bits(nvfp4.dequantize(codes, s8, scale)))


def test_pack_and_unpack_are_inverse() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(4, 2)
    packed = nvfp4.pack(codes)
    assert packed[0, 0] == 0x10 and torch.equal(nvfp4.unpack(packed), codes)
    assert torch.equal(nvfp4.encode(nvfp4.decode(codes)), codes)


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 5), (300, 16), (0, 8)])
def test_swizzle_is_a_padded_permutation(shape: tuple[int, int]) -> None:
    rows, columns = shape
    s8 = (torch.arange(rows * columns) % 251).to(torch.uint8).reshape(shape).view(torch.float8_e4m3fn)
    out = nvfp4.swizzle(s8)
    assert out.numel() == -(-rows // 128) * 128 * (-(-columns // 4) * 4)
    assert torch.equal(bits(nvfp4.unswizzle(out, rows, columns)), bits(s8))
