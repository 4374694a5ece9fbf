"""Fake-quantised inputs of the routed experts, for the symmetric recipe (W4A4 in the trainer too).

Each token has its own scale, so that the split of tokens over experts and ranks does not matter. Megatron multiplies the
router's probability into fc2's input; the rollout does so after down_proj. The probability cancels in a per-token scale
but for rounding, so fc2 sees nearly, not exactly, the rollout's codes: an ablation, not the path with bit-equal weights.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels import nvfp4


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def quantize_input(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """x [tokens, K local] -> DQ(Q(x)) under per-token scales, gradient straight through.

    ``group``: ranks that hold the other shards of K.
    """
    with torch.no_grad():
        amax = x.detach().abs().amax(-1, keepdim=True).float()
        if group is not None and group.size() > 1:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
        value = nvfp4.qdq(x.detach(), nvfp4.tensor_scale(amax))
    return _StraightThrough.apply(x, value)  # type: ignore[no-any-return]
