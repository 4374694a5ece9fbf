"""How much each unit's W4A4 activations move the model's distribution, at several shares of compensated blocks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from ..trainer.activations import emulate_activations
from ..trainer.logprobs import log_distribution
from .batches import Batch
from .metadata import RacMetadata
from .select import GEMMS, Unit
from .statistics import all_reduce


def root_kl(p: Tensor, q: Tensor) -> Tensor:
    """sqrt(KL(p || q)) per token for log-probabilities [..., V] -> [...]; rounding below 0 is 0."""
    return (p.exp() * (p - q)).sum(-1).clamp(min=0).sqrt()


@torch.no_grad()
def measure(
    chunks: list[nn.Module],
    batches: Sequence[Batch],
    levels: Mapping[Unit, Sequence[int]],
    metadata: Callable[[Mapping[Unit, int]], RacMetadata],
    args: argparse.Namespace,
) -> dict[Unit, dict[int, float]]:
    """KL sensitivity of each unit at each block count of ``levels``; ``metadata`` turns counts into RAC metadata.

    The reference is the W4A16 model, full distributions over the true vocabulary are compared, and only one unit at a
    time has quantised activations. The number is (mean over tokens of sqrt(KL))^2: sqrt(KL) is proportional to the
    log-prob gap, its square adds up over independent units, and unlike the mean KL it is not ruled by the few tokens
    whose routing happens to flip on the calibration prompts. Every rank returns the same numbers. Costs one forward
    pass per unit and level and holds one batch's distributions.
    """
    units = list(levels)
    total = {unit: dict.fromkeys(levels[unit], 0.0) for unit in units}
    tokens = 0.0
    counted = parallel_state.get_tensor_model_parallel_rank() == 0
    for batch in batches:
        reference = log_distribution(chunks, batch.tokens, args)
        for unit in units:
            for count in levels[unit]:
                one = dict.fromkeys(((unit[0], gemm) for gemm in GEMMS), 0) | {unit: count}
                rac = metadata(one)
                with emulate_activations(chunks, rac, activation_scale=rac.activation_scale, units={unit}):
                    found = log_distribution(chunks, batch.tokens, args)
                if counted and reference is not None and found is not None:
                    total[unit][count] += batch.weight * float(root_kl(reference, found).double().sum())
        if counted and reference is not None:
            tokens += batch.weight * batch.tokens.numel()
    flat = torch.tensor([tokens, *(total[u][c] for u in units for c in levels[u])], dtype=torch.float64)
    all_reduce(flat, dist.ReduceOp.SUM)
    values = iter((flat[1:] / flat[0]).square().tolist())
    return {unit: {count: next(values) for count in levels[unit]} for unit in units}
