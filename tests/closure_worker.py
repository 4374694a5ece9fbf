"""One process of test_rac_closure.py: ``closure_worker.py OUT NAME=HF...``: mean gap that each calibrated checkpoint's
RAC leaves, against W4A4 without RAC, on held-out problems' answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from megatron_quads.checkpoint.hf import read_model_config
from megatron_quads.checkpoint.load import load_hf
from megatron_quads.config import QuadsConfig
from megatron_quads.rac.metadata import load_sidecar
from megatron_quads.rl.tasks import make_task
from megatron_quads.rl.tiny import DemoDefaults
from megatron_quads.rl.tokenizer import load_tokenizer
from megatron_quads.trainer import runtime
from megatron_quads.trainer.activations import emulate_activations
from megatron_quads.trainer.args import parse_args
from megatron_quads.trainer.logprobs import token_logprobs
from megatron_quads.trainer.model import build


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    d = DemoDefaults()
    for pair in sys.argv[2:]:
        name, folder = pair.split("=", 1)
        hf, quads = read_model_config(folder), QuadsConfig(recipe="quads")
        args = parse_args(["--quads-recipe", "quads", "--micro-batch-size", "64"], hf)
        runtime.initialize(args)
        chunks = build(args, hf, quads)
        load_hf(chunks, hf)
        tokenizer = load_tokenizer(hf.path)
        rows, starts = [], []
        for problem in make_task(d.task, d.task_config).heldout(256):
            prompt = tokenizer.encode(problem.prompt_text)
            rows.append([*prompt, *tokenizer.encode(problem.answer), tokenizer.eos_token_id])
            starts.append(len(prompt) - 1)
        tokens = torch.full((len(rows), max(map(len, rows))), tokenizer.pad_token_id)
        mask = torch.zeros(len(rows), tokens.shape[1] - 1, dtype=torch.bool)
        for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
            tokens[i, : len(row)] = torch.tensor(row)
            mask[i, start : len(row) - 1] = True
        exact, _ = token_logprobs(chunks, tokens, args)
        found["tokens"] = int(mask.sum())
        for label, rac in (("w4a4 of " + name, None), (name, load_sidecar(folder))):
            with emulate_activations(chunks, rac):
                quantised, _ = token_logprobs(chunks, tokens, args)
            found[label] = (quantised - exact).abs()[mask].mean().item()
    Path(sys.argv[1]).write_text(json.dumps(found))
    runtime.shutdown()


if __name__ == "__main__":
    main()
