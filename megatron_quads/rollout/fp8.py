"""Recipe fp8 in vLLM: routed experts W8A8 in E4M3, from a checkpoint that holds them in high precision.

The weights arrive as those of any unquantised checkpoint and are quantised here, by ``kernels/fp8.py``, at the start and
after each update; vLLM's reload copies the new codes and scales into the tensors that are in use, so CUDA graphs stay
valid. What is multiplied is what ``state.expert_weights`` reads back: E4M3 codes and one FP32 scale per output row.

On a GPU with FP8 tensor cores vLLM's Triton experts multiply the codes, behind vLLM's quantiser of activations (a scale
per token); elsewhere PyTorch does, exactly but for the order of fp32 sums.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, fp8_w8a8_moe_quant_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.utils import replace_parameter, set_weight_attrs
from vllm.platforms import current_platform

from ..errors import QuadsError
from ..kernels import fp8
from . import checks
from .kernel_choice import choose_here
from .moe import global_experts, require_supported
from .opaque import emulated_experts

STEMS = ("w13", "w2")
MIN_CAPABILITY = 89  # of GPUs with FP8 tensor cores


class QuadsFp8MoEMethod(FusedMoEMethodBase):
    """One layer's method. ``kernel``: ``triton`` (vLLM's experts) or ``emulation`` (PyTorch)."""

    supports_pre_processed_weights = False

    def __init__(self, layer: RoutedExperts, index: int) -> None:
        super().__init__(layer.moe_config)
        self.index = index
        self.ready = False
        self._layer = weakref.ref(layer)
        self._loaded: set[tuple[str, int]] = set()
        self._vllm_loader: Callable[..., Any] | None = None
        config = get_current_vllm_config()
        self._dummy = config.load_config.load_format == "dummy"
        require_supported(layer, index)
        self.kernel = self._choose(eager=config.model_config.enforce_eager)

    def _choose(self, *, eager: bool) -> str:
        where = checks.experts_prefix(self.index)
        wanted = choose_here(str(self.moe.in_dtype).removeprefix("torch."))
        if wanted == "emulation":
            if not current_platform.is_cpu() and not eager:
                raise QuadsError(
                    "the emulated experts cannot run in CUDA graphs", where=where, do="set --enforce-eager"
                )
            return wanted
        if not current_platform.has_device_capability(MIN_CAPABILITY):
            raise QuadsError("FP8 experts need a GPU from sm_89 on", where=where, do="set QUADS_KERNEL=emulation")
        return "triton"

    @property
    def is_monolithic(self) -> bool:
        """Routing is vLLM's, not the method's."""
        return False

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> Any:
        """No modular kernel: inputs arrive unquantised."""
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def create_weights(  # type: ignore[override]
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """High-precision parameters w13_weight [E, 2I, H] and w2_weight [E, H, I], until they are loaded."""
        self._vllm_loader = extra_weight_attrs["weight_loader"]
        hidden, inter = hidden_size, intermediate_size_per_partition
        self._shapes = {"w1": (inter, hidden), "w3": (inter, hidden), "w2": (hidden, inter)}
        for stem, shape in (("w13", (num_experts, 2 * inter, hidden)), ("w2", (num_experts, hidden, inter))):
            made = torch.nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
            layer.register_parameter(f"{stem}_weight", made)
            set_weight_attrs(made, {**extra_weight_attrs, "weight_loader": self._load_checked})

    def _load_checked(
        self,
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> Any:
        """vLLM's loader narrows and casts silently; another shape or precision would be other weights."""
        assert self._vllm_loader is not None
        projection = checks.PROJECTIONS[shard_id]
        shape, dtype = list(loaded_weight.shape), loaded_weight.dtype
        if shape != list(self._shapes[shard_id]) or dtype != param.dtype:
            raise QuadsError(
                f"tensor is {shape} {dtype}, layer {self.index} needs {list(self._shapes[shard_id])} {param.dtype}",
                where=f"{checks.experts_prefix(self.index)}.{expert_id}.{projection}.weight",
                do="serve it in the dtype that it was exported in",
            )
        done = self._vllm_loader(param, loaded_weight, weight_name, shard_id, expert_id, return_success=True)
        if done:
            self._loaded.add((projection, expert_id))
        return done if return_success else None

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:  # type: ignore[override]
        """Quantise what arrived, expert by expert. Runs after each (re)load; QuadsError unless all is there and finite."""
        self.ready = False
        experts = global_experts(layer)
        for expert in [] if self._dummy else experts:
            for projection in checks.PROJECTIONS.values():
                if (projection, expert) not in self._loaded:
                    raise QuadsError(
                        f"a weight of layer {self.index} is missing in the checkpoint",
                        where=f"{checks.experts_prefix(self.index)}.{expert}.{projection}.weight",
                        do=checks.REEXPORT,
                    )
        self._loaded.clear()
        for stem in STEMS:
            weight = getattr(layer, f"{stem}_weight").data
            codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
            scale = torch.empty(weight.shape[:2], dtype=torch.float32, device=weight.device)
            for e in range(weight.shape[0]):
                codes[e], scale[e] = fp8.quantize(weight[e])
            bad = (~scale.isfinite()).any(1).nonzero().flatten().tolist()
            if bad:
                raise QuadsError(
                    f"a {stem} weight of layer {self.index} is not finite",
                    where=f"{checks.experts_prefix(self.index)}.{experts[bad[0]]}",
                    do="do not serve a diverged model",
                )
            replace_parameter(layer, f"{stem}_weight", codes)
            replace_parameter(layer, f"{stem}_weight_scale", scale)
        self.ready = True

    def held(self) -> dict[str, tuple[Tensor, Tensor]]:
        """(codes e4m3 [E, N, K], scale fp32 [E, N]) of ``w13`` (rows gate then up) and ``w2``, as the GEMMs read them."""
        layer: Any = self._layer()
        if layer is None or not self.ready:
            raise self._incomplete()
        return {s: (getattr(layer, f"{s}_weight").data, getattr(layer, f"{s}_weight_scale").data) for s in STEMS}

    def _incomplete(self) -> QuadsError:
        return QuadsError(f"layer {self.index} has no complete weights", where="rollout", do="restart the rollout")

    def apply(  # type: ignore[override]
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """x [tokens, H], topk_weights and topk_ids [tokens, k] (global ids) -> [tokens, H]; shared experts: vLLM's."""
        if torch.compiler.is_compiling():
            return emulated_experts(x, topk_weights, topk_ids, layer.layer_name)
        return self.compute(layer, x, topk_weights, topk_ids)

    def compute(self, layer: RoutedExperts, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """``apply`` itself; QuadsError while the weights are not whole. ``triton`` does not wait for the device."""
        (w13, s13), (w2, s2) = self.held().values()
        if self.kernel == "triton":
            from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

            scales = fp8_w8a8_moe_quant_config(
                w1_scale=s13, w2_scale=s2, per_act_token_quant=True, per_out_ch_quant=True
            )
            return fused_experts(
                x.contiguous(),
                w13,
                w2,
                topk_weights,
                topk_ids,
                activation=layer.activation,
                global_num_experts=layer.global_num_experts,
                expert_map=layer.expert_map,
                quant_config=scales,
            )
        local = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]
        return experts_forward(x, topk_weights, local, (w13, s13), (w2, s2))


def experts_forward(
    x: Tensor, topk_weights: Tensor, topk_ids: Tensor, w13: tuple[Tensor, Tensor], w2: tuple[Tensor, Tensor]
) -> Tensor:
    """The experts in PyTorch: x [tokens, H], local topk_ids [tokens, k] (-1: not on this rank) -> [tokens, H].

    ``w13`` and ``w2``: (codes, scale) as ``QuadsFp8MoEMethod.held`` gives them. Rounded to x's dtype where vLLM's FP8
    experts round: after gate and up, after silu(gate) * up, after down times the router weight, and in the end.
    """
    tokens, k = topk_ids.shape
    flat = topk_ids.flatten()
    out = x.new_zeros(tokens * k, x.shape[-1])
    for e in flat.unique().tolist():
        if e < 0:
            continue
        at = (flat == e).nonzero().flatten()
        gate, up = fp8.linear(x[at // k], w13[0][e], w13[1][e]).to(x.dtype).float().chunk(2, -1)
        y = fp8.linear((F.silu(gate) * up).to(x.dtype), w2[0][e], w2[1][e])
        out[at] = (y * topk_weights.flatten()[at].unsqueeze(-1)).to(x.dtype)
    return out.view(tokens, k, -1).float().sum(1).to(x.dtype)
