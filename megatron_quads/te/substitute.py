"""Give a GEMM the quantised weights in the parameters' place; their gradients go to the parameters unchanged.

One autograd node serves all weights of a call. It also carries over what Megatron keeps on a parameter for a layer that
accumulates the weight gradient itself (``gradient_accumulation_fusion``): the layer finds ``main_grad`` on the tensor it
is given, and the parameter learns that its gradient has been added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# what a layer with fused accumulation reads off the weight it multiplies with
_CARRIED = ("main_grad", "overwrite_main_grad", "zero_out_wgrad")


class _Substitute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: list[Tensor], fused: bool, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.params = params if fused else ()
        ctx.set_materialize_grads(False)
        return tuple(v.view_as(v) for v in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        for p in ctx.params:
            p.grad_added_to_main_grad = True  # the GEMM has: what arrives here is a placeholder
        return None, None, *grads


def substitute(params: Sequence[Tensor], values: list[Tensor], *, fused: bool) -> list[Tensor]:
    """``values`` [as params] as tensors whose gradient is the parameters'.

    ``fused``: the layer adds the weight gradient to ``param.main_grad`` itself. Without grad mode, or for frozen
    parameters, the values themselves.
    """
    if not torch.is_grad_enabled() or not params[0].requires_grad:
        return list(values)
    fused = fused and hasattr(params[0], "main_grad")
    given: tuple[Tensor, ...] = _Substitute.apply(values, fused, *params)
    if fused:
        for t, p in zip(given, params, strict=True):
            t.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            for name in _CARRIED:
                if (value := getattr(p, name, None)) is not None:
                    setattr(t, name, value)
    return list(given)
