"""vLLM method for routed experts whose GEMMs multiply FP4 by FP4: the K-augmented Triton GEMM on packed operands.

On Blackwell the products are native FP4 (never run there so far). On sm_90 the same kernels decode FP4 in registers:
a check of everything but the MMA, slower than Marlin.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.utils import replace_parameter

from ..errors import QuadsError
from ..kernels import nvfp4
from ..kernels.rac.frontend import MAX_K
from . import checks, native_gemm
from .backends import ExpertBackend, PackedExperts
from .kernel_choice import describe
from .moe import ModelOptQuadsMoEMethod
from .prepared import PreparedPlan

logger = init_logger(__name__)
STEMS = ("w13", "w2")


class ModelOptQuadsNativeMethod(ModelOptQuadsMoEMethod):
    """``ModelOptQuadsMoEMethod`` that computes on the packed parameters themselves: no second copy of the weights."""

    kernel = "native"

    def _make_backend(self) -> ExpertBackend | None:
        return None

    def _require_kernel(self, layer: Any) -> None:
        where = checks.experts_prefix(self.index)
        if self.quant_config.activation_scale == "tensor":
            # one scale for all rows of a call: a graph's padding rows would count
            raise QuadsError("a per-tensor activation scale needs eager emulation", where=where,
                             do="calibrate with --quads-activation-scale token, or set QUADS_KERNEL=emulation")  # fmt: skip
        config = layer.moe_config
        self._k = {"gate_up": config.hidden_dim, "down": config.intermediate_size_per_partition}
        if max(self._k.values()) > MAX_K:
            raise QuadsError(f"rows of K up to {MAX_K} are quantised, not {max(self._k.values())}", where=where,
                             do="set QUADS_KERNEL=emulation")  # fmt: skip
        self._prepared: PreparedPlan | None = None

    @staticmethod
    def _named(packed: PackedExperts) -> dict[str, Tensor]:
        """What the kernels read, by the layer's parameter names; w13's FP32 scale as [E] instead of vLLM's [E, 2]."""
        return {
            "w13_weight": packed.w13, "w13_weight_scale": packed.w13_scale,
            "w13_weight_scale_2": packed.w13_scale_2.contiguous(),
            "w2_weight": packed.w2, "w2_weight_scale": packed.w2_scale, "w2_weight_scale_2": packed.w2_scale_2,
        }  # fmt: skip

    def _adopt(self, layer: Any, packed: PackedExperts) -> None:
        replace_parameter(layer, "w13_weight_scale_2", self._named(packed)["w13_weight_scale_2"])
        for stem in STEMS:
            replace_parameter(layer, f"{stem}_input_scale", None)
        self._prepare(packed.w13.device)
        # a warning, so that it is seen at the level that rollouts log at
        logger.warning_once(describe(self.kernel, self.plan.mode if self.plan else "w4a4"))

    def refit(self, layer: Any, packed: PackedExperts) -> None:
        """New weights into the tensors in use, past vLLM's reload. ``packed`` holds this worker's experts."""
        self.ready = False
        for name, value in self._named(packed).items():
            getattr(layer, name).data.copy_(value)
        self._renew_plan(packed.w13.device)
        self._prepare(packed.w13.device)
        self.ready = True

    def _prepare(self, device: torch.device) -> None:
        """Once per mode, for graphs hold the selection's tensors; later rewrite them."""
        assert self.plan is not None
        if self._prepared is None or self._prepared.mode != self.plan.mode:
            self._prepared = PreparedPlan(self.plan, self._k, device)
        else:
            self._prepared.update(self.plan)

    def selection(self) -> dict[str, list[int]]:
        """See ModelOptQuadsMoEMethod."""
        assert self._prepared is not None
        return self._prepared.indices()

    def set_mode(self, mode: str) -> None:
        """See ModelOptQuadsMoEMethod. There is no W4A16 here: both operands are FP4."""
        where = checks.experts_prefix(self.index)
        if mode == "w4a16":
            raise QuadsError("the native kernel multiplies FP4 by FP4 only", where=where,
                             do="set QUADS_KERNEL=emulation for w4a16")  # fmt: skip
        if not self.eager and self.plan is not None and mode != self.plan.mode:
            raise QuadsError(f"CUDA graphs hold mode {self.plan.mode}", where=where,
                             do="start the engine with enforce_eager to switch")  # fmt: skip
        super().set_mode(mode)
        layer: Any = self._layer()
        self._prepare(layer.w13_weight.device)

    def packed(self, layer: Any) -> PackedExperts:
        """The parameters in use."""
        tensors = [
            getattr(layer, f"{s}_{kind}").data for s in STEMS for kind in ("weight", "weight_scale", "weight_scale_2")
        ]
        return PackedExperts(*tensors)

    def weights(self) -> tuple[Tensor, Tensor]:
        """See ModelOptQuadsMoEMethod; the GEMM itself keeps code * block scale unrounded."""
        layer: Any = self._layer()
        held = self.packed(layer)
        dtype = layer.params_dtype
        w13 = zip(held.w13, held.w13_scale, held.w13_scale_2, strict=True)
        w2 = zip(held.w2, held.w2_scale, held.w2_scale_2, strict=True)
        first, second = (torch.stack([nvfp4.dequantize(c, s, g, dtype) for c, s, g in part]) for part in (w13, w2))
        return first, second

    def apply(  # type: ignore[override]
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """See ModelOptQuadsMoEMethod."""
        if not self.ready or self._prepared is None:
            raise QuadsError(f"layer {self.index} has no complete weights", where="rollout", do="restart the rollout")
        self.observe(layer, x, topk_ids)
        local = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]
        return native_gemm.forward(x, topk_weights, local, self.packed(layer), self._prepared)
