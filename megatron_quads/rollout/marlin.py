"""W4A4 + RAC at weight-only speed on GPUs without FP4 hardware, through the Marlin experts that vLLM picks there.

The activations are quantised and dequantised exactly (``kernels/rac``): x once per token before GEMM1, and
silu(gate) * up fused with its quantisation before GEMM2. Marlin multiplies them with the packed weights. No host sync;
every tensor that a CUDA graph may hold keeps its address over weight updates.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import (
    NvFp4MoeBackend,
    make_nvfp4_moe_kernel,
    make_nvfp4_moe_quant_config,
    select_nvfp4_moe_backend,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Static
from vllm.model_executor.utils import replace_parameter

from ..errors import QuadsError
from . import checks
from .backends import ExpertBackend, PackedExperts
from .kernel_choice import describe
from .marlin_format import MarlinGemm, dequantized, to_marlin
from .moe import ModelOptQuadsMoEMethod
from .prepared import PreparedPlan

logger = init_logger(__name__)
STEMS = ("w13", "w2")


class RacMarlinExperts(MarlinExperts):
    """vLLM's Marlin experts behind quantised activations. ``plan`` is set before the first call."""

    plan: PreparedPlan | None = None
    calls = 0  # of the activation hook: tells that it is in use

    def apply(self, output: Tensor, hidden_states: Tensor, *args: Any, **kwargs: Any) -> None:
        """See MarlinExperts; hidden_states [tokens, H] stay as they are."""
        if self.plan is None or self._lora_context is not None:
            raise QuadsError("Marlin experts without a plan, or with LoRA", where="rollout", do="restart without LoRA")
        if self.plan.mode == "w4a16":
            super().apply(output, hidden_states, *args, **kwargs)
            return
        before = self.calls
        quantised = torch.empty_like(hidden_states)
        self.plan.quantize("gate_up", hidden_states, quantised)
        super().apply(output, quantised, *args, **kwargs)
        if self.calls == before:
            raise QuadsError("vLLM did not call the activation hook", where="rollout", do="use QUADS_KERNEL=emulation")

    def activation(self, activation: Any, output: Tensor, input: Tensor, **kwargs: Any) -> None:  # type: ignore[override]
        """silu(gate) * up, quantised in the same launch."""
        assert self.plan is not None
        if self.plan.mode == "w4a16":
            super().activation(activation, output, input, **kwargs)
            return
        self.plan.quantize("down", input, output, silu=True)
        self.calls += 1


class ModelOptQuadsMarlinMethod(ModelOptQuadsMoEMethod):
    """``ModelOptQuadsMoEMethod`` whose parameters are Marlin's after loading."""

    kernel = "marlin"

    def _make_backend(self) -> ExpertBackend | None:
        return None

    def _require_kernel(self, layer: Any) -> None:
        where = checks.experts_prefix(self.index)
        if self.quant_config.activation_scale == "tensor":
            # one scale for all rows of a call: a graph's padding rows would count
            raise QuadsError("a per-tensor activation scale needs eager emulation", where=where,
                             do="calibrate with --quads-activation-scale token, or set QUADS_KERNEL=emulation")  # fmt: skip
        inter, hidden = layer.moe_config.intermediate_size_per_partition, layer.moe_config.hidden_dim
        if inter % 64 or hidden % 128:
            raise QuadsError(f"Marlin would pad hidden {hidden}, intermediate {inter}", where=where,
                             do="needs multiples of 128 and 64, or QUADS_KERNEL=emulation")  # fmt: skip
        backend, cls = select_nvfp4_moe_backend(config=self.moe, weight_key=kNvfp4Static, activation_key=None)
        if backend != NvFp4MoeBackend.MARLIN or cls is not MarlinExperts:
            raise QuadsError(f"vLLM picks {backend.value} ({cls.__name__}) for these experts", where=where,
                             do="do not set --moe-backend, or set QUADS_KERNEL=emulation")  # fmt: skip
        self.nvfp4_backend, self.experts_cls = backend, RacMarlinExperts
        self._factors: dict[str, float] = {}
        self._dtype = layer.moe_config.in_dtype

    def _adopt(self, layer: Any, packed: PackedExperts) -> None:
        for name, value in self._convert(packed).items():
            replace_parameter(layer, name, value)
        for stem in STEMS:
            replace_parameter(layer, f"{stem}_input_scale", None)
        if self.moe_kernel is None:
            self._build(layer)
            # a warning, so that it is seen at the level that rollouts log at
            logger.warning_once(describe(self.kernel, self.plan.mode if self.plan else "w4a16"))
        # after a reload vLLM copies the new parameters into the ones that the kernel, and graphs, hold
        self.prepare_plan(layer)

    def _convert(self, packed: PackedExperts) -> dict[str, Tensor]:
        """Marlin's tensors by the layer's parameter names."""
        w13 = to_marlin(packed.w13, packed.w13_scale, packed.w13_scale_2, self._dtype)
        w2 = to_marlin(packed.w2, packed.w2_scale, packed.w2_scale_2, self._dtype)
        self._factors = {"w13": w13.factor, "w2": w2.factor}
        return {
            f"{stem}_{suffix}": value
            for stem, gemm in zip(STEMS, (w13, w2), strict=True)
            for suffix, value in (
                ("weight", gemm.weight),
                ("weight_scale", gemm.scale),
                ("weight_scale_2", gemm.scale_2),
            )
        }

    def refit(self, layer: Any, packed: PackedExperts) -> None:
        """New weights into the tensors in use, past vLLM's reload. ``packed`` holds this worker's experts."""
        self.ready = False
        for name, value in self._convert(packed).items():
            getattr(layer, name).data.copy_(value)
        self._renew_plan(packed.w13.device)
        self.prepare_plan(layer)
        self.ready = True

    def _build(self, layer: Any) -> None:
        self.moe_quant_config = self._quant_config_of(layer)
        extra: dict[str, Any] = (
            {"layer": layer} if "layer" in inspect.signature(make_nvfp4_moe_kernel).parameters else {}
        )
        self.moe_kernel = make_nvfp4_moe_kernel(
            moe_quant_config=self.moe_quant_config,
            moe_config=self.moe,
            experts_cls=RacMarlinExperts,
            backend=self.nvfp4_backend,
            routing_tables=layer._expert_routing_tables(),
            **extra,
        )
        if not isinstance(self.moe_kernel.fused_experts, RacMarlinExperts):
            raise QuadsError("vLLM replaced the experts", where=checks.experts_prefix(self.index), do="report this")
        self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    def _quant_config_of(self, layer: Any) -> Any:
        none: Any = None  # Marlin takes no activation scales
        return make_nvfp4_moe_quant_config(
            backend=self.nvfp4_backend,
            w13_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
            w13_scale_2=layer.w13_weight_scale_2,
            w2_scale_2=layer.w2_weight_scale_2,
            a13_scale=none,
            a2_scale=none,
            layer=layer,
        )

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """Marlin's: activations arrive unquantised."""
        return self.moe_quant_config or self._quant_config_of(layer)

    def prepare_plan(self, layer: Any) -> None:
        """Prepare the plan once, for graphs hold its tensors, and compile what it launches; later rewrite them."""
        assert self.plan is not None and self.moe_kernel is not None
        experts = self.moe_kernel.fused_experts
        assert isinstance(experts, RacMarlinExperts)
        if experts.plan is not None and experts.plan.mode == self.plan.mode:
            experts.plan.update(self.plan)
            return
        hidden, inter = layer.moe_config.hidden_dim, layer.moe_config.intermediate_size_per_partition
        device = layer.w2_weight.device
        experts.plan = PreparedPlan(self.plan, {"gate_up": hidden, "down": inter}, device)
        for rows in (1, 1024) if experts.plan.mode != "w4a16" else ():
            x, y = (torch.zeros(rows, k, dtype=self._dtype, device=device) for k in (hidden, 2 * inter))
            experts.plan.quantize("gate_up", x, torch.empty_like(x))
            experts.plan.quantize("down", y, y.new_empty(rows, inter), silu=True)

    def selection(self) -> dict[str, list[int]]:
        """See ModelOptQuadsMoEMethod."""
        assert self.moe_kernel is not None
        plan = getattr(self.moe_kernel.fused_experts, "plan", None)
        assert isinstance(plan, PreparedPlan)
        return plan.indices()

    def set_mode(self, mode: str) -> None:
        """See ModelOptQuadsMoEMethod."""
        if not self.eager and self.plan is not None and mode != self.plan.mode:
            raise QuadsError(f"CUDA graphs hold mode {self.plan.mode}", where=checks.experts_prefix(self.index),
                             do="start the engine with enforce_eager to switch")  # fmt: skip
        super().set_mode(mode)
        layer = self._layer()
        assert layer is not None
        self.prepare_plan(layer)

    def weights(self) -> tuple[Tensor, Tensor]:
        """See ModelOptQuadsMoEMethod. Unpacks Marlin's tensors; the GEMM itself keeps code * scale unrounded."""
        layer: Any = self._layer()
        out = []
        for stem in STEMS:
            weight, scale, top = (
                getattr(layer, f"{stem}_{s}").data for s in ("weight", "weight_scale", "weight_scale_2")
            )
            out.append(dequantized(MarlinGemm(weight, scale, top, self._factors[stem]), self._dtype))
        return out[0], out[1]

    def apply(  # type: ignore[override]
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Any:
        """See ModelOptQuadsMoEMethod; routing to other ranks' experts is vLLM's."""
        if not self.ready or self.moe_kernel is None:
            raise QuadsError(f"layer {self.index} has no complete weights", where="rollout", do="restart the rollout")
        self.observe(layer, x, topk_ids)
        return self.moe_kernel.apply(
            x,
            layer.w13_weight,
            layer.w2_weight,
            topk_weights,
            topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )
