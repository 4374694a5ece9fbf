"""Install a recipe on the routed experts of a built Megatron model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from ..config import QuadsConfig
from ..errors import QuadsError
from ..patches import megatron_te, registry
from . import arguments
from .activations import quantize_input
from .cache import Mode, WeightGroup
from .experts import ExpertGemm, expert_gemms
from .scratch import write_again
from .substitute import substitute

log = logging.getLogger(__name__)
FACTORY = "megatron_quads.recipe.factory"


class ModuleWeights:
    """The part of a group that one linear layer holds; ``module.quads_weights``."""

    def __init__(self, group: WeightGroup, first: int, count: int, *, fused: bool, substituted: bool) -> None:
        self.group, self.first, self.count = group, first, count
        self.fused = fused  # the layer accumulates its weight gradient itself
        self.substituted = substituted  # the layer asks for ``given()``; else a recipe's quantizer asks for ``value()``
        self._now: list[Tensor] | None = None
        self._given: list[Tensor] = []
        self._given_for: tuple[int, int] = (0, 0)

    def values(self) -> list[Tensor]:
        """DQ(Q(.)) of the layer's weights, without gradient."""
        return self.group.values(self.first, self.count)

    def given(self) -> list[Tensor]:
        """The same, with the parameters' gradient: what the layer's GEMM takes in their place.

        One set of tensors, one autograd node, serves all micro-batches of a step: making them anew for each would cost
        more on the host than the GEMMs' launches allow.
        """
        params = self.group.params[self.first : self.first + self.count]
        values = self.values()
        if self.group.mode != "copy" or not torch.is_grad_enabled() or not params[0].requires_grad:
            return substitute(params, values, fused=self.fused)
        made_for = (self.group.quantized, id(getattr(params[0], "main_grad", None)))
        if made_for != self._given_for:
            self._given, self._given_for = substitute(params, values, fused=self.fused), made_for
        return self._given

    def value(self, index: int) -> Tensor:
        """One of ``values()``, asked for in ascending order from 0 within a forward pass."""
        if index == 0 or self._now is None:
            self._now = self.values()
        found = self._now[index]
        if index == self.count - 1:
            self._now = None
        return found


@dataclass(frozen=True)
class Installed:
    """What ``install`` did on this rank. ``modules``: linear layers; ``weights``: expert matrices."""

    groups: tuple[WeightGroup, ...]
    modules: int
    weights: int


def install(
    chunks: Sequence[nn.Module],
    quads: QuadsConfig,
    *,
    cache: Mode = "copy",
    hook: str = "substitute",
    debug: bool = False,
    shared_launch: bool = True,
    inputs: bool = True,
) -> Installed:
    """Collective: from now on the routed experts that ``quads`` selects multiply with DQ(Q(weight)).

    ``chunks``: this rank's model chunks, wrapped in DDP or not, before the first forward pass. ``hook``: see
    ``--quads-weight-hook``. ``shared_launch``: the weights of all layers are quantised together; must be off when
    parameters arrive module by module (``--overlap-param-gather``). ``inputs``: the symmetric recipe also quantises the
    experts' inputs. Also installs what a ``--te-precision-config-file`` has given ``megatron_quads.recipe.factory``,
    whatever ``quads`` selects. Raises QuadsError, on every rank, when a rank has no such module, when ranks have different
    Transformer Engines, when a setting of the model rules it out; on one for a K that is not a multiple of 16.
    """
    if inputs:
        arguments.refuse_activations(quads)
    arguments.refuse_hook(hook, cache)
    models = unwrap_model(list(chunks))
    config = models[0].config
    if quads.quantized_trainer:
        arguments.refuse_settings(config)
    chosen = [g for g in expert_gemms(models) if _is_chosen(g, quads, int(config.num_layers))]
    if any(g.backend != "local" for g in chosen):
        arguments.require_te(hook)
    if hook == "recipe" and any(g.backend != "grouped" for g in chosen):
        raise QuadsError(
            "Transformer Engine's recipes need a number of tokens that is a multiple of 8 for every expert",
            where="--quads-weight-hook recipe",
            do="add --moe-grouped-gemm (with --transformer-impl transformer_engine) or use --quads-weight-hook substitute",
        )
    _require_everywhere(quads, sum(len(g.modules) for g in chosen))
    registry.apply(megatron_te.required(hook, {g.backend for g in chosen}))
    places = [(gemm, i) for gemm in chosen for i in range(len(gemm.modules))]
    together: dict[Any, list[tuple[ExpertGemm, int]]] = {}
    for n, (gemm, i) in enumerate(places):
        together.setdefault(gemm.kind if shared_launch else n, []).append((gemm, i))
    groups = [_install_group(part, cache=cache, hook=hook, debug=debug) for part in together.values()]
    if quads.quantized_trainer_activations and inputs:
        for gemm, i in places:
            _quantize_inputs(gemm.modules[i], gemm)
    done = Installed(tuple(groups), sum(len(g.modules) for g in chosen), sum(len(g.params) for g in groups))
    log.info("recipe %s: %d expert linears with %d weights on this rank", quads.recipe, done.modules, done.weights)
    return done


def _is_chosen(gemm: ExpertGemm, quads: QuadsConfig, num_layers: int) -> bool:
    if quads.quantized_trainer and quads.quantizes_layer(gemm.layer, num_layers):
        return True
    params = getattr(gemm.modules[0], "te_quant_params", None)
    return params is not None and params.training_recipe.custom_recipe_factory == FACTORY


def _install_group(part: list[tuple[ExpertGemm, int]], *, cache: Mode, hook: str, debug: bool) -> WeightGroup:
    """One group for these modules (a GEMM, and which of its modules)."""
    params: list[Tensor] = []
    names: list[str] = []
    places = []
    for gemm, i in part:
        mine = gemm.params(gemm.modules[i])
        first = 0 if len(gemm.modules) == 1 else i
        places.append((gemm, gemm.modules[i], len(params), len(mine)))
        params += mine
        names += gemm.names[first : first + len(mine)]
    group = WeightGroup(params, names, tp_group=part[0][0].tp_group, mode=cache, debug=debug)
    for gemm, module, start, count in places:
        weights = ModuleWeights(group, start, count, fused=_accumulates(module, gemm), substituted=hook == "substitute")
        given = getattr(module, "te_quant_params", None)
        if hook == "recipe":
            _use_recipe(module, gemm, weights)
        elif given is not None:
            raise QuadsError(
                "a precision config names this module as well",
                where=f"--te-precision-config-file, layer {gemm.layer} {gemm.kind}",
                do=f"take the experts out of it, or give them {FACTORY} and add --quads-weight-hook recipe",
            )
        if cache != "copy":
            if gemm.backend == "local" and weights.fused:
                raise QuadsError(
                    "Megatron's own layers look for main_grad on the weight that autograd kept, and here it keeps none",
                    where=f"--quads-weight-cache {cache}",
                    do="add --no-gradient-accumulation-fusion",
                )
            write_again(module, weights)
        module.quads_weights = weights  # type: ignore[assignment]
    return group


def _accumulates(module: nn.Module, gemm: ExpertGemm) -> bool:
    """Whether the layer adds its weight gradient to ``main_grad`` itself."""
    name = "gradient_accumulation_fusion" if gemm.backend == "local" else "fuse_wgrad_accumulation"
    return bool(getattr(module, name))


def _use_recipe(module: Any, gemm: ExpertGemm, weights: ModuleWeights) -> None:
    from megatron.core.quantization.quant_config import MatchContext, QuantizationConfig

    given = module.te_quant_params
    if given is not None and given.training_recipe.custom_recipe_factory != FACTORY:
        raise QuadsError(
            f"a precision config gives it {given.training_recipe.custom_recipe_factory}",
            where=f"--te-precision-config-file, layer {gemm.layer} {gemm.kind}",
            do="take the experts out of it",
        )
    recipe = {
        "fp4_quantization_recipe": "custom",
        "custom_recipe_factory": FACTORY,
        "override_nonquantized_autocast": True,
    }
    settings = {
        "transformer_engine_config_type": "TEQuantizationParams",
        "training_recipe": recipe,
        "evaluation_recipe": recipe,
    }
    place = MatchContext(f"layers.{gemm.layer}.mlp.experts.linear_{gemm.kind}", gemm.layer)
    module.finish_init(QuantizationConfig(settings, place, "quads"))
    # the layer keeps no quantised weights of its own: the group's are asked for at every forward, and known to be fresh
    module.disable_parameter_transpose_cache = True
    for i, p in enumerate(gemm.params(module)):
        p.quads_slot = (weights, i)  # type: ignore[attr-defined]


def _quantize_inputs(module: nn.Module, gemm: ExpertGemm) -> None:
    group = gemm.tp_group if gemm.kind == "fc2" else None
    module.register_forward_pre_hook(lambda _, args: (quantize_input(args[0], group), *args[1:]))


def _require_everywhere(quads: QuadsConfig, count: int) -> None:
    mine: Any = (count, str(arguments.te_version()))
    every: list[Any] = [mine]
    if dist.is_initialized():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
    versions = {v for _, v in every}
    if len(versions) > 1:
        raise QuadsError(
            f"ranks have different Transformer Engines: {', '.join(sorted(versions))}",
            where="environment",
            do="install the same version on every node",
        )
    if empty := [rank for rank, (n, _) in enumerate(every) if not n]:
        raise QuadsError(
            f"recipe {quads.recipe!r} matched no module on rank {', '.join(map(str, empty))}",
            where=f"--quads-module-pattern={quads.module_pattern}, first {quads.keep_first_layers} and last "
            f"{quads.keep_last_layers} layers kept",
            do="widen the pattern, keep fewer layers or use fewer pipeline stages",
        )


def installed(chunks: Sequence[nn.Module]) -> list[ModuleWeights]:
    """What ``install`` left on the modules of these chunks."""
    found = (getattr(m, "quads_weights", None) for c in chunks for m in c.modules())
    return [w for w in found if w is not None]


def invalidate(chunks: Sequence[nn.Module]) -> None:
    """Compute every kept value again at its next use: after weights were written where torch cannot see it."""
    for weights in installed(chunks):
        weights.group.invalidate()


@torch.no_grad()
def compute_weight(module: nn.Module, parameter: Tensor) -> Tensor:
    """What the layer's GEMM multiplies with for one of its parameters: DQ(Q(.)), or the parameter itself.

    Collective over the expert tensor parallel group, for all weights of the group, when the kept value is old. Without a
    kept copy it is good until the next one is asked for.
    """
    weights = getattr(module, "quads_weights", None)
    if weights is None:
        return parameter
    mine = weights.group.params[weights.first : weights.first + weights.count]
    index = next(i for i, p in enumerate(mine) if p is parameter)
    return weights.values()[index]  # type: ignore[no-any-return]
