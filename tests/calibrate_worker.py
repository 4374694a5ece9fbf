"""One rank of test_rac_calibrate.py: ``calibrate_worker.py HF OUT EP``. Rank 0 writes OUT/result.json."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_quads.checkpoint.hf import read_model_config
from megatron_quads.checkpoint.load import load_hf
from megatron_quads.config import QuadsConfig
from megatron_quads.errors import QuadsError
from megatron_quads.rac.calibrate import calibrate
from megatron_quads.rac.metadata import RacMetadata, load_sidecar
from megatron_quads.trainer import runtime
from megatron_quads.trainer.activations import emulate_activations
from megatron_quads.trainer.args import parse_args
from megatron_quads.trainer.logprobs import token_logprobs
from megatron_quads.trainer.model import build

SORTED = QuadsConfig(recipe="quads", rac_ratio=0.5, rac_policy="adaptive", rac_sort=True)
PLAIN = QuadsConfig(recipe="quads", rac_ratio=0.5, rac_policy="uniform", rac_sort=False, activation_scale="static")


def prompts(n: int, seed: int) -> list[list[int]]:
    """Sequences of three lengths from a sharply skewed distribution, so that some experts are rarely reached."""
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.rand(length, generator=g).pow(4) * 496 + 4).long().tolist() for length in [12, 20, 33] for _ in range(n)
    ]


def main(hf_path: Path, out: Path, ep: int) -> None:
    """Calibrate two ways, compare gaps, try bad input."""
    hf = read_model_config(hf_path)
    args = parse_args(["--expert-model-parallel-size", str(ep)], hf)
    runtime.initialize(args)
    result: dict = {"reports": {}, "errors": {}}
    calibration = prompts(3, seed=1)
    for name, quads in (("sorted", SORTED), ("plain", PLAIN)):
        report = calibrate(hf_path, calibration, quads, out / name, args=args, max_batch_tokens=40)
        result["reports"][name] = report.to_dict()
    if ep == 1:
        off = dataclasses.replace(SORTED, rac_ratio=0.0)
        result["reports"]["off"] = calibrate(hf_path, calibration, off, out / "off", args=args).to_dict()
        for name, bad, quads in (
            ("none", [], SORTED),
            ("long", [[5] * (hf.max_position + 1)], SORTED),
            ("bf16", calibration, QuadsConfig(recipe="bf16")),
            ("small", calibration, dataclasses.replace(SORTED, rac_ratio=0.01, rac_policy="uniform")),
        ):
            try:
                calibrate(hf_path, bad, quads, out / "bad", args=args)
            except QuadsError as e:
                result["errors"][name] = str(e)
        result["gaps"] = gaps(hf_path, out, args)
    if parallel_state.get_data_parallel_rank() == 0 and dist.get_rank() == 0:
        (out / "result.json").write_text(json.dumps(result))
    runtime.shutdown()


def gaps(hf_path: Path, out: Path, args) -> dict[str, list[float]]:
    """Mean and max |log-prob difference| between the W4A16 and the emulated model, and of sorting alone."""
    tokens = torch.tensor(prompts(16, seed=2)[-16:])
    scored: dict[str, torch.Tensor] = {}

    def score(folder: Path, recipe: str, rac: RacMetadata | None = None, *, quantise: bool = False) -> torch.Tensor:
        hf = read_model_config(folder)
        chunks = build(args, hf, QuadsConfig(recipe=recipe))
        load_hf(chunks, hf)
        if not quantise:
            return token_logprobs(chunks, tokens, args)[0]
        with emulate_activations(chunks, rac, activation_scale="token"):
            return token_logprobs(chunks, tokens, args)[0]

    with torch.no_grad():
        scored["original"], scored["reordered"] = score(hf_path, "bf16"), score(out / "sorted", "bf16")
        table = {"sort": difference(scored["original"], scored["reordered"])}
        for name in ("plain", "sorted"):
            reference = score(out / name, "qat")
            rac = load_sidecar(out / name)
            table[f"{name} none"] = difference(reference, score(out / name, "qat", quantise=True))
            table[f"{name} rac"] = difference(reference, score(out / name, "qat", rac, quantise=True))
    return table


def difference(a: torch.Tensor, b: torch.Tensor) -> list[float]:
    """[mean, max] of |a - b|."""
    return [float((a - b).abs().mean()), float((a - b).abs().max())]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
