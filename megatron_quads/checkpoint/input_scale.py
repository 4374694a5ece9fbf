"""``input_scale`` of NVFP4 expert projections: the static activation scale that readers of the format require.

The rollout of this project scales activations per token and does not use it, unless the activation scale is static
without RAC metadata. Other readers divide by it, so a placeholder would clip (too small) or flush to zero (too large).
Calibrated values are written when RAC metadata has them. Otherwise the value follows from the weights alone:

    gate, up   x = gamma * n with |n|_2 <= sqrt(H), so |x| <= sqrt(H) * max|gamma|: never clips
    down       with g_i = <gamma * w_gate_i, n>, |h_i| <= |g_i u_i|; 16 standard deviations of each for isotropic n:
               min(H, 256) * max_i (|gamma * w_gate_i| * |gamma * w_up_i|)

E4M3 block scales have 15 binades of normal range below the top, so such generous bounds cost no precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import nvfp4
from ..rac.metadata import RacMetadata

_DEVIATIONS = 256.0


def input_amax(gamma: Tensor, experts: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, list[float]]:
    """(amax of gate/up's input, amax of down's input of each expert), with one host synchronisation for all.

    gamma [H] is the norm before the experts, each expert's gate and up are [I, H]; any float dtype. Positive: 1.0 for a
    dead expert.
    """
    wide = gamma.float()
    hidden = gamma.numel()
    top = [wide.abs().max()]
    rows = [((g.float() * wide).norm(dim=1) * (u.float() * wide).norm(dim=1)).max() for g, u in experts]
    largest, *inner = torch.stack(top + rows).tolist()
    into = math.sqrt(hidden) * largest
    deviations = min(float(hidden), _DEVIATIONS)
    return into if into > 0 else 1.0, [deviations * x if x > 0 else 1.0 for x in inner]


def calibrated(rac: RacMetadata | None, layer: int) -> tuple[float | None, float | None]:
    """(gate/up, down) amax that RAC metadata holds for ``layer``, None where it holds none."""
    if rac is None or layer not in rac.layers:
        return None, None
    chosen = rac.layers[layer]
    return chosen.gate_up.static_amax, chosen.down.static_amax


def to_scale(amax: float) -> Tensor:
    """fp32 scalar ``amax / (6 * 448)``."""
    return nvfp4.tensor_scale(torch.tensor(amax, dtype=torch.float32))
