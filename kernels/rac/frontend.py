"""The front end: checks the arguments, then runs the Triton kernels on a CUDA GPU and ``reference.py`` elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ..nvfp4 import reference as nvfp4
from ..nvfp4.frontend import check, check_scale, has_kernels
from . import reference
from .reference import Quantized


@dataclass(frozen=True)
class Blocks:
    """The selected 16-blocks of K, prepared once for a device so that calls neither launch nor sync for them.

    ``index`` int64 [S], the order of the residual's blocks; ``order`` int32 [K/16], they and then the others; ``listed``
    is False when the blocks are the leading ones, so that ``order`` says nothing.
    """

    index: Tensor
    order: Tensor
    listed: bool

    @classmethod
    def of(cls, index: Tensor, k: int, *, leading: bool = False) -> Blocks:
        """From int64 indices, distinct and below K/16; ``leading`` promises arange(S), as down_proj's blocks are."""
        blocks = torch.arange(k // nvfp4.BLOCK, device=index.device)
        place = blocks + index.numel()
        place[index] = torch.arange(index.numel(), device=index.device)
        return cls(index, place.argsort().to(torch.int32), not leading)

    @classmethod
    def prefix(cls, count: int, k: int, device: torch.device | str) -> Blocks:
        """The ``count`` leading blocks."""
        if not 0 <= count <= k // nvfp4.BLOCK:
            raise ValueError(f"{count} leading blocks of a K of {k}")
        return cls.of(torch.arange(count, device=device), k, leading=True)


Selection = Tensor | Blocks | None


def _prepare(blocks: Selection, k: int, device: torch.device) -> Blocks | None:
    if blocks is None:
        return None
    found = blocks if isinstance(blocks, Blocks) else Blocks.of(blocks, k)
    if found.order.numel() != k // nvfp4.BLOCK:
        raise ValueError(f"blocks were prepared for K = {found.order.numel() * nvfp4.BLOCK}, not {k}")
    if found.order.device != device:
        raise ValueError(f"blocks are on {found.order.device}, x on {device}")
    return found if found.index.numel() else None


def _order(found: Blocks | None) -> tuple[Tensor | None, int]:
    """The kernels' arguments: ``order`` where it is not the identity, and the number of residual blocks."""
    if found is None:
        return None, 0
    return found.order if found.listed else None, found.index.numel()


def _index(blocks: Selection) -> Tensor | None:
    return blocks.index if isinstance(blocks, Blocks) else blocks


def _kernels() -> ModuleType:
    from . import triton as kernels

    return kernels


def _check_rows(x: Tensor, silu: bool) -> int:
    """K of x [tokens, K] or, with silu, [tokens, 2 K]; ValueError where the row kernels cannot serve it."""
    if x.dim() != 2:
        raise ValueError(f"x must be [tokens, K], got {tuple(x.shape)}")
    check(x)
    k = x.shape[1] // 2 if silu else x.shape[1]
    if k % nvfp4.BLOCK:
        raise ValueError(f"NVFP4 needs K to be a multiple of {nvfp4.BLOCK}, got {k} from x {tuple(x.shape)}")
    if not 0 < k <= _kernels().MAX_K:
        raise ValueError(f"row kernels serve K up to {_kernels().MAX_K}, got {k}")
    if x.stride(1) != 1:
        raise ValueError(f"x must be contiguous along K, got strides {x.stride()}")
    return k


@torch.library.custom_op("megatron_quads::rac_qdq", mutates_args=())
def _qdq(x: Tensor, scale: Tensor | None, order: Tensor | None, count: int, silu: bool) -> Tensor:
    k = x.shape[1] // 2 if silu else x.shape[1]
    out = x.new_empty((x.shape[0], k))
    _kernels().rows(x, k, scale, order, count, silu, out)
    return out


@_qdq.register_fake
def _(x: Tensor, scale: Tensor | None, order: Tensor | None, count: int, silu: bool) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // 2 if silu else x.shape[1]))


@torch.library.custom_op("megatron_quads::rac_quantize", mutates_args=())
def _quantize(
    x: Tensor, scale: Tensor | None, order: Tensor | None, count: int, silu: bool, swizzled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    codes, s8, scale_out = _new_quantized(x, count, silu, swizzled)
    if swizzled:
        s8.view(torch.uint8).zero_()
    k = x.shape[1] // 2 if silu else x.shape[1]
    _kernels().rows(x, k, scale, order, count, silu, None, codes, s8, scale_out, swizzled)
    return codes, s8, scale_out


def _new_quantized(x: Tensor, count: int, silu: bool, swizzled: bool) -> tuple[Tensor, Tensor, Tensor]:
    tokens, k = x.shape[0], x.shape[1] // 2 if silu else x.shape[1]
    columns = k // nvfp4.BLOCK + count
    shape = ((tokens + 127) // 128 * 128 * ((columns + 3) // 4 * 4),) if swizzled else (tokens, columns)
    return (
        x.new_empty((tokens, columns * 8), dtype=torch.uint8),
        x.new_empty(shape, dtype=torch.float8_e4m3fn),
        x.new_empty(tokens, dtype=torch.float32),
    )


@_quantize.register_fake
def _(
    x: Tensor, scale: Tensor | None, order: Tensor | None, count: int, silu: bool, swizzled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _new_quantized(x, count, silu, swizzled)


def qdq_with_residual(x: Tensor, scale: Tensor | None, blocks: Selection, *, silu: bool = False) -> Tensor:
    """DQ(Q(x)) + DQ(Q(r_S)) of x [tokens, K]: see ``reference.qdq_with_residual``. ``scale`` None: each row's own.

    With ``silu`` x is [gate | up] [tokens, 2 K] and its silu(gate) * up is quantised, one launch.
    """
    if has_kernels(x.device):
        k = _check_rows(x, silu)
        found = _prepare(blocks, k, x.device)
        flat = None if scale is None else check_scale(scale, x)
        return _qdq(x, flat, *_order(found), silu)
    x = reference.silu_and_mul(x) if silu else x
    return reference.qdq_with_residual(x, nvfp4.row_scale(x) if scale is None else scale, _index(blocks))


def quantize_with_residual(
    x: Tensor, scale: Tensor | None, blocks: Selection, *, silu: bool = False, swizzled: bool = False
) -> Quantized:
    """Packed [Q(x) | Q(r_S)] of x [tokens, K], one read of x: see ``reference.quantize_with_residual``."""
    if not has_kernels(x.device):
        return reference.quantize_with_residual(x, scale, _index(blocks), silu=silu, swizzled=swizzled)
    k = _check_rows(x, silu)
    found = _prepare(blocks, k, x.device)
    order, count = _order(found)
    flat = None if scale is None else check_scale(scale, x)
    return Quantized(*_quantize(x, flat, order, count, silu, swizzled))


@torch.library.custom_op("megatron_quads::rac_grouped_gemm", mutates_args=())
def _grouped_gemm(
    codes: Tensor,
    s8: Tensor,
    scale: Tensor,
    weight_codes: Tensor,
    weight_s8: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    count: int,
    dtype: torch.dtype,
) -> Tensor:
    from . import gemm

    out = codes.new_zeros((codes.shape[0], weight_codes.shape[1]), dtype=dtype)
    gemm.grouped_gemm_(codes, s8, scale, weight_codes, weight_s8, weight_scale, offsets, order, count, out)
    return out


@_grouped_gemm.register_fake
def _(
    codes: Tensor,
    s8: Tensor,
    scale: Tensor,
    weight_codes: Tensor,
    weight_s8: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    count: int,
    dtype: torch.dtype,
) -> Tensor:
    return codes.new_empty((codes.shape[0], weight_codes.shape[1]), dtype=dtype)


def grouped_gemm(
    q: Quantized,
    weight_codes: Tensor,
    weight_block_scales: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    blocks: Selection,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Expert GEMM of packed activations and weights, the residual's weights read in place: ``reference.grouped_gemm``."""
    if not has_kernels(q.codes.device):
        return reference.grouped_gemm(
            q, weight_codes, weight_block_scales, weight_scale, offsets, _index(blocks), dtype=dtype
        )
    experts, n, half = weight_codes.shape
    found = _prepare(blocks, 2 * half, q.codes.device)
    order, count = _order(found)
    wanted = {
        "codes": (q.codes, torch.uint8, (q.codes.shape[0], half + 8 * count)),
        "block_scales": (q.block_scales, torch.float8_e4m3fn, (q.codes.shape[0], half // 8 + count)),
        "scale": (q.scale, torch.float32, (q.codes.shape[0],)),
        "weight_codes": (weight_codes, torch.uint8, (experts, n, half)),
        "weight_block_scales": (weight_block_scales, torch.float8_e4m3fn, (experts, n, half // 8)),
        "weight_scale": (weight_scale, torch.float32, (experts,)),
        "offsets": (offsets, offsets.dtype, (experts + 1,)),
    }
    for name, (tensor, kind, shape) in wanted.items():
        if tensor.dtype != kind or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {kind} {shape}, got {tensor.dtype} {tuple(tensor.shape)}")
        if tensor.device != q.codes.device:
            raise ValueError(f"{name} is on {tensor.device}, the activations on {q.codes.device}")
    offsets = offsets.to(torch.int32)
    return _grouped_gemm(
        q.codes, q.block_scales, q.scale, weight_codes, weight_block_scales, weight_scale, offsets, order, count, dtype
    )
