"""Flags of the quantised trainer for models that Megatron builds, and what is refused before anything starts."""

from __future__ import annotations

import argparse
import importlib.metadata
from typing import Any

from packaging.version import Version

from ..config import QuadsConfig, add_arguments
from ..errors import QuadsError
from ..kernels.nvfp4 import BLOCK

TE = "transformer-engine"
TE_OLDEST = Version("2.14")  # GroupedLinear takes its weights from a method that can be overridden
TE_CUSTOM_RECIPE = Version("2.19")  # IdentityQuantizer: a recipe can leave activations and gradients alone

HOOKS = ("substitute", "recipe")
CACHES = ("copy", "packed", "transient")

# name of the argument and of the model config's field, its flag, what the matter is, the remedy
_REFUSED = (
    ("fp8", "--fp8-format", "Megatron's own FP8 recipe would quantise the experts a second way", "leave it out"),
    ("fp4", "--fp4-format", "Megatron's own FP4 recipe would quantise the experts a second way", "leave it out"),
    ("fp8_param_gather", "--fp8-param-gather", "parameters must stay in high precision", "leave it out"),
    ("fp4_param_gather", "--fp4-param-gather", "parameters must stay in high precision", "leave it out"),
    ("moe_single_grouped_weight", "--moe-single-grouped-weight", "experts' weights must be separate", "leave it out"),
    ("delay_wgrad_compute", "--delay-wgrad-compute", "the delayed weight gradient misses the parameter", "leave it out"),
    (
        "overlap_dispatch_backward_with_experts_wgrad",
        "--overlap-dispatch-backward-with-experts-wgrad",
        "the delayed weight gradient misses the parameter",
        "leave it out",
    ),
    (
        "use_transformer_engine_op_fuser",
        "--use-transformer-engine-op-fuser",
        "fused operations read the parameters directly, unquantised",
        "leave it out",
    ),
    ("use_megatron_fsdp", "--use-megatron-fsdp", "sharded parameters are not supported", "use the distributed optimizer"),
    ("use_torch_fsdp2", "--use-torch-fsdp2", "sharded parameters are not supported", "use the distributed optimizer"),
    ("use_kitchen", "--use-kitchen", "Kitchen's layers are not supported", "leave it out"),
)  # fmt: skip


def add_quads_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Megatron ``extra_args_provider``: the recipe's flags, and those of the trainer that applies it."""
    add_arguments(parser)
    group = parser.add_argument_group(title="quads trainer")
    group.add_argument(
        "--quads-weight-cache", choices=CACHES, default="copy",
        help="copy: keep DQ(Q(W)) of the local experts for the whole step (one copy of them); packed: keep codes and block "
        "scales, 4.5 bits a weight, and dequantise at every use; transient: keep only the amax and quantise at every use",
    )  # fmt: skip
    group.add_argument(
        "--quads-weight-hook", choices=HOOKS, default="substitute",
        help="substitute: the layer's GEMM is given the quantised weights; recipe: a Transformer Engine CustomRecipe "
        f"(needs {TE} >= {TE_CUSTOM_RECIPE})",
    )  # fmt: skip
    group.add_argument(
        "--quads-debug", action="store_true", help="compare every use of a kept weight with a fresh one; slow"
    )
    return parser


def refuse_settings(settings: Any) -> None:
    """QuadsError for the first setting of an argument namespace or a model config that the trainer cannot honour."""
    for name, flag, what, remedy in _REFUSED:
        if getattr(settings, name, None):
            raise QuadsError(what, where=flag, do=remedy)
    if getattr(settings, "expert_gtp_weight_remat_size", 1) > 1:
        raise QuadsError(
            "experts' weights may not be gathered on use",
            where="--expert-tensor-parallel-num-weight-shards",
            do="leave it out",
        )
    if getattr(settings, "cuda_graph_impl", "none") != "none" and _captures_experts(settings):
        raise QuadsError(
            "a CUDA graph of the experts would replay without looking at the weights",
            where="--cuda-graph-impl",
            do="add --cuda-graph-modules attn",
        )


def _captures_experts(settings: Any) -> bool:
    modules = getattr(settings, "cuda_graph_modules", None) or []
    names = {getattr(m, "name", str(m)) for m in modules}
    return not names or not names <= {"attn", "moe_router", "moe_preprocess", "mamba"}


def refuse_arguments(args: argparse.Namespace, quads: QuadsConfig) -> None:
    """QuadsError, with the flag and the remedy, for what ``args`` (parsed, not yet validated by Megatron) cannot run.

    Recipes without a quantised trainer pass, but fp8.
    """
    if quads.recipe == "fp8":
        raise QuadsError(
            "fp8 training is Megatron's own recipe", where="--quads-recipe", do="use bf16 with Megatron's --fp8-format"
        )
    if not quads.quantized_trainer:
        return
    if not args.num_experts:
        raise QuadsError(
            f"recipe {quads.recipe!r} quantises routed experts, this model is dense",
            where="--num-experts",
            do="use --quads-recipe bf16",
        )
    refuse_settings(args)
    quads.quantized_layers(args.num_layers or 0)
    etp = expert_tensor_parallel_size(args)
    inner = args.moe_ffn_hidden_size or args.ffn_hidden_size
    shards: tuple[tuple[str, int | None, int], ...] = (
        ("--hidden-size", args.hidden_size, 1),
        ("--moe-ffn-hidden-size", inner, etp),
    )
    for flag, k, parts in shards:
        if k is not None and k % (BLOCK * parts):
            over = f" over {parts} expert tensor parallel ranks" if parts > 1 else ""
            raise QuadsError(
                f"{k}{over} is not a multiple of {BLOCK}", where=flag, do="NVFP4 needs whole blocks: change the size"
            )
    refuse_hook(args.quads_weight_hook, args.quads_weight_cache)
    refuse_activations(quads)
    if getattr(args, "transformer_impl", None) == "transformer_engine" or args.quads_weight_hook == "recipe":
        require_te(args.quads_weight_hook)


def expert_tensor_parallel_size(args: argparse.Namespace) -> int:
    """Megatron's argument; QuadsError when it is left out and Megatron's default would split the experts."""
    tp, etp = args.tensor_model_parallel_size, args.expert_tensor_parallel_size
    if etp is None and tp > 1:
        raise QuadsError(
            f"not given, and Megatron sets it to the tensor parallel size, {tp}: that splits every expert",
            where="--expert-tensor-parallel-size",
            do=f"give 1 (whole experts) or {tp}",
        )
    return etp or 1


def refuse_activations(quads: QuadsConfig) -> None:
    """Only a per-token scale is the same for every split of the tokens, and pretraining knows no RAC selection."""
    if quads.quantized_trainer_activations and quads.rac:
        raise QuadsError(
            f"recipe {quads.recipe} needs the selection of a calibrated checkpoint",
            where="--quads-recipe",
            do="use symmetric here; symmetric-rac is for `quads rl`",
        )
    if quads.quantized_trainer_activations and quads.activation_scale != "token":
        raise QuadsError(
            f"recipe symmetric has no {quads.activation_scale} scale in this trainer",
            where="--quads-activation-scale",
            do="use token",
        )


def refuse_hook(hook: str, cache: str) -> None:
    """A recipe's operand holds on to its values; only substituted ones can be written again."""
    if hook == "recipe" and cache != "copy":
        raise QuadsError(
            f"cache {cache} needs substituted weights", where="--quads-weight-hook recipe", do="use substitute"
        )


def te_version() -> Version | None:
    """Of the installed Transformer Engine, None without one."""
    try:
        return Version(importlib.metadata.version(TE).split("+")[0])
    except importlib.metadata.PackageNotFoundError:
        return None


def require_te(hook: str) -> Version:
    """QuadsError when Transformer Engine is missing or too old for the hook."""
    found = te_version()
    oldest = TE_CUSTOM_RECIPE if hook == "recipe" else TE_OLDEST
    if found is None:
        raise QuadsError(
            f"{TE} is not installed",
            where="--transformer-impl transformer_engine",
            do=f"install {TE}[pytorch]>={TE_CUSTOM_RECIPE}, or use --transformer-impl local",
        )
    if found < oldest:
        where = "--quads-weight-hook recipe" if hook == "recipe" else TE
        remedy = f"install {TE}[pytorch]>={oldest}"
        if hook == "recipe" and found >= TE_OLDEST:
            remedy += ", or use --quads-weight-hook substitute"
        raise QuadsError(f"{TE} {found} is too old: {oldest} is needed", where=where, do=remedy)
    return found
