"""QUADS as Transformer Engine recipes, and ``install`` for models that Megatron-Core builds.

In Megatron: add the flags to the parser, install on the built model (see ``megatron_quads.train`` for all of it):

    args = parse_and_validate_args(extra_args_provider=recipe.add_quads_arguments)
    model_config.post_wrap_hooks.append(recipe.model_hook(args))

On its own, for ``te.Linear`` and ``te.GroupedLinear`` (Transformer Engine >= 2.19):

    with te.autocast(enabled=True, recipe=recipe.weight_recipe()):
        y = module(x, m_splits, is_first_microbatch=first)

Weights are DQ(Q(W)) as ``kernels.nvfp4`` computes it; activations and gradients stay in high precision; the GEMMs are
the BF16 ones; the weight gradient goes to the parameter unchanged. ``factory`` is what a ``--te-precision-config-file``
names as ``custom_recipe_factory``.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .config import QuadsConfig
from .errors import QuadsError
from .kernels import nvfp4
from .te.arguments import add_quads_arguments, refuse_arguments, require_te

__all__ = [
    "add_quads_arguments",
    "factory",
    "invalidate",
    "model_hook",
    "refuse_arguments",
    "symmetric_factory",
    "symmetric_recipe",
    "weight_recipe",
]


def model_hook(args: argparse.Namespace) -> Callable[[list[nn.Module]], list[nn.Module]]:
    """What ``ModelConfig.post_wrap_hooks`` of Megatron takes: installs the recipe of ``args`` on the built chunks.

    Does nothing for recipes without a quantised trainer (bf16, naive), unless a precision config names ``factory``.
    """
    quads = QuadsConfig.from_args(args)

    def hook(chunks: list[nn.Module]) -> list[nn.Module]:
        from .te.install import install

        if quads.quantized_trainer:
            install(
                chunks,
                quads,
                cache=args.quads_weight_cache,
                hook=args.quads_weight_hook,
                debug=args.quads_debug,
                shared_launch=not args.overlap_param_gather,
            )
        return chunks

    return hook


def invalidate(chunks: list[nn.Module]) -> None:
    """Quantise again at the next use: needed after weights were written where torch cannot see it (``.data``)."""
    from .te.install import invalidate as run

    run(chunks)


def weight_recipe() -> Any:
    """A ``CustomRecipe``: NVFP4 weights, everything else in high precision."""
    return _custom_recipe(factory)


def symmetric_recipe() -> Any:
    """A ``CustomRecipe``: NVFP4 weights and inputs (a scale per token), high-precision gradients. An ablation."""
    return _custom_recipe(symmetric_factory)


def _custom_recipe(qfactory: Callable[[Any], Any]) -> Any:
    require_te("recipe")
    from transformer_engine.common.recipe import CustomRecipe

    return CustomRecipe(qfactory=qfactory)


def factory(role: Any) -> Any:
    """``qfactory`` of ``weight_recipe``: role (may be None) -> quantizer."""
    identity, weight, _ = _quantizers()
    return weight() if getattr(role, "tensor_type", "") == "weight" else identity()


def symmetric_factory(role: Any) -> Any:
    """``qfactory`` of ``symmetric_recipe``."""
    identity, weight, activation = _quantizers()
    return {"weight": weight, "input": activation}.get(getattr(role, "tensor_type", ""), identity)()


def weight_value(weight: Tensor, *, slot: Any = None) -> Tensor:
    """DQ(Q(weight)) of one weight [N, K] in its dtype: the installed value, or computed from this tensor alone.

    Raises QuadsError without an installation when the experts are sharded: shards must agree on the amax.
    """
    if slot is not None:
        weights, index = slot
        return weights.value(index)  # type: ignore[no-any-return]
    _require_whole()
    return nvfp4.grouped_qdq([weight], nvfp4.grouped_amax([weight]))[0]


def _require_whole() -> None:
    try:
        from megatron.core import parallel_state
    except ImportError:
        return  # Transformer Engine without Megatron
    if parallel_state.model_parallel_is_initialized() and parallel_state.get_expert_tensor_parallel_world_size() > 1:
        raise QuadsError(
            "experts are sharded and this layer does not know its shards' amax",
            where="--expert-tensor-parallel-size",
            do="install the recipe: model_config.post_wrap_hooks.append(megatron_quads.recipe.model_hook(args))",
        )


@functools.cache
def _quantizers() -> tuple[type, type, type]:
    """(high precision, weight, activation) quantizer classes; needs Transformer Engine >= 2.19."""
    require_te("recipe")
    from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

    class _FakeQuantizer(IdentityQuantizer):  # type: ignore[misc]
        def copy(self) -> Any:
            """The parent's gives a plain IdentityQuantizer, whose next update would store the raw weight."""
            made = type(self)(dtype=self.dtype, rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)
            made.internal, made.optimize_for_gemm = self.internal, self.optimize_for_gemm
            return made

    class WeightQuantizer(_FakeQuantizer):
        def _maybe_cast(self, tensor: Tensor) -> Tensor:
            slot = getattr(tensor, "quads_slot", None)
            return super()._maybe_cast(weight_value(tensor.detach(), slot=slot))  # type: ignore[no-any-return]

        def update_quantized(self, src: Tensor, dst: Any, *, noop_flag: Any = None) -> Any:
            if getattr(src, "quads_slot", None) is None or noop_flag is not None:
                return super().update_quantized(src, dst, noop_flag=noop_flag)
            dst._hp_data = self._maybe_cast(src)  # the installed value itself, not a copy of it
            return dst

    class ActivationQuantizer(_FakeQuantizer):
        def _maybe_cast(self, tensor: Tensor) -> Tensor:
            x = super()._maybe_cast(tensor)
            return nvfp4.qdq(x, nvfp4.row_scale(x)) if x.numel() else x

    return IdentityQuantizer, WeightQuantizer, ActivationQuantizer
