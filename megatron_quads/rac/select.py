"""Which 16-blocks RAC compensates: pure functions from calibrated numbers to RacMetadata, no model and no GPU.

A *unit* is one expert GEMM of one layer, ``(layer, "gate_up" | "down")``; all experts of the layer share its selection.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from ..errors import QuadsError
from .metadata import BLOCK, GemmSelection, LayerSelection, ModelShape, RacMetadata

Gemm = Literal["gate_up", "down"]
Unit = tuple[int, Gemm]
GEMMS: tuple[Gemm, Gemm] = ("gate_up", "down")

# Shares of a GEMM's K at which its KL sensitivity is measured.
LEVELS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0)


def num_blocks(shape: ModelShape) -> dict[Gemm, int]:
    """16-blocks along K of each GEMM."""
    return {"gate_up": shape.hidden_size // BLOCK, "down": shape.moe_intermediate_size // BLOCK}


def block_cost(shape: ModelShape) -> dict[Gemm, int]:
    """Multiply-adds that one compensated block costs per (token, expert) pair: 16 columns times the GEMM's rows."""
    return {"gate_up": BLOCK * 2 * shape.moe_intermediate_size, "down": BLOCK * shape.hidden_size}


def level_counts(blocks: int, levels: tuple[float, ...] = LEVELS) -> list[int]:
    """Distinct block counts of the levels, ascending; a level is rounded down to whole blocks."""
    return sorted({share_of(blocks, level) for level in levels})


def share_of(blocks: int, ratio: float) -> int:
    """Whole blocks in ``ratio`` of ``blocks``, rounded down: a share is never exceeded."""
    return math.floor(blocks * ratio + 1e-9)


def rank_blocks(energy: Tensor) -> list[int]:
    """Block indices by residual energy [K/16], largest first; equal energies keep index order, on every rank alike."""
    return energy.sort(descending=True, stable=True).indices.tolist()


def uniform(units: Mapping[Unit, int], ratio: float) -> dict[Unit, int]:
    """The same share of every unit; ``units`` gives each unit's number of blocks. Ratio 0 selects nothing."""
    return {unit: share_of(blocks, ratio) for unit, blocks in units.items()}


def adaptive(kl: Mapping[Unit, Mapping[int, float]], cost: Mapping[Gemm, int], ratio: float) -> dict[Unit, int]:
    """Block counts per unit that lower the summed KL most per FLOP, under one budget of ``ratio`` of all expert FLOPs.

    ``kl[unit]`` maps block counts (0 and the full count among them) to the KL measured with only that unit quantised
    and so many blocks compensated; ``cost`` is per block (``block_cost``). Greedy: the move of one unit to any higher
    count that fits and has the largest KL drop per FLOP, until none lowers the KL. Looking past the next level makes it
    immune to measurements that are not monotone. The budget is never exceeded; what helps no unit stays unspent.
    """
    for (layer, gemm), table in kl.items():
        if 0 not in table or not all(math.isfinite(v) for v in table.values()):
            raise QuadsError(
                "KL sensitivity is missing at 0 blocks or not finite",
                where=f"layer {layer} {gemm}",
                do="calibrate again",
            )
    budget = math.floor(ratio * sum(max(table) * cost[unit[1]] for unit, table in kl.items()) + 1e-6)
    chosen = dict.fromkeys(kl, 0)
    while True:
        best: tuple[float, Unit, int] | None = None
        for unit, table in kl.items():
            for count in sorted(table):
                price = (count - chosen[unit]) * cost[unit[1]]
                gain = table[chosen[unit]] - table[count]
                if 0 < price <= budget and gain > 0 and (best is None or gain / price > best[0]):
                    best = (gain / price, unit, count)
        if best is None:
            return chosen
        _, unit, count = best
        budget -= (count - chosen[unit]) * cost[unit[1]]
        chosen[unit] = count


def flop_share(counts: Mapping[Unit, int], shape: ModelShape) -> float:
    """Extra FLOPs of a selection as a share of the expert FLOPs of the layers in ``counts``."""
    total, cost = num_blocks(shape), block_cost(shape)
    spent = sum(n * cost[gemm] for (_, gemm), n in counts.items())
    whole = sum(total[gemm] * cost[gemm] for _, gemm in counts)
    return spent / whole if whole else 0.0


def flops_of(rac: RacMetadata) -> float:
    """Extra FLOPs of a selection as a share of the expert FLOPs of its layers."""
    counts: dict[Unit, int] = {(i, g): len(getattr(s, g).indices()) for i, s in rac.layers.items() for g in GEMMS}
    return flop_share(counts, rac.model)


def build_metadata(
    shape: ModelShape,
    counts: Mapping[Unit, int],
    energy: Mapping[Unit, Tensor],
    *,
    ratio: float,
    policy: Literal["uniform", "adaptive"],
    activation_scale: Literal["token", "tensor", "static"],
    is_sorted: bool,
    static_amax: Mapping[Unit, float] | None = None,
) -> RacMetadata:
    """Counts per unit and residual energies [K/16] -> RacMetadata.

    gate_up takes its highest-energy blocks; down takes its leading blocks when the checkpoint is sorted, else its
    highest-energy blocks. ``static_amax`` (headroom included) is recorded where positive. Raises QuadsError when a
    static scale is asked for and a unit has none.
    """

    def gemm_selection(unit: Unit) -> GemmSelection:
        amax = (static_amax or {}).get(unit, 0.0)
        if activation_scale == "static" and not amax > 0:
            raise QuadsError(
                "no activation was seen, so no static scale exists",
                where=f"layer {unit[0]} {unit[1]}",
                do="give more calibration prompts",
            )
        top = amax if amax > 0 else None
        if unit[1] == "down" and is_sorted:
            return GemmSelection(prefix=counts[unit], static_amax=top)
        return GemmSelection(blocks=sorted(rank_blocks(energy[unit])[: counts[unit]]), static_amax=top)

    layers = sorted({layer for layer, _ in counts})
    return RacMetadata(
        model=shape,
        activation_scale=activation_scale,
        policy=policy,
        ratio=ratio,
        sorted=is_sorted,
        layers={
            layer: LayerSelection(gate_up=gemm_selection((layer, "gate_up")), down=gemm_selection((layer, "down")))
            for layer in layers
        },
    )
