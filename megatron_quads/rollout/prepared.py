"""An ActivationPlan made ready for CUDA graphs: no host sync, nothing launched but the quantiser."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import nvfp4, rac
from .backends import GEMMS, ActivationPlan


class PreparedPlan:
    """Selections prepared for the device, static scales as tensors. ``k``: columns of each GEMM's input."""

    def __init__(self, plan: ActivationPlan, k: dict[str, int], device: torch.device) -> None:
        self.mode = plan.mode
        self.scale: dict[str, Tensor | None] = dict.fromkeys(GEMMS)
        self.blocks: dict[str, rac.Blocks | None] = dict.fromkeys(GEMMS)
        for gemm in GEMMS:
            if plan.scale == "static":
                top = torch.tensor(plan.static_amax[gemm], dtype=torch.float32, device=device)
                self.scale[gemm] = nvfp4.tensor_scale(top)
            index = plan.blocks.get(gemm)
            if plan.mode != "rac" or index is None or not index.numel():
                continue
            leading = index.tolist() == list(range(index.numel()))
            made = rac.Blocks.prefix(index.numel(), k[gemm], device) if leading else rac.Blocks.of(index, k[gemm])
            self.blocks[gemm] = made

    def quantize(self, gemm: str, x: Tensor, out: Tensor, *, silu: bool = False) -> None:
        """DQ(Q(.)) + DQ(Q(r_S)) of x [rows, K] ([rows, 2 K] of gate and up with ``silu``) into ``out`` [rows, K]."""
        if x.shape[0]:
            rac.qdq_with_residual(x, self.scale[gemm], self.blocks[gemm], silu=silu, out=out)

    def pack(self, gemm: str, x: Tensor, *, silu: bool = False) -> rac.Quantized:
        """Packed [Q(.) | Q(r_S)] of x as in ``quantize``: a GEMM's operand whose K is extended by S blocks."""
        return rac.quantize_with_residual(x, self.scale[gemm], self.blocks[gemm], silu=silu)
