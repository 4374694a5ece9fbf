"""The front end: checks the arguments, then runs the Triton kernels on a CUDA GPU and ``reference.py`` elsewhere.

Argument faults raise ValueError before any launch, on every device alike.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ..nvfp4 import reference as nvfp4
from ..nvfp4.checks import DTYPES, check, check_scale
from ..nvfp4.frontend import has_kernels, is_eager
from . import reference
from .blocks import Selection, checked_index, order_of, prepare
from .reference import Quantized

MAX_K = 16384  # a row is one program's tile: 16 warps of 32 elements a thread


def _kernels() -> ModuleType:
    from . import launch

    return launch


def _check_rows(x: Tensor, silu: bool) -> int:
    """K of x [tokens, K] or, with silu, [tokens, 2 K]; ValueError where the row kernels cannot serve it."""
    if x.dim() != 2:
        raise ValueError(f"x must be [tokens, K], got {tuple(x.shape)}")
    check(x)
    k = x.shape[1] // 2 if silu else x.shape[1]
    if k % nvfp4.BLOCK:
        raise ValueError(f"NVFP4 needs K to be a multiple of {nvfp4.BLOCK}, got {k} from x {tuple(x.shape)}")
    if not 0 < k <= MAX_K:
        raise ValueError(f"rows of K from {nvfp4.BLOCK} to {MAX_K} are served, got {k}")
    if x.stride(1) != 1:
        raise ValueError(f"x must be contiguous along K, got strides {x.stride()}")
    return k


def _qdq(x: Tensor, scale: Tensor | None, order: Tensor | None, count: int, silu: bool) -> Tensor:
    k = x.shape[1] // 2 if silu else x.shape[1]
    out = x.new_empty((x.shape[0], k))
    _kernels().rows(x, k, scale, order, count, silu, out)
    return out


_qdq_op = torch.library.custom_op("megatron_quads::rac_qdq", mutates_args=())(_qdq)


@_qdq_op.register_fake
def _(x: Tensor, scale: Tensor | None, order: Tensor | None, count: int, silu: bool) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // 2 if silu else x.shape[1]))


def _qdq_out(x: Tensor, scale: Tensor | None, order: Tensor | None, count: int, silu: bool, out: Tensor) -> None:
    _kernels().rows(x, out.shape[1], scale, order, count, silu, out)


_qdq_out_op = torch.library.custom_op("megatron_quads::rac_qdq_out", mutates_args=("out",))(_qdq_out)


@_qdq_out_op.register_fake
def _(x: Tensor, scale: Tensor | None, order: Tensor | None, count: int, silu: bool, out: Tensor) -> None:
    return None


def _check_out(out: Tensor, x: Tensor, k: int) -> None:
    if out.shape != (x.shape[0], k) or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        wanted = f"contiguous {x.dtype} {(x.shape[0], k)} on {x.device}"
        raise ValueError(f"out must be {wanted}, got {out.dtype} {tuple(out.shape)} on {out.device}")


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


_quantize_op = torch.library.custom_op("megatron_quads::rac_quantize", mutates_args=())(_quantize)


@_quantize_op.register_fake
def _(
    x: Tensor, scale: Tensor | None, order: Tensor | None, count: int, silu: bool, swizzled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _new_quantized(x, count, silu, swizzled)


def qdq_with_residual(
    x: Tensor, scale: Tensor | None, blocks: Selection, *, silu: bool = False, out: Tensor | None = None
) -> Tensor:
    """DQ(Q(x)) + DQ(Q(r_S)) of x [tokens, K]: see ``reference.qdq_with_residual``. ``scale`` None: each row's own.

    With ``silu`` x is [gate | up] [tokens, 2 K] and its silu(gate) * up is quantised, one launch. The static or
    per-tensor scale is fp32 with one value, a per-token one [tokens, 1]. ``out``, contiguous [tokens, K] in x.dtype and
    apart from x, is written and returned instead of a new tensor. ValueError when it does not fit.
    """
    k = _check_rows(x, silu)
    flat = None if scale is None else check_scale(scale, x)
    if out is not None:
        _check_out(out, x, k)
    if has_kernels(x.device):
        selected = order_of(prepare(blocks, k, x.device))
        if out is None:
            return (_qdq if is_eager(x) else _qdq_op)(x, flat, *selected, silu)
        (_qdq_out if is_eager(x) else _qdq_out_op)(x, flat, *selected, silu, out)
        return out
    index = checked_index(blocks, k, x.device)
    x = reference.silu_and_mul(x) if silu else x
    found = reference.qdq_with_residual(x, nvfp4.row_scale(x) if scale is None else scale.float(), index)
    return found if out is None else out.copy_(found)


def quantize_with_residual(
    x: Tensor, scale: Tensor | None, blocks: Selection, *, silu: bool = False, swizzled: bool = False
) -> Quantized:
    """Packed [Q(x) | Q(r_S)] of x [tokens, K], one read of x: see ``reference.quantize_with_residual``.

    ``scale`` and ``silu`` as in ``qdq_with_residual``; ``swizzled`` gives the block scales in ``nvfp4.swizzle``'s order.
    """
    k = _check_rows(x, silu)
    flat = None if scale is None else check_scale(scale, x)
    if not has_kernels(x.device):
        index = checked_index(blocks, k, x.device)
        return reference.quantize_with_residual(x, scale, index, silu=silu, swizzled=swizzled)
    order, count = order_of(prepare(blocks, k, x.device))
    run = _quantize if is_eager(x) else _quantize_op
    return Quantized(*run(x, flat, order, count, silu, swizzled))


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
    """Expert GEMM of packed activations and weights, the residual's weights read in place: ``reference.grouped_gemm``.

    ``offsets`` must not decrease, and end within the tokens: their values are not checked, that would need a host sync.
    """
    if weight_codes.dim() != 3 or q.codes.dim() != 2 or weight_codes.shape[2] % 8:
        raise ValueError(
            f"codes must be [tokens, K/2 + 8 S] and weight_codes [E, N, K/2], "
            f"got {tuple(q.codes.shape)} and {tuple(weight_codes.shape)}"
        )
    experts, n, half = weight_codes.shape
    device = q.codes.device
    native = has_kernels(device)
    if native:
        order, count = order_of(prepare(blocks, 2 * half, device))
    else:
        index = checked_index(blocks, 2 * half, device)
        count = 0 if index is None else index.numel()
    wanted = {
        "codes": (q.codes, torch.uint8, (q.codes.shape[0], half + 8 * count)),
        "block_scales": (q.block_scales, torch.float8_e4m3fn, (q.codes.shape[0], half // 8 + count)),
        "scale": (q.scale, torch.float32, (q.codes.shape[0],)),
        "weight_codes": (weight_codes, torch.uint8, (experts, n, half)),
        "weight_block_scales": (weight_block_scales, torch.float8_e4m3fn, (experts, n, half // 8)),
        "weight_scale": (weight_scale, torch.float32, (experts,)),
        "offsets": (offsets, torch.int64 if offsets.dtype == torch.int64 else torch.int32, (experts + 1,)),
    }
    for name, (tensor, kind, shape) in wanted.items():
        if tensor.dtype != kind or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {kind} {shape}, got {tensor.dtype} {tuple(tensor.shape)}")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, the activations on {device}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be bfloat16, float16 or float32, got {dtype}")
    if not native:
        return reference.grouped_gemm(q, weight_codes, weight_block_scales, weight_scale, offsets, index, dtype=dtype)
    return _grouped_gemm(
        q.codes,
        q.block_scales,
        q.scale,
        weight_codes,
        weight_block_scales,
        weight_scale,
        offsets.to(torch.int32),
        order,
        count,
        dtype,
    )
