"""The study's measurements inside the trainer: emulated rollouts at every ratio, and drift through quantised experts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import atomic, jobs
from ..checkpoint.hf import read_model_config
from ..checkpoint.load import load_hf
from ..kernels.rac import reference as kernel
from ..proof.analyze import align
from ..proof.analyze_report import Row
from ..rac.batches import Batch, make_batches
from ..rac.metadata import RacMetadata, required_rac
from ..rac.select import Gemm, flops_of
from ..rac.statistics import activation_scale
from ..trainer.activations import emulate_activations, observe_experts
from ..trainer.experts import expert_linears
from ..trainer.logprobs import token_logprobs
from ..trainer.model import build

WAYS = ("engines alone", "symmetric", "asymmetric", "asymmetric, RAC", "symmetric, RAC")


@torch.no_grad()
def study_job(job: jobs.Job) -> None:
    """One rank: score the sampled tokens raw, W4A16, W4A4 and with RAC of every base; then the drift table."""
    s = job.settings
    args, hf, quads = jobs.start(job, s["warm"])
    data = json.loads(Path(s["samples"]).read_text())
    sequences = data["sequences"]
    where, _ = align(sequences, data["logprobs"])
    batches = make_batches(sequences)

    def score(chunks: list[nn.Module]) -> Tensor:
        found: dict[int, Tensor] = {}
        for batch in batches:
            values, _ = token_logprobs(chunks, batch.tokens, args)
            found |= dict(zip(batch.rows, values.float().cpu(), strict=True))
        return torch.stack([found[i][j] for i, j in where.tolist()])

    chunks = build(args, hf, dataclasses.replace(quads, recipe="bf16"))
    load_hf(chunks, hf)
    raw = score(chunks)
    del chunks
    chunks = build(args, hf, dataclasses.replace(quads, recipe="qat"))
    load_hf(chunks, hf)
    plain = score(chunks)
    with emulate_activations(chunks, None, activation_scale="token"):
        w4a4 = score(chunks)
    rows = [_row("naive", 0.0, "uniform", False, raw, w4a4), _row("qat", 0.0, "uniform", False, plain, w4a4)]
    for base in s["bases"]:
        at = read_model_config(base["folder"])
        load_hf(chunks, at)
        rac = required_rac(dataclasses.replace(quads, recipe="quads", rac_ratio=base["ratio"]), at)
        trained = score(chunks)
        with emulate_activations(chunks, rac, activation_scale="token"):
            row = _row("quads", base["ratio"], base["policy"], base["sorted"], trained, score(chunks))
        rows.append({**row, "flop_share": flops_of(rac) if rac is not None else 0.0})
    at = read_model_config(s["ours"])
    load_hf(chunks, at)
    rac = required_rac(dataclasses.replace(quads, recipe="quads"), at)
    assert rac is not None, "recipe quads has RAC"
    layers = [row for size in s["drifts"] for row in _drift(chunks, batches, rac, size, s["seed"], args)]
    atomic.write_json(s["out"], {"tokens": len(where), "ratios": rows, "drift": layers})


def _row(recipe: str, ratio: float, policy: str, is_sorted: bool, trainer: Tensor, rollout: Tensor) -> dict[str, Any]:
    found = Row.of("", "", trainer, rollout)
    gap = {"mean": found.mean, "max": found.max, "p99.9": found.p999}
    return {"recipe": recipe, "ratio": ratio, "policy": policy, "sorted": is_sorted, **gap}


class DriftErrors:
    """Observes experts' inputs x; how far trainer and rollout are apart when the rollout's input is x (1 + noise).

    Relative to the W4A16 output, per layer, on equal weights: ``WAYS[0]`` neither side quantises activations,
    "symmetric" both do, "asymmetric" the rollout only. Both GEMMs are quantised, with a scale per token.
    """

    def __init__(self, chunks: list[nn.Module], rac: RacMetadata, size: float, seed: int) -> None:
        self.linears = {(e.layer, e.expert, e.kind): e for e in expert_linears(chunks)}
        self.rac, self.size = rac, size
        self.generator = torch.Generator().manual_seed(seed)
        self.sums: dict[int, Tensor] = {}  # layer -> squared norms: reference, then WAYS

    def __call__(self, layer: int, expert: int, gemm: Gemm, x: Tensor) -> None:
        """Take gate_up's input [tokens, hidden]; the expert is computed in fp32."""
        selection = self.rac.layers.get(layer)
        if gemm != "gate_up" or not x.numel() or selection is None:
            return
        fc1, fc2 = (self.linears[layer, expert, kind] for kind in ("fc1", "fc2"))
        w1 = fc1.compute_weight().float().clone()  # a value may live until the next is asked for
        w2 = fc2.compute_weight().float()

        def quantise(x: Tensor, gemm: Gemm, way: str) -> Tensor:
            if way == "plain":
                return x
            chosen = getattr(selection, gemm).indices() if way == "rac" else []
            blocks = torch.tensor(chosen, dtype=torch.int64, device=x.device)
            return kernel.qdq_with_residual(x, activation_scale(x, "token", None), blocks)

        def run(x: Tensor, way: str) -> Tensor:
            gate, up = (quantise(x, "gate_up", way) @ w1.T).chunk(2, -1)
            return quantise(F.silu(gate) * up, "down", way) @ w2.T

        x = x.float()
        noise = torch.randn(x.shape, generator=self.generator).to(x.device)
        moved = x * (1 + self.size * noise)
        here = {way: run(x, way) for way in ("plain", "w4a4", "rac")}
        there = {way: run(moved, way) for way in ("plain", "w4a4", "rac")}
        pairs = (("plain", "plain"), ("w4a4", "w4a4"), ("plain", "w4a4"), ("plain", "rac"), ("rac", "rac"))
        apart = [here["plain"], *(here[a] - there[b] for a, b in pairs)]
        sums = self.sums.setdefault(layer, torch.zeros(len(apart), dtype=torch.float64))
        sums += torch.stack([v.double().square().sum() for v in apart]).cpu()

    def rows(self) -> list[dict[str, Any]]:
        """One row a layer: relative error of each way."""
        out = []
        for layer, sums in sorted(self.sums.items()):
            reference, *ways = sums.sqrt().tolist()
            errors = {name: value / (reference or 1.0) for name, value in zip(WAYS, ways, strict=True)}
            out.append({"layer": layer, "drift": self.size, **errors})
        return out


def _drift(
    chunks: list[nn.Module], batches: Sequence[Batch], rac: RacMetadata, size: float, seed: int, args: Any
) -> list[dict[str, Any]]:
    errors = DriftErrors(chunks, rac, size, seed)
    with observe_experts(chunks, errors):
        for batch in batches:
            token_logprobs(chunks, batch.tokens, args)
    return errors.rows()
