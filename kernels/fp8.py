"""FP8 (E4M3) with one FP32 scale per row: the arithmetic of recipe fp8, for weights [..., N, K] and activations [rows, K].

    scale = max(amax / 448, 1 / (448 * 512))    fp32, of each row of K elements
    code  = e4m3(clamp(x / scale, -448, 448))   in fp32, rounded to nearest even

Every division is an IEEE fp32 division. These are the formulas of vLLM's own online FP8 with a scale for each output
channel of a weight and each token of an input (its ``fp8`` scheme "PTPC"). A row's scale depends on that row alone, so
gate and up, fused or apart, and every split over expert-parallel ranks give the same codes. A row of zeros has codes 0
and the least scale. NaN and Inf are not quantised: the scale of such a row is not finite, by which callers refuse it.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
MIN_SCALE = 1.0 / (E4M3_MAX * 512.0)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K], any float type -> (codes e4m3 [..., K], scale fp32 [...]); nothing in it waits for the device.

    K = 0 raises IndexError, as torch's amax does.
    """
    scale = x.detach().abs().amax(-1).float()
    # a tensor as divisor: on CUDA, torch multiplies by the reciprocal of a number, which is off by an ulp at times
    scale = (scale / torch.full_like(scale, E4M3_MAX)).clamp_min(MIN_SCALE)
    return (x.detach().float() / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Codes e4m3 [..., K] times scale fp32 [...], in fp32, rounded once to ``dtype``."""
    return (codes.float() * scale.unsqueeze(-1)).to(dtype)


def linear(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Q(x) W^T in fp32 [rows, N]: x [rows, K] quantised by row, W as codes e4m3 [N, K] and scale fp32 [N].

    The products of codes are exact and summed in fp32; both scales multiply the sum, as in the epilogue of an FP8 GEMM.
    """
    mine, own = quantize(x)
    return torch.nn.functional.linear(mine.float(), codes.float()) * own.unsqueeze(-1) * scale
