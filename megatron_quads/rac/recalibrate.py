"""Calibration's statistics on sequences that were just sampled, on the trainer as it is; see ``refresh.py``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron.core import parallel_state
from torch import nn

from ..checkpoint.hf import HFModel
from .batches import MAX_TOKENS, check_sequences, deal, make_batches
from .calibrate import observe
from .metadata import RacMetadata
from .refresh import reselect
from .statistics import Moments, ResidualEnergy


def recalibrate(
    chunks: list[nn.Module],
    hf: HFModel,
    rac: RacMetadata,
    sequences: Sequence[Sequence[int]],
    *,
    headroom: float,
    args: argparse.Namespace,
    max_batch_tokens: int = MAX_TOKENS,
) -> RacMetadata:
    """Collective: a selection of ``rac``'s form for the model as it is now, from whole sequences of token ids.

    Every rank passes the same sequences and gets the same metadata. Costs one forward pass over them, two under a static
    activation scale, whose amax must be known first.
    """
    check_sequences(sequences, context=hf.max_position, vocab_size=hf.vocab_size, what="sequence")
    batches = deal(
        make_batches(sequences, max_tokens=max_batch_tokens),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    layers = sorted(rac.layers)
    copies = parallel_state.get_expert_tensor_parallel_world_size()
    moments = Moments(hf.shape, copies=copies)
    if rac.activation_scale == "static":
        observe(chunks, batches, args, moments)
        static = {unit: top * headroom for unit, top in moments.unit_amax(layers).items()}
        residual = ResidualEnergy(hf.shape, "static", static, copies=copies)
        observe(chunks, batches, args, residual)
    else:
        residual = ResidualEnergy(hf.shape, rac.activation_scale, {}, copies=copies)
        observe(chunks, batches, args, moments, residual)
    return reselect(rac, residual.by_unit(layers), moments.unit_amax(layers), headroom=headroom)
