"""The emulated experts as one operator: torch.compile, which vLLM uses on a CPU too, must not look into them.

On a GPU vLLM's own MoE operator hides them. The layer is found as vLLM finds it, by its name in the forward context, so a
compiled graph from vLLM's cache holds nothing of the process that made it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context


@torch.library.custom_op("megatron_quads::emulated_experts", mutates_args=())
def emulated_experts(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer: str) -> Tensor:
    """``ModelOptQuadsMoEMethod.compute`` of the layer named ``layer``."""
    experts = get_forward_context().no_compile_layers[layer].routed_experts
    return experts.quant_method.compute(experts, x, topk_weights, topk_ids)


@emulated_experts.register_fake
def _(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer: str) -> Tensor:
    return torch.empty_like(x)
