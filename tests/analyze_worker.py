"""One rank of test_analyze.py: ``analyze_worker.py HF OUT EP``. Rank 0 writes OUT/analyze.{json,png}."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from megatron_quads.checkpoint.hf import read_model_config
from megatron_quads.checkpoint.load import load_hf
from megatron_quads.config import QuadsConfig
from megatron_quads.proof.analyze import analyze
from megatron_quads.rac import select
from megatron_quads.trainer import runtime
from megatron_quads.trainer.activations import emulate_activations
from megatron_quads.trainer.args import parse_args
from megatron_quads.trainer.logprobs import token_logprobs
from megatron_quads.trainer.model import build

DRIFT = 1e-3


def main(hf_path: Path, out: Path, ep: int) -> None:
    """The rollout here is the emulation plus a known drift of +-1e-3, so the split must find exactly that drift."""
    hf = read_model_config(hf_path)
    args = parse_args(["--expert-model-parallel-size", str(ep)], hf)
    runtime.initialize(args)
    quads = QuadsConfig(recipe="quads")
    units = {(layer, gemm): n for layer in range(hf.num_layers) for gemm, n in select.num_blocks(hf.shape).items()}
    rac = select.build_metadata(
        hf.shape,
        select.uniform(units, 0.5),
        {unit: torch.arange(n, 0, -1.0) for unit, n in units.items()},
        ratio=0.5,
        policy="uniform",
        activation_scale="token",
        is_sorted=False,
    )
    tokens = torch.randint(4, 500, (6, 24), generator=torch.Generator().manual_seed(0))
    chunks = build(args, hf, quads)
    load_hf(chunks, hf)
    with emulate_activations(chunks, rac):
        scores = token_logprobs(chunks, tokens, args)[0]
    scores += DRIFT * (torch.arange(scores.numel()).view_as(scores) % 2 * 2 - 1)
    responses = [row[-(5 + i) :].tolist() for i, row in enumerate(scores)]  # only the last tokens were sampled
    analyze(hf_path, tokens.tolist(), responses, quads, out, args=args, rac=rac)
    runtime.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
