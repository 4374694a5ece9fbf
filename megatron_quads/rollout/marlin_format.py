"""ModelOpt NVFP4 experts to Marlin's layout and back, all experts of a layer at once.

vLLM prepares Marlin's scales expert by expert with a host sync each; its functions act on rows alone, so here they get
all experts' rows in one call. The way back serves the audit only: the permutation is found by repacking the elements'
own indices.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4

from ..kernels import nvfp4

UNPACKED = 1 << 24  # elements that are held in fp32 at a time
GLOBAL_EXPONENT = {torch.bfloat16: 119, torch.float16: 7}  # Marlin's exponent bias less the 7 of its block scales


class MarlinGemm(NamedTuple):
    """One GEMM of E experts [N, K]."""

    weight: Tensor  # int32 [E, K/16, 2 N]
    scale: Tensor  # fp8 S0E5M3 bits in e4m3 storage [E, K/16, N]
    scale_2: Tensor  # fp32 [E]
    factor: float  # power of two: block scales are stored times it


def to_marlin(codes: Tensor, s8: Tensor, scale_2: Tensor, dtype: torch.dtype) -> MarlinGemm:
    """codes uint8 [E, N, K/2], block scales e4m3 [E, N, K/16], scale_2 fp32 [E]; ``dtype`` of the activations.

    One host sync. Marlin cannot hold a block scale below 2^-6 times the layer's largest / 448 and stores 0.
    """
    scale, factor = scales_to_marlin(s8, dtype)
    wide = marlin_utils_fp4.nvfp4_marlin_process_global_scale(scale_2.float(), dtype)
    return MarlinGemm(repack(codes), scale, wide / factor, factor)


def repack(codes: Tensor) -> Tensor:
    """uint8 [E, N, K/2] -> Marlin's int32 [E, K/16, 2 N], in two launches. CUDA only.

    The tiles of 16 along K are moved one by one, so experts may lie behind each other along K.
    """
    experts, n, half = codes.shape
    words = codes.contiguous().view(torch.int32).transpose(1, 2).reshape(experts * half // 4, n)
    given: dict[str, Any] = {
        "b_q_weight": words, "size_k": 2 * half * experts, "size_n": n, "num_bits": 4, "is_a_8bit": False
    }  # fmt: skip
    if "perm" in inspect.signature(ops.gptq_marlin_repack).parameters:  # vLLM 0.26
        given["perm"] = torch.empty(0, dtype=torch.int, device=codes.device)
    return ops.gptq_marlin_repack(**given).view(experts, half // 8, 2 * n)


def scales_to_marlin(s8: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
    """e4m3 [E, N, K/16] -> (Marlin's block scales [E, K/16, N], the power of two they were multiplied with)."""
    experts, n, blocks = s8.shape
    wide = s8.to(dtype)
    factor = marlin_utils_fp4._nvfp4_compute_scale_factor(wide, dtype)
    rows = wide.transpose(1, 2).reshape(experts * blocks, n)
    rows = marlin_utils.marlin_permute_scales(rows, blocks * nvfp4.BLOCK, n, nvfp4.BLOCK)
    done, _ = marlin_utils_fp4.nvfp4_marlin_process_scales(rows, scale_factor=factor, a_dtype=dtype)
    return done.view(experts, blocks, n), factor


def scales_from_marlin(scale: Tensor, factor: float) -> Tensor:
    """Inverse of ``scales_to_marlin``: -> e4m3 [E, N, K/16], with 0 for what Marlin cannot hold."""
    experts, blocks, n = scale.shape
    order = _scale_order(n).to(scale.device)
    half = (scale.contiguous().view(torch.uint8).to(torch.int16) << 7).view(torch.float16)
    values = torch.empty(experts, blocks, n, dtype=torch.float32, device=scale.device)
    values[..., order] = half.float() / (128 * factor)
    return values.transpose(1, 2).to(torch.float8_e4m3fn)


@functools.lru_cache(maxsize=16)
def _scale_order(n: int) -> Tensor:
    index = torch.arange(n).view(1, n)
    moved = marlin_utils.marlin_permute_scales(index, 2 * nvfp4.BLOCK, n, nvfp4.BLOCK)
    return moved.view(-1, 4)[:, [0, 2, 1, 3]].flatten()


def from_marlin(gemm: MarlinGemm, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse of ``to_marlin``: (codes uint8 [E, N, K/2], block scales e4m3 [E, N, K/16], scale_2 fp32 [E])."""
    experts, blocks, n = gemm.scale.shape
    k = blocks * nvfp4.BLOCK
    place = _nibble_place(n, k, str(gemm.weight.device))
    codes = _nibbles(gemm.weight.view(experts, -1)).index_select(1, place).view(experts, n, k)
    scale_2 = gemm.scale_2 * gemm.factor / 2.0 ** GLOBAL_EXPONENT[dtype]
    return nvfp4.pack(codes), scales_from_marlin(gemm.scale, gemm.factor), scale_2


def dequantized(gemm: MarlinGemm, dtype: torch.dtype) -> Tensor:
    """The values [E, N, K] that a GEMM's codes and scales stand for, rounded once to ``dtype``."""
    experts, blocks, n = gemm.scale.shape
    out = torch.empty(experts, n, blocks * nvfp4.BLOCK, dtype=dtype, device=gemm.weight.device)
    step = max(1, UNPACKED // out[0].numel())
    for first in range(0, experts, step):
        part = slice(first, first + step)
        some = MarlinGemm(gemm.weight[part], gemm.scale[part], gemm.scale_2[part], gemm.factor)
        codes, s8, scale_2 = from_marlin(some, dtype)
        out[part] = nvfp4.dequantize(codes, s8, scale_2.view(-1, 1, 1), dtype)
    return out


def _nibbles(words: Tensor) -> Tensor:
    """int32 [E, words] -> uint8 [E, 8 words]."""
    flat = words.contiguous().view(torch.uint8)
    return torch.stack([flat & 15, flat >> 4], -1).flatten(1)


@functools.lru_cache(maxsize=4)
def _nibble_place(n: int, k: int, device: str) -> Tensor:
    """int32 [n k]: the nibble of a repacked expert that each element of [n, k] went to."""
    index = torch.arange(n * k, dtype=torch.int32, device=device)
    order = torch.zeros_like(index)  # the element that each nibble came from
    for shift in range(0, 32, 4):
        if (n * k - 1) >> shift == 0:
            break
        digit = ((index >> shift) & 15).to(torch.uint8).view(1, n, k)
        order |= _nibbles(repack(nvfp4.pack(digit)).view(1, -1))[0].to(torch.int32) << shift
    if not torch.equal(order.sort().values, index):
        raise RuntimeError(f"Marlin's repack of [{n}, {k}] is not a permutation")
    place = torch.empty_like(order)
    place[order.long()] = index
    return place
