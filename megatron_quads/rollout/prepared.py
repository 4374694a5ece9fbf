"""An ActivationPlan made ready for CUDA graphs: no host sync, nothing launched but the quantiser."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import QuadsError
from ..kernels import nvfp4, rac
from .backends import GEMMS, ActivationPlan


class PreparedPlan:
    """Selections prepared for the device, static scales as tensors. ``k``: columns of each GEMM's input."""

    def __init__(self, plan: ActivationPlan, k: dict[str, int], device: torch.device) -> None:
        self.mode = plan.mode
        self._k, self._device = k, device
        self.scale: dict[str, Tensor | None] = dict.fromkeys(GEMMS)
        self.blocks: dict[str, rac.Blocks | None] = dict.fromkeys(GEMMS)
        for gemm in GEMMS:
            if plan.scale == "static":
                top = torch.tensor(plan.static_amax[gemm], dtype=torch.float32, device=device)
                self.scale[gemm] = nvfp4.tensor_scale(top)
            index = plan.blocks.get(gemm)
            if plan.mode != "rac" or index is None or not index.numel():
                continue
            # a later selection must fit the kernels that graphs launch
            leading = gemm not in plan.listed and index.tolist() == list(range(index.numel()))
            made = rac.Blocks.prefix(index.numel(), k[gemm], device) if leading else rac.Blocks.of(index, k[gemm])
            self.blocks[gemm] = made
        tensors = [t for t in self.scale.values() if t is not None]
        tensors += [t for b in self.blocks.values() if b is not None for t in (b.index, b.order)]
        self._kept = [(t, t.cpu().clone()) for t in tensors]

    def update(self, plan: ActivationPlan) -> None:
        """The selection and scales of ``plan`` (same mode, as many blocks) into the tensors that graphs hold."""
        fresh = PreparedPlan(plan, self._k, self._device)
        new, listed = [host for _, host in fresh._kept], [b and b.listed for b in fresh.blocks.values()]
        if listed != [b and b.listed for b in self.blocks.values()] or any(
            t.shape != host.shape for (t, _), host in zip(self._kept, new, strict=True)
        ):
            raise QuadsError("the new RAC selection has another form", where="rollout", do="restart the rollout")
        self._kept = [(t, host) for (t, _), host in zip(self._kept, new, strict=True)]
        self.restore()

    def indices(self) -> dict[str, list[int]]:
        """The blocks of each GEMM as the kernels read them: from ``order``, ascending."""
        found = {g: b.order[: b.index.numel()].tolist() for g, b in self.blocks.items() if b is not None}
        return {gemm: sorted(found.get(gemm, [])) for gemm in GEMMS}

    def restore(self) -> None:
        """Everything into its tensors again: a level 2 sleep discards what lies beside the weights, and graphs hold it."""
        for tensor, host in self._kept:
            tensor.copy_(host)

    def quantize(self, gemm: str, x: Tensor, out: Tensor, *, silu: bool = False) -> None:
        """DQ(Q(.)) + DQ(Q(r_S)) of x [rows, K] ([rows, 2 K] of gate and up with ``silu``) into ``out`` [rows, K]."""
        if x.shape[0]:
            rac.qdq_with_residual(x, self.scale[gemm], self.blocks[gemm], silu=silu, out=out)

    def pack(self, gemm: str, x: Tensor, *, silu: bool = False) -> rac.Quantized:
        """Packed [Q(.) | Q(r_S)] of x as in ``quantize``: a GEMM's operand whose K is extended by S blocks."""
        return rac.quantize_with_residual(x, self.scale[gemm], self.blocks[gemm], silu=silu)
