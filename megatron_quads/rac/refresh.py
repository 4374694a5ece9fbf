"""The selection taken anew during RL: the same statistics and selection code as calibration, within the form it gave.

What stays: the order of channels (down_proj of a sorted checkpoint keeps its leading blocks), how many blocks each GEMM
compensates, policy and ratio. So a running engine's shapes and graphs stay valid. What changes: which blocks are listed, and
the calibrated amax values.
"""

from __future__ import annotations

from torch import Tensor

from ..checkpoint.hf import HFModel
from ..config import QuadsConfig
from ..errors import QuadsError
from . import select
from .metadata import RacMetadata, required_rac
from .select import Unit


def require_selectable(quads: QuadsConfig, hf: HFModel) -> None:
    """Raise QuadsError unless a run of this recipe and checkpoint has a selection that can be taken anew."""
    where, give = "--recalibrate-every", "use recipe quads, or give 0"
    rac = required_rac(quads, hf)
    if rac is None:
        raise QuadsError(f"recipe {quads.recipe} has no RAC selection", where=where, do=give)
    if quads.quantized_trainer_activations:
        raise QuadsError(f"recipe {quads.recipe} trains with the checkpoint's selection", where=where, do=give)
    chosen = [b for x in rac.layers.values() for b in x.gate_up.indices() + x.down.indices()]
    if not chosen and rac.activation_scale != "static":
        raise QuadsError("the checkpoint compensates no block", where=where, do="calibrate with a ratio, or give 0")


def reselect(
    rac: RacMetadata,
    energy: dict[Unit, Tensor],
    amax: dict[Unit, float],
    *,
    headroom: float,
) -> RacMetadata:
    """``rac`` with the blocks that residual energies [K/16] per unit rank first; ``amax``: the inputs' largest magnitude."""
    counts: dict[Unit, int] = {
        (layer, gemm): len(getattr(chosen, gemm).indices())
        for layer, chosen in rac.layers.items()
        for gemm in select.GEMMS
    }
    return select.build_metadata(
        rac.model,
        counts,
        energy,
        ratio=rac.ratio,
        policy=rac.policy,
        activation_scale=rac.activation_scale,
        is_sorted=rac.sorted,
        static_amax={unit: top * headroom for unit, top in amax.items()},
    )
