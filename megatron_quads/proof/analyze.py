"""``quads analyze``: where the log-prob gap comes from - quantised weights, quantised activations, or two engines.

Four models score the same tokens, each one step further from the unquantised trainer:

    raw       trainer, master weights
    w4a16     trainer, QDQ weights (what QUADS trains)
    emulated  trainer, QDQ weights and the rollout's activation quantisation (without and with RAC)
    rollout   the real engine's log-probs

weight error = raw to w4a16, activation error = w4a16 to emulated, engine drift = emulated to rollout. QUADS removes the
first from the trainer-rollout gap, RAC shrinks the second, the third is the floor (arXiv 2607.15810, finding 1).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor, nn

from .. import atomic
from ..checkpoint.hf import read_model_config
from ..checkpoint.load import load_hf
from ..config import QuadsConfig
from ..errors import QuadsError
from ..kernels.rac import reference as kernel
from ..rac.batches import Batch, check_sequences, make_batches
from ..rac.metadata import RacMetadata
from ..rac.select import Gemm
from ..rac.statistics import ActivationScale, activation_scale, all_reduce
from ..trainer.activations import emulate_activations, observe_experts
from ..trainer.experts import expert_linears
from ..trainer.logprobs import token_logprobs
from ..trainer.model import build
from .analyze_report import Analysis, LayerRow, Row, plot, show


def split(
    raw: Tensor, w4a16: Tensor, w4a4: Tensor, with_rac: Tensor | None, rollout: Tensor | None, *, rollout_has_rac: bool
) -> list[Row]:
    """Log-probs [tokens] of each model -> rows; ``rollout_has_rac``: which emulation the rollout is compared with."""
    rows = [
        Row.of("weight error", "raw | W4A16", raw, w4a16),
        Row.of("activation error", "W4A16 | W4A4", w4a16, w4a4),
    ]
    if with_rac is not None:
        rows.append(Row.of("activation error, RAC", "W4A16 | RAC", w4a16, with_rac))
    if rollout is not None:
        emulated = with_rac if rollout_has_rac and with_rac is not None else w4a4
        name = "RAC" if emulated is with_rac else "W4A4"
        rows.append(Row.of("engine drift", f"{name} | rollout", emulated, rollout))
        rows.append(Row.of("gap, asymmetric QAT", "W4A16 | rollout", w4a16, rollout))
        rows.append(Row.of("gap, naive", "raw | rollout", raw, rollout))
    return rows


def align(sequences: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> tuple[Tensor, Tensor]:
    """Positions of scored tokens, as (sequence, index into its s - 1 log-probs) [tokens, 2], and their values [tokens].

    Entry i of ``logprobs`` belongs to the LAST tokens of sequence i: all but the first (``Rollout.score``) or the
    sampled response (``Rollout.generate``). Prefer sampled ones: W4A4 prefill and decode may round ties differently.
    """
    if len(sequences) != len(logprobs):
        raise QuadsError(
            f"{len(sequences)} sequences but {len(logprobs)} lists of log-probs", do="give one list per sequence"
        )
    where, values = [], []
    for i, (tokens, scores) in enumerate(zip(sequences, logprobs, strict=True)):
        first = len(tokens) - 1 - len(scores)
        if first < 0:
            raise QuadsError(
                f"{len(scores)} log-probs for {len(tokens)} tokens",
                where=f"sequence {i}",
                do="give one per scored token",
            )
        where += [(i, first + j) for j in range(len(scores))]
        values += list(scores)
    found = torch.tensor(values, dtype=torch.float32)
    if not values or not torch.isfinite(found).all():
        raise QuadsError("rollout log-probs are empty or not finite", do="check the rollout's samples")
    return torch.tensor(where, dtype=torch.int64), found


@torch.no_grad()
def analyze(
    hf_in: str | Path,
    sequences: Sequence[Sequence[int]],
    rollout_logprobs: Sequence[Sequence[float]] | None,
    quads: QuadsConfig,
    out: str | Path,
    *,
    args: argparse.Namespace,
    rac: RacMetadata | None = None,
) -> Analysis:
    """Split the gap between the unquantised trainer and the rollout; every rank of an initialised job calls it.

    ``hf_in`` holds the trainer's master weights (plain HF checkpoint). ``rollout_logprobs`` as in ``align``, from an
    engine that holds these weights, with RAC if ``quads.rac``; None leaves out engine drift. ``rac`` is required when
    ``quads.rac``. Rank 0 prints the tables and writes ``analyze.json`` and ``analyze.png`` into the folder ``out``.
    Raises QuadsError on sequences that do not fit the model or the log-probs, or on expert tensor parallelism.
    """
    hf = read_model_config(hf_in)
    check_sequences(sequences, context=hf.max_position, vocab_size=hf.vocab_size, what="sequence")
    if parallel_state.get_expert_tensor_parallel_world_size() > 1:
        raise QuadsError("analyze needs whole experts", where="--expert-tensor-parallel-size", do="give 1")
    if quads.rac and rac is None:
        raise QuadsError("the recipe has RAC but no RAC metadata was given", do="calibrate, or analyze recipe qat")
    if rac is not None:
        rac.require_model(hf.shape, where=str(hf_in))
    unknown = rollout_logprobs is None
    where, rollout = align(sequences, rollout_logprobs or [[0.0] * (len(s) - 1) for s in sequences])
    batches = make_batches(sequences)
    mode = cast(ActivationScale, quads.activation_scale)

    chunks = build(args, hf, dataclasses.replace(quads, recipe="bf16"))
    load_hf(chunks, hf)
    raw = _score(chunks, batches, where, args)
    del chunks
    chunks = build(args, hf, dataclasses.replace(quads, recipe="qat"))
    load_hf(chunks, hf)
    errors = _LayerErrors(chunks, rac, mode)
    with observe_experts(chunks, errors):
        w4a16 = _score(chunks, batches, where, args)
    with emulate_activations(chunks, rac.without_blocks() if rac else None, activation_scale=mode):
        w4a4 = _score(chunks, batches, where, args)
    with_rac = None
    if rac is not None:
        with emulate_activations(chunks, rac, activation_scale=rac.activation_scale):
            with_rac = _score(chunks, batches, where, args)

    rows = split(raw, w4a16, w4a4, with_rac, None if unknown else rollout, rollout_has_rac=quads.rac)
    analysis = Analysis(len(where), rows, errors.rows(hf.num_layers, quads.quantized_layers(hf.num_layers)))
    if dist.get_rank() == 0:
        out = Path(out)
        atomic.make_folder(out)
        atomic.write_json(out / "analyze.json", analysis.to_dict())
        plot(analysis, out / "analyze.png")
        show(analysis)
    return analysis


def _score(chunks: list[nn.Module], batches: Sequence[Batch], where: Tensor, args: argparse.Namespace) -> Tensor:
    """Trainer log-probs at ``where`` [tokens], the same on every rank (all ranks run all batches)."""
    found: dict[int, Tensor] = {}
    for batch in batches:
        scores, _ = token_logprobs(chunks, batch.tokens, args)
        found |= dict(zip(batch.rows, scores.float().cpu(), strict=True))
    return torch.stack([found[i][j] for i, j in where.tolist()])


class _LayerErrors:
    """Observes the experts' inputs and accumulates squared output errors of each way of computing the expert."""

    def __init__(self, chunks: list[nn.Module], rac: RacMetadata | None, mode: ActivationScale) -> None:
        self.linears = {(e.layer, e.expert, e.kind): e for e in expert_linears(chunks)}
        self.rac, self.mode = rac, mode
        self.sums: dict[int, Tensor] = {}  # layer -> [reference, weight, activation, activation with RAC]

    def __call__(self, layer: int, expert: int, gemm: Gemm, x: Tensor) -> None:
        """Take gate_up's input x [tokens, hidden] and compute the expert four ways."""
        if gemm != "gate_up" or not x.numel():
            return
        fc1, fc2 = (self.linears[layer, expert, kind] for kind in ("fc1", "fc2"))
        masters = fc1.parameter, fc2.parameter
        weights = fc1.compute_weight().clone(), fc2.compute_weight()  # a value may live until the next is asked for
        selection = self.rac.layers.get(layer) if self.rac else None

        def quantise(x: Tensor, gemm: Gemm, with_rac: bool) -> Tensor:
            chosen = getattr(selection, gemm) if selection is not None else None
            blocks = torch.tensor(chosen.indices() if chosen and with_rac else [], dtype=torch.int64, device=x.device)
            top = chosen.static_amax if chosen else None
            return kernel.qdq_with_residual(x, activation_scale(x, self.mode, top), blocks)

        def run(pair: tuple[Tensor, Tensor], with_rac: bool | None = None) -> Tensor:
            gate, up = ((x if with_rac is None else quantise(x, "gate_up", with_rac)) @ pair[0].T).chunk(2, -1)
            inner = F.silu(gate) * up
            return (inner if with_rac is None else quantise(inner, "down", with_rac)) @ pair[1].T

        exact, plain = run(masters), run(weights)
        if plain.equal(exact):  # a layer kept unquantised
            return
        ways = [exact, plain - exact, run(weights, False) - plain, run(weights, True) - plain]
        sums = self.sums.setdefault(layer, torch.zeros(4, dtype=torch.float64))
        sums += torch.stack([w.double().square().sum() for w in ways]).cpu()

    def rows(self, num_layers: int, layers: Sequence[int]) -> list[LayerRow]:
        """Relative errors per quantised layer, over all ranks."""
        table = torch.zeros(num_layers, 4, dtype=torch.float64)
        for layer, sums in self.sums.items():
            table[layer] = sums
        all_reduce(table, dist.ReduceOp.SUM)
        rows = []
        for layer in layers:
            reference, weight, activation, with_rac = table[layer].sqrt().tolist()
            scale = reference or 1.0
            rows.append(LayerRow(layer, weight / scale, activation / scale, with_rac / scale if self.rac else None))
        return rows
