"""The front end: checks the arguments, then runs the Triton kernels on a CUDA GPU and ``reference.py`` elsewhere.

The kernels are ``torch.library`` operators with fake implementations, so torch.compile sees through shapes and leaves the
arithmetic alone. Argument faults raise ValueError before any launch, on every device alike.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from . import checks, reference
from .checks import check, check_scale

MIN_CAPABILITY = (8, 9)  # E4M3 conversions


_check_list, _check_groups = checks.check_list, checks.check_groups
HAS_TRITON = importlib.util.find_spec("triton") is not None
_capability: dict[int, tuple[int, int]] = {}


@torch.compiler.assume_constant_result
def _fit(index: int) -> bool:
    if index not in _capability:
        _capability[index] = torch.cuda.get_device_capability(index)
    return _capability[index] >= MIN_CAPABILITY


def has_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels serve this device: a CUDA GPU from sm_89 on, with triton installed."""
    return HAS_TRITON and device.type == "cuda" and torch.version.cuda is not None and _fit(device.index or 0)


def _kernels() -> ModuleType:
    from . import triton as kernels

    return kernels


def is_eager(x: Tensor) -> bool:
    """Whether a kernel may be launched directly: the operator's dispatch costs more than a small launch."""
    plain = type(x) is Tensor and not (x.requires_grad and torch.is_grad_enabled())
    return plain and not torch.compiler.is_compiling()


def _qdq(x: Tensor, scale: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _kernels().single(x, scale, out, None, None)
    return out


_qdq_op = torch.library.custom_op("megatron_quads::nvfp4_qdq", mutates_args=())(_qdq)


@_qdq_op.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _quantize(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    codes, s8 = _new_packed(x)
    _kernels().single(x, scale, None, codes, s8)
    return codes, s8


_quantize_op = torch.library.custom_op("megatron_quads::nvfp4_quantize", mutates_args=())(_quantize)


def _new_packed(x: Tensor) -> tuple[Tensor, Tensor]:
    lead = x.shape[:-1]
    codes = x.new_empty((*lead, x.shape[-1] // 2), dtype=torch.uint8)
    return codes, x.new_empty((*lead, x.shape[-1] // reference.BLOCK), dtype=torch.float8_e4m3fn)


@_quantize_op.register_fake
def _(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return _new_packed(x)


def qdq(x: Tensor, scale: Tensor) -> Tensor:
    """Quantise and dequantise x [..., K] under an fp32 scale (one value, or [..., 1]): see ``reference.qdq``."""
    check(x)
    flat = check_scale(scale, x)
    if not has_kernels(x.device):
        return reference.qdq(x, scale.float())
    return (_qdq if is_eager(x) else _qdq_op)(x, flat)


def quantize(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] -> packed codes uint8 [..., K/2], E4M3 block scales [..., K/16]: see ``reference.quantize``."""
    check(x)
    flat = check_scale(scale, x)
    if not has_kernels(x.device):
        return reference.quantize(x, scale.float())
    return (_quantize if is_eager(x) else _quantize_op)(x, flat)


def _amax(xs: list[Tensor], groups: list[int], out: Tensor) -> None:
    _kernels().amax_(xs, groups, out)


_amax_op = torch.library.custom_op("megatron_quads::nvfp4_amax", mutates_args=("out",))(_amax)


def _grouped(
    xs: list[Tensor], amax: Tensor, groups: list[int], out: list[Tensor], codes: list[Tensor], s8: list[Tensor]
) -> None:
    _kernels().grouped_(xs, amax, groups, out, codes, s8)


_grouped_op = torch.library.custom_op("megatron_quads::nvfp4_grouped", mutates_args=("out", "codes", "s8"))(_grouped)
_PLAIN = {Tensor, torch.nn.Parameter}


def _is_eager_list(xs: Sequence[Tensor]) -> bool:
    """``is_eager`` of a list of weights, which nothing differentiates."""
    return not torch.compiler.is_compiling() and set(map(type, xs)) <= _PLAIN


def grouped_amax(xs: Sequence[Tensor], groups: Sequence[int] | None = None) -> Tensor:
    """fp32 [G], the largest magnitude of each group of a list of weights, in one pass and one launch.

    ``xs``: contiguous [..., K], one dtype and device. ``groups[i]`` is the group of xs[i] (gate and up of an expert share
    one; None gives each tensor its own). NaN and Inf come through: callers reject them by the parameter's name.
    """
    _check_list(xs, "xs")
    found = _check_groups(xs, groups, None)
    count = max(found, default=-1) + 1
    if xs and has_kernels(xs[0].device):
        out = xs[0].new_empty(count, dtype=torch.float32)
        if _is_eager_list(xs):
            _amax(list(xs), found, out)
        else:
            _amax_op([x.detach() for x in xs], found, out)
        return out
    members: list[list[Tensor]] = [[] for _ in range(count)]
    for x, g in zip(xs, found, strict=True):
        members[g].append(x)
    if not xs:
        return torch.zeros(0)
    return torch.stack([reference.amax(*m) if m else xs[0].new_zeros((), dtype=torch.float32) for m in members])


def _empty_list(xs: Sequence[Tensor], dtype: torch.dtype, divisor: int) -> list[Tensor]:
    """New contiguous tensors [..., K / divisor] as views of one allocation, each 256-byte aligned."""
    if xs[0].numel() % (256 * divisor) == 0 and len({x.shape for x in xs}) == 1:
        return list(xs[0].new_empty((len(xs), *xs[0].shape[:-1], xs[0].shape[-1] // divisor), dtype=dtype).unbind())
    shapes = [(*x.shape[:-1], x.shape[-1] // divisor) for x in xs]
    sizes = [x.numel() // divisor for x in xs]
    padded = [-(-n // 256) * 256 for n in sizes]
    flat = xs[0].new_empty(sum(padded), dtype=dtype).split(padded)
    return [part[:n].view(shape) for part, n, shape in zip(flat, sizes, shapes, strict=True)]


def grouped_qdq(
    xs: Sequence[Tensor], amax: Tensor, groups: Sequence[int] | None = None, *, out: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """DQ(Q(x)) of a list of contiguous weights [..., K], one launch, given ``grouped_amax``'s fp32 [G].

    Written into ``out`` (cached buffers of any of the three dtypes; xs themselves for in-place) or into new tensors.
    """
    return grouped(xs, amax, groups, out=out)[0]


def grouped_quantize(
    xs: Sequence[Tensor], amax: Tensor, groups: Sequence[int] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Packed codes uint8 [..., K/2] and E4M3 block scales [..., K/16] of a list of weights, one launch."""
    return grouped(xs, amax, groups, want_values=False, want_packed=True)[1:]


def grouped(
    xs: Sequence[Tensor],
    amax: Tensor,
    groups: Sequence[int] | None = None,
    *,
    out: Sequence[Tensor] | None = None,
    want_values: bool = True,
    want_packed: bool = False,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """DQ(Q(x)), codes and block scales of a list of weights in one launch; lists that are not wanted are empty.

    ``xs``, ``amax``, ``groups`` and ``out`` as in ``grouped_qdq``; ``out`` implies ``want_values``. ValueError before any
    launch when dtypes, devices, shapes, layouts or groups do not fit.
    """
    _check_list(xs, "xs")
    if amax.dtype != torch.float32 or amax.dim() != 1 or (xs and amax.device != xs[0].device):
        raise ValueError(f"amax must be float32 [groups] beside xs, got {amax.dtype} {tuple(amax.shape)} {amax.device}")
    found = _check_groups(xs, groups, amax.shape[0])
    if out is not None:
        _check_list(out, "out")
        if [t.shape for t in out] != [x.shape for x in xs] or (xs and out[0].device != xs[0].device):
            raise ValueError("out must hold one tensor of the same shape and device for each of xs")
    if not xs:
        return [], [], []
    if has_kernels(xs[0].device):
        values = list(out) if out is not None else (_empty_list(xs, xs[0].dtype, 1) if want_values else [])
        codes = _empty_list(xs, torch.uint8, 2) if want_packed else []
        s8 = _empty_list(xs, torch.float8_e4m3fn, 16) if want_packed else []
        if _is_eager_list(xs) and _is_eager_list(values):
            _grouped(list(xs), amax.contiguous(), found, values, codes, s8)
            # written to behind autograd's back
            torch.autograd.graph.increment_version([v for v in out or () if not v.is_inference()])
        else:
            plain = [x.detach() for x in xs]
            _grouped_op(plain, amax.contiguous(), found, [v.detach() for v in values], codes, s8)
        return values, codes, s8
    plain = [x.detach() for x in xs]
    scales = reference.tensor_scale(amax)
    packed = [reference.quantize(x, scales[g]) for x, g in zip(plain, found, strict=True)] if want_packed else []
    values = []
    for i, (x, g) in enumerate(zip(plain, found, strict=True)) if want_values or out is not None else ():
        target = out[i].detach() if out is not None else torch.empty_like(x)
        step = reference.qdq(x.float(), scales[g])
        values.append(target.copy_(step))
    return list(out) if out is not None else values, [c for c, _ in packed], [s for _, s in packed]
