"""The NVFP4 arithmetic contract in plain PyTorch: the only rounding code the trainer, the exporter and the rollout use.

NVFP4 stores E2M1 codes (0 .5 1 1.5 2 3 4 6 and a sign bit), one E4M3 scale per block of 16 elements along the last
dimension K, and one FP32 scale per tensor (or per row, for activations):

    scale       = amax / (6 * 448)                        fp32, one division
    ratio       = block_amax / (6 * scale)
    block_scale = e4m3(clamp(ratio, 2^-9, 448)); 1.0 where the ratio is exactly 0 (an all-zero block)
    quotient    = x / (fp32(block_scale) * scale)
    code        = rne_e2m1(quotient): saturates at 6; a negative quotient that rounds to zero keeps its sign (code 8),
                  while -0.0 itself becomes +0 (code 0)
    dequantised = value(code) * (fp32(block_scale) * scale), in fp32, rounded once to the output's dtype

Every division is an IEEE fp32 division. Bit-exact with ModelOpt 0.47's packed path
(``modelopt.torch.quantization.qtensor.NVFP4QTensor``) in codes and scales, except where ModelOpt divides by zero:

* ``scale == 0`` (an all-zero tensor or row, or an amax below 2^-138 or so, whose amax / 2688 underflows): ModelOpt
  stores NaN block scales and dequantises zeros to NaN; here codes are 0, block scales 1.0 and values +0;
* ``fp32(block_scale) * scale == 0`` (fp32 blocks of a few denormal ulps under a denormal scale): ModelOpt divides by
  zero and stores code 7 or 15; here the codes are 0. Both dequantise to a zero.

Code 8 dequantises to -0 as in vLLM and compressed-tensors; ModelOpt's table says +0.

An fp32 tensor whose amax is within an ulp or two of FLT_MAX can dequantise to Inf, as it does in ModelOpt. NaN and Inf
are not quantised: callers look at ``amax`` first and reject the tensor by its name.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN_SUBNORMAL = 2.0**-9


def _blocks(x: Tensor) -> Tensor:
    """[..., K] -> [..., K/16, 16]; raises ValueError when K is not a multiple of 16."""
    if x.shape[-1] % BLOCK:
        raise ValueError(f"NVFP4 needs K to be a multiple of {BLOCK}, got shape {tuple(x.shape)}")
    return x.unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))


def amax(*tensors: Tensor) -> Tensor:
    """Largest magnitude over all given tensors, fp32 scalar. gate and up are given together: they share one scale.

    NaN propagates and Inf stays Inf: callers reject a non-finite amax with the parameter's name.
    """
    parts = [t.detach().abs().amax().float() if t.numel() else t.new_zeros((), dtype=torch.float32) for t in tensors]
    return torch.stack(parts).amax()


def tensor_scale(amax: Tensor) -> Tensor:
    """FP32 per-tensor scale (ModelOpt ``weight_scale_2``) of an fp32 amax of any shape.

    The divisor is a tensor: on CUDA, torch multiplies by the reciprocal of a number, which is off by an ulp at times
    (ModelOpt's scale computed on a GPU is; computed on a CPU it is this one).
    """
    return amax.float() / torch.full((), E2M1_MAX * E4M3_MAX, dtype=torch.float32, device=amax.device)


def row_scale(x: Tensor) -> Tensor:
    """Per-row (per-token) FP32 scale of x [..., K] -> [..., 1]."""
    return tensor_scale(x.detach().abs().amax(-1, keepdim=True))


def block_scale(x: Tensor, scale: Tensor) -> Tensor:
    """E4M3 block scales [..., K/16] of x [..., K] under the FP32 ``scale`` (scalar, or [..., 1] per row)."""
    top = _blocks(x).abs().amax(-1).float()
    ratio = top / (E2M1_MAX * scale)
    # a ratio that underflows to 0 counts as a zero block, as in ModelOpt
    ratio = torch.where((ratio == 0) | (scale == 0), 1.0, ratio)
    return ratio.clamp(E4M3_MIN_SUBNORMAL, E4M3_MAX).to(torch.float8_e4m3fn)


def round_e2m1(x: Tensor) -> Tensor:
    """Round fp32 values to the E2M1 grid: nearest, ties to the even code, saturating at 6.

    Negative values that round to zero give -0; -0.0 gives +0.
    """
    a = x.abs().clamp(max=E2M1_MAX)
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    return torch.copysign(torch.round(a / step) * step, x + 0.0)


def _steps(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E2M1 values [..., K/16, 16] fp32, E4M3 block scales [..., K/16], combined steps [..., K/16, 1] fp32."""
    scale = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    s8 = block_scale(x, scale)
    step = (s8.float() * scale).unsqueeze(-1)
    values = round_e2m1(_blocks(x).float() / step)
    # the step is 0 under a zero scale, and where a denormal scale underflows
    return torch.where(step == 0, 0.0, values), s8, step


def quantize(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] -> packed codes uint8 [..., K/2] (low nibble = even index) and E4M3 block scales [..., K/16]."""
    values, s8, _ = _steps(x, scale)
    return pack(encode(values.flatten(-2))), s8


def encode(values: Tensor) -> Tensor:
    """E2M1 values (already on the grid) -> 4-bit codes in uint8, sign in bit 3."""
    a = values.abs()
    # index on the grid 0 .5 1 1.5 2 3 4 6: twice the value below 2, then value + 2, then 7 for 6
    index = torch.where(a <= 2, a * 2, torch.where(a <= 4, a + 2, 7.0))
    return index.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)


def pack(codes: Tensor) -> Tensor:
    """4-bit codes uint8 [..., K] -> packed uint8 [..., K/2], low nibble = even index."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).contiguous()


def unpack(packed: Tensor) -> Tensor:
    """Packed uint8 [..., K/2] -> 4-bit codes uint8 [..., K]."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def decode(codes: Tensor) -> Tensor:
    """4-bit codes uint8 -> E2M1 values fp32."""
    index = (codes & 7).float()
    value = torch.where(index <= 4, index * 0.5, torch.where(index <= 6, index - 2, E2M1_MAX))
    return torch.where(codes > 7, -value, value)


def dequantize(packed: Tensor, s8: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Packed codes [..., K/2], block scales [..., K/16], FP32 scale (scalar or [..., 1]) -> values [..., K].

    The product is taken in fp32 and rounded once to ``dtype``.
    """
    values = _blocks(decode(unpack(packed)))
    scale = torch.as_tensor(scale, dtype=torch.float32, device=packed.device)
    return (values * (s8.float() * scale).unsqueeze(-1)).flatten(-2).to(dtype)


def qdq(x: Tensor, scale: Tensor) -> Tensor:
    """Quantise and dequantise x [..., K]; bitwise ``dequantize(*quantize(x, scale), scale, x.dtype)``."""
    values, _, step = _steps(x, scale)
    return (values * step).flatten(-2).to(x.dtype)


def swizzle(s8: Tensor) -> Tensor:
    """Block scales [rows, K/16] -> the 128x4 tiled order that Blackwell's block-scaled GEMMs read, flat and zero padded.

    Rows are padded to 128 and columns to 4. Entry (r, c) lies in tile (r // 128, c // 4), tiles in row-major order, at
    byte ``(r % 32) * 16 + (r % 128) // 32 * 4 + c % 4`` of the tile's 512 bytes.
    """
    rows, columns = s8.shape
    padded = s8.new_zeros((-(-rows // 128) * 128, -(-columns // 4) * 4), dtype=torch.uint8)
    padded[:rows, :columns] = s8.view(torch.uint8)
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(s8.dtype)


def unswizzle(flat: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of ``swizzle``: -> [rows, columns]."""
    row_tiles, column_tiles = -(-rows // 128), -(-columns // 4)
    tiles = flat.view(torch.uint8).reshape(row_tiles, column_tiles, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(row_tiles * 128, column_tiles * 4)[:rows, :columns].contiguous().view(flat.dtype)
