"""``quads calibrate``: prompts -> sorted plain checkpoint, RAC metadata and a report.

On the W4A16 trainer itself: (1) moments of the experts' inputs give the order of their channels; (2) the sorted
checkpoint is written aside and loaded back; (3) its residual energies rank the blocks; (4) with the adaptive policy,
the KL that each unit's W4A4 activations cause, at several shares of compensated blocks, decides where the FLOPs go.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from .. import atomic
from ..checkpoint.hf import HFModel, read_model_config
from ..checkpoint.load import load_hf
from ..config import QuadsConfig
from ..errors import QuadsError
from ..trainer.activations import observe_experts
from ..trainer.experts import require_match
from ..trainer.logprobs import token_logprobs
from ..trainer.model import build
from . import select, sort
from .batches import MAX_TOKENS, Batch, check_sequences, deal, make_batches
from .budget import REPORT
from .metadata import SIDECAR, RacMetadata
from .select import Gemm, Unit
from .sensitivity import measure
from .statistics import ActivationScale, Moments, ResidualEnergy
from .store import MOMENTS, RESIDUAL, add_files

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CalibrationReport:
    """What calibration saw and chose; ``to_dict`` is what ``quads_calibration_report.json`` holds."""

    prompts: int
    tokens: int
    rac: RacMetadata
    flop_share: float
    counts: dict[Unit, int]
    amax: dict[Unit, float]
    energy: dict[Unit, list[float]]
    kl: dict[Unit, dict[int, float]]
    expert_tokens: dict[int, list[float]]
    unseen_experts: list[tuple[int, int]]
    clipped_share: dict[Unit, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; units are written ``layer.gemm``."""

        def named(table: dict[Unit, Any]) -> dict[str, Any]:
            return {f"{layer}.{gemm}": value for (layer, gemm), value in table.items()}

        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "rac"}
        return {k: named(v) if k in _BY_UNIT else v for k, v in plain.items()} | {"rac_hash": self.rac.content_hash}


_BY_UNIT = {"counts", "amax", "energy", "kl", "clipped_share"}


def calibrate(
    hf_in: str | Path,
    prompts: Sequence[Sequence[int]],
    quads: QuadsConfig,
    out: str | Path,
    *,
    args: argparse.Namespace,
    max_batch_tokens: int = MAX_TOKENS,
    statistics: Path | None = None,
) -> CalibrationReport:
    """Sort the experts of ``hf_in`` and choose RAC's blocks; every rank of an initialised job calls it.

    ``prompts`` are token ids (whole prompt + response sequences, where there are some, are better). Writes ``out``: a
    plain Hugging Face checkpoint in the dtype of ``hf_in``, sorted if ``quads.rac_sort``, with ``quads_rac.json``,
    ``quads_calibration.json`` and a report. Raises QuadsError on no prompts, an empty one, one longer than the context,
    a quantised checkpoint, a recipe without a quantised trainer, or a ratio too small for a single block; ``out`` is
    then as it was. ``statistics``: a folder of ``engine.collect``, whose numbers are taken instead of observing the
    trainer; sensitivities are the trainer's all the same.
    """
    hf = read_model_config(hf_in)
    if not quads.quantized_trainer:
        raise QuadsError(
            f"recipe {quads.recipe!r} has nothing to calibrate", where="--quads-recipe", do="use recipe quads"
        )
    check_sequences(prompts, context=hf.max_position, vocab_size=hf.vocab_size, what="prompt")
    sort.refuse_quantized(Path(hf_in))
    layers = quads.quantized_layers(hf.num_layers)
    chunks = build(args, hf, quads)
    require_match(chunks, quads)
    load_hf(chunks, hf)
    batches = deal(
        make_batches(prompts, max_tokens=max_batch_tokens),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )

    moments = Moments(hf.shape, copies=parallel_state.get_expert_tensor_parallel_world_size())
    if statistics is not None:
        add_files(moments, [statistics / MOMENTS])
    else:
        observe(chunks, batches, args, moments)
    unseen = moments.unseen(layers)
    if unseen:
        log.warning(
            "%d of %d experts saw no calibration token and get their layer's statistics",
            len(unseen),
            len(layers) * hf.num_experts,
        )
    amax = moments.unit_amax(layers)
    order = sort.order_of(moments, layers, quads)

    with ExitStack() as staging:  # an error anywhere removes the new folder and leaves an old ``out``

        def write() -> Path:
            aside = staging.enter_context(atomic.folder(out, marker={"kind": "calibrated-checkpoint"}))
            sort.write_sorted(hf_in, order, aside)
            return aside

        aside = on_rank0(write)
        if order:
            load_hf(chunks, read_model_config(aside))
        report = _choose(
            chunks, batches, hf, quads, layers, moments, amax, args, is_sorted=bool(order), statistics=statistics
        )
        report = dataclasses.replace(report, prompts=len(prompts), tokens=sum(map(len, prompts)), unseen_experts=unseen)

        def commit() -> None:
            sort.write_calibration(aside, order, {"model": hf.shape.model_dump(), "report": REPORT})
            atomic.write_json(aside / SIDECAR, report.rac.to_block())
            atomic.write_json(aside / REPORT, report.to_dict())
            staging.close()

        on_rank0(commit)
    return report


def observe(
    chunks: list[nn.Module], batches: list[Batch], args: argparse.Namespace, *statistics: Moments | ResidualEnergy
) -> None:
    """Collective: one forward pass over this rank's batches, seen by all ``statistics``, which are then reduced."""

    def see(layer: int, expert: int, gemm: Gemm, x: Tensor) -> None:
        for one in statistics:
            one(layer, expert, gemm, x)

    with observe_experts(chunks, see):
        for batch in batches:
            for one in statistics:
                one.weight = batch.weight
            length = batch.tokens.shape[1]
            # tensor parallelism pads a sequence to a multiple of its size; the experts would see that: cut instead
            kept = length - length % args.tensor_model_parallel_size
            if kept > 1:
                token_logprobs(chunks, batch.tokens[:, :kept], args)
    for one in statistics:
        one.reduce()


def _choose(
    chunks: list[nn.Module],
    batches: list[Batch],
    hf: HFModel,
    quads: QuadsConfig,
    layers: list[int],
    moments: Moments,
    amax: dict[Unit, float],
    args: argparse.Namespace,
    *,
    is_sorted: bool,
    statistics: Path | None,
) -> CalibrationReport:
    """Energies, sensitivities and the selection on the model as it will be trained."""
    static = {unit: top * quads.static_headroom for unit, top in amax.items()}
    mode = cast(ActivationScale, quads.activation_scale)
    residual = ResidualEnergy(hf.shape, mode, static, copies=moments.copies)
    if statistics is not None:
        add_files(residual, [statistics / RESIDUAL])
    else:
        observe(chunks, batches, args, residual)
    energy = residual.by_unit(layers)
    blocks = {unit: e.numel() for unit, e in energy.items()}
    settings: dict[str, Any] = dict(
        ratio=quads.rac_ratio,
        policy=quads.rac_policy,
        activation_scale=quads.activation_scale,
        is_sorted=is_sorted,
        static_amax=static,
    )
    kl: dict[Unit, dict[int, float]] = {}
    if quads.rac_policy == "adaptive" and quads.rac_ratio > 0:
        levels = {unit: select.level_counts(n) for unit, n in blocks.items()}
        kl = measure(
            chunks,
            batches,
            levels,
            lambda counts: select.build_metadata(hf.shape, counts, energy, **settings),
            args,
        )
        counts = select.adaptive(kl, select.block_cost(hf.shape), quads.rac_ratio)
    else:
        counts = select.uniform(blocks, quads.rac_ratio)
    if quads.rac_ratio > 0 and not any(counts.values()):
        raise QuadsError(
            f"ratio {quads.rac_ratio} selects no whole 16-block in any layer",
            where="--quads-rac-ratio",
            do="raise it, or give 0 to switch RAC off",
        )
    width: dict[Gemm, int] = {"gate_up": hf.hidden_size, "down": hf.moe_intermediate_size}
    return CalibrationReport(
        prompts=0,
        tokens=0,
        rac=select.build_metadata(hf.shape, counts, energy, **settings),
        flop_share=select.flop_share(counts, hf.shape),
        counts=counts,
        amax=amax,
        energy={unit: e.tolist() for unit, e in energy.items()},
        kl=kl,
        expert_tokens={layer: moments.tokens[layer].tolist() for layer in layers},
        unseen_experts=[],
        clipped_share={
            (layer, gemm): float(
                residual.clipped[gemm][layer] / (moments.tokens[layer].sum() * width[gemm]).clamp(min=1)
            )
            for layer, gemm in energy
        },
    )


def on_rank0[T](action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0; its (picklable) result, or its QuadsError, reaches every rank."""
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = action()
        except QuadsError as e:
            box[1] = e
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    return box[0]
