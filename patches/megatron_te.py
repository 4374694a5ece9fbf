"""Where Transformer Engine's and Megatron's linear layers take their weight, and what is used of their recipes.

``required`` gives the patches that an installation needs; ``USES`` lists upstream symbols that are called or overridden,
unchanged: they are checked by the same rules before the recipe is used.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import logging
from collections.abc import Collection
from typing import Any

from ..errors import QuadsError
from . import registry
from .registry import Patch

log = logging.getLogger(__name__)
_TE = ("transformer-engine", ">=2.14,<2.20")
_TE_RECIPE = ("transformer-engine", ">=2.19,<2.20")
_MEGATRON = ("megatron-core", ">=0.19.2,<0.20")
_TE_UPSTREAM = "https://github.com/NVIDIA/TransformerEngine"
_MEGATRON_UPSTREAM = "https://github.com/NVIDIA/Megatron-LM"
FACTORIES = ("megatron_quads.recipe.factory", "megatron_quads.recipe.symmetric_factory")


def _given(original: Any) -> Any:
    """The quantised weights of a module on which they are installed."""

    @functools.wraps(original)
    def wrapper(self: Any) -> Any:
        weights = self.__dict__.get("quads_weights")
        if weights is None or not weights.substituted:
            return original(self)
        if getattr(self, "fp8", False):
            raise QuadsError(
                "runs under a Transformer Engine autocast, which would quantise the quantised weights a second way",
                where=f"expert {type(self).__name__}",
                do="leave the experts out of te.autocast",
            )
        return weights.given()

    return wrapper


def _given_in_forward(original: Any) -> Any:
    """The same for Megatron's own layers, which hold one weight and pass it to their GEMM."""

    @functools.wraps(original)
    def wrapper(self: Any, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        weights = self.__dict__.get("quads_weights")
        if weights is not None:
            (weight,) = weights.given()
        return original(self, input, weight, *args, **kwargs)

    return wrapper


def _unfused(original: Any) -> Any:
    """Without the extension that this one layer would need, it does not fuse; the others do as the config says."""

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, config: Any, **kwargs: Any) -> None:
        if config.gradient_accumulation_fusion and not has_apex_fusion():
            log.warning("NVIDIA apex is not importable: %s adds its weight gradient unfused", type(self).__name__)
            config = copy.copy(config)
            config.gradient_accumulation_fusion = False
        original(self, *args, config=config, **kwargs)

    return wrapper


def _unless_compiled(original: Any) -> Any:
    """Nothing to compile when the helper was installed compiled."""

    @functools.wraps(original)
    def wrapper() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()

    return wrapper


def has_apex_fusion() -> bool:
    """Whether NVIDIA apex's fused weight gradient is there (PyPI's apex is another project and has none)."""
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def _stateless(original: Any) -> Any:
    """Nothing to save: this project's recipes have no state."""

    @functools.wraps(original)
    def wrapper(self: Any) -> Any:
        import torch

        made = getattr(self.fp8_meta.get("recipe"), "qfactory", None)
        if f"{getattr(made, '__module__', '')}.{getattr(made, '__qualname__', '')}" in FACTORIES:
            return torch.empty(0, dtype=torch.uint8)
        return original(self)

    return wrapper


_COLUMN_INIT = (
    "(self, input_size, output_size, *, config: 'ModelParallelConfig', init_method: 'Callable', bias=True, "
    "gather_output=False, stride=1, keep_master_weight_for_test=False, skip_bias_add=False, "
    "skip_weight_param_allocation: 'bool' = False, embedding_activation_buffer: 'Optional[List[torch.Tensor]]' = None, "
    "grad_output_buffer: 'Optional[List[torch.Tensor]]' = None, is_expert: 'bool' = False, "
    "tp_comm_buffer_name: 'Optional[str]' = None, disable_grad_reduce: 'bool' = False, "
    "tp_group: 'Optional[torch.distributed.ProcessGroup]' = None, name: 'str | None' = None)"
)
_WEIGHTS = "(self) -> List[Union[torch.Tensor, transformer_engine.pytorch.quantized_tensor.QuantizedTensorStorage]]"
_WHY_WEIGHTS = (
    "the layer has no argument for a weight to multiply with in the parameter's place; a recipe would do from 2.19 on, "
    "but makes every expert's operand an object of its own at each call"
)
_TE_REMOVE = "te.Linear and te.GroupedLinear accept weights, or a parametrisation, that the gradient passes through"

GROUPED = Patch(
    "transformer_engine.pytorch.module.grouped_linear:GroupedLinear._get_weight_tensors",
    *_TE, _WEIGHTS, _WHY_WEIGHTS, _TE_UPSTREAM, _TE_REMOVE, _given,
)  # fmt: skip
LINEAR = Patch(
    "transformer_engine.pytorch.module.linear:Linear._get_weight_tensors",
    *_TE, _WEIGHTS, _WHY_WEIGHTS, _TE_UPSTREAM, _TE_REMOVE, _given,
)  # fmt: skip
LOCAL: tuple[Patch, ...] = tuple(
    Patch(
        f"megatron.core.tensor_parallel.layers:{name}._forward_impl",
        *_MEGATRON, "(self, input, weight, *args, **kwargs)",
        "the user's model builds these layers from its own spec, so they cannot be subclassed there",
        _MEGATRON_UPSTREAM, "expert linears of a built model can be given another weight", _given_in_forward,
    )
    for name in ("ColumnParallelLinear", "RowParallelLinear")
)  # fmt: skip
OUTPUT_LAYER = Patch(
    "megatron.core.tensor_parallel.layers:ColumnParallelLinear.__init__",
    *_MEGATRON, _COLUMN_INIT,
    "with gradient_accumulation_fusion, Megatron's default, the output layer refuses to be built without NVIDIA apex, "
    "though Transformer Engine's layers fuse without it",
    _MEGATRON_UPSTREAM, "the output layer falls back by itself", _unfused,
)  # fmt: skip
DATASET_HELPERS = Patch(
    "megatron.core.datasets.utils:compile_helpers",
    *_MEGATRON, "()",
    "megatron.training runs make in its own folder at every start; the wheel has the compiled helper and no Makefile, so "
    "that ends the process",
    _MEGATRON_UPSTREAM, "a compiled helper is used as it is", _unless_compiled,
)  # fmt: skip
EXTRA_STATE = Patch(
    "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.get_extra_state",
    *_TE_RECIPE, "(self) -> torch.Tensor",
    "a CustomRecipe counts as stateful and is pickled into the checkpoint; Megatron's safe unpickler rightly refuses it "
    "when it splits the state of a grouped layer",
    _TE_UPSTREAM, "a CustomRecipe can say that it has no state", _stateless,
)  # fmt: skip


def _use(target: str, versions: tuple[str, str], signature: str, why: str) -> Patch:
    upstream = _MEGATRON_UPSTREAM if versions is _MEGATRON else _TE_UPSTREAM
    return Patch(target, *versions, signature, why, upstream, "the recipe hook is removed", lambda original: original)


_IDENTITY = "transformer_engine.pytorch.tensor.identity_tensor:IdentityQuantizer"
USES: tuple[Patch, ...] = (
    _use(f"{_IDENTITY}.copy", _TE_RECIPE, "(self) -> \"'IdentityQuantizer'\"", "overridden: a storage keeps a copy of its quantizer"),
    _use(f"{_IDENTITY}._maybe_cast", _TE_RECIPE, "(self, tensor: 'torch.Tensor') -> 'torch.Tensor'", "overridden: the value that the GEMM gets"),
    _use(f"{_IDENTITY}.update_quantized", _TE_RECIPE,
         "(self, src: 'torch.Tensor', dst: 'QuantizedTensorStorage', *, noop_flag: 'Optional[torch.Tensor]' = None) -> 'QuantizedTensorStorage'",
         "overridden: a kept weight is not copied"),
    _use("megatron.core.extensions.transformer_engine:TEGroupedLinear.finish_init", _MEGATRON,
         "(self, quantization_config: 'QuantizationConfig')",
         "called: gives a built layer its precision config"),
)  # fmt: skip


def required(hook: str, backends: Collection[str]) -> tuple[Patch, ...]:
    """The patches for ``hook`` ("substitute" or "recipe") on these kinds of expert linears ("grouped", "te", "local").

    For the recipe, also checks ``USES``: QuadsError when one does not fit.
    """
    patches: tuple[Patch, ...] = ()
    if hook == "recipe":
        for used in USES:
            registry.check(used)
        patches += (EXTRA_STATE,)
    elif "grouped" in backends:
        patches += (GROUPED,)
    if "te" in backends:
        patches += (LINEAR,)
    if "local" in backends:
        patches += LOCAL
    return patches
