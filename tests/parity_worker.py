"""One rank of test_parity.py: ``parity_worker.py HF OUT RATIO EP``; rank 0 also holds the vLLM engine.

Megatron (EP = number of ranks, W4A16, fp32) scores what vLLM sampled with W4A16, W4A4 and RAC from the same weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_quads.checkpoint.export import export_hf
from megatron_quads.checkpoint.hf import read_model_config
from megatron_quads.checkpoint.load import load_hf
from megatron_quads.config import QuadsConfig
from megatron_quads.rac.metadata import GemmSelection, LayerSelection, RacMetadata
from megatron_quads.rl.ranks import share
from megatron_quads.rollout.client import LocalRollout
from megatron_quads.trainer import runtime
from megatron_quads.trainer.args import parse_args
from megatron_quads.trainer.logprobs import token_logprobs
from megatron_quads.trainer.model import build
from megatron_quads.trainer.routes import record_routes

PROMPT, NEW = 8, 32


def metadata(shape: Any, ratio: float) -> RacMetadata:
    """The leading ``ratio`` of the blocks of every GEMM."""
    gate_up = GemmSelection(blocks=list(range(round(ratio * shape.hidden_size / 16))))
    down = GemmSelection(prefix=round(ratio * shape.moe_intermediate_size / 16))
    layers = {i: LayerSelection(gate_up=gate_up, down=down) for i in range(shape.num_layers)}
    return RacMetadata(
        model=shape, activation_scale="token", policy="uniform", ratio=ratio, sorted=False, layers=layers
    )


def main() -> None:
    torch.set_num_threads(1)
    hf, out, ratio = read_model_config(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    quads = QuadsConfig(recipe="quads", rac_ratio=ratio)
    args = parse_args(["--quads-recipe", "quads", "--expert-model-parallel-size", sys.argv[4]], hf)
    runtime.initialize(args)
    chunks = build(args, hf, quads)
    load_hf(chunks, hf)
    export_hf(chunks, hf, quads, out / "export", rac=metadata(hf.shape, ratio), dtype=torch.float32)
    prompts = torch.randint(3, hf.vocab_size, (80, PROMPT), generator=torch.Generator().manual_seed(0))
    engine, found = None, {}
    if dist.get_rank() == 0:
        engine = LocalRollout(out / "export", dtype="float32", max_model_len=64, log=out / "rollout.log")
        engine.assert_active()
    for mode in ("w4a16", "w4a4", "rac"):
        sampled: Any = None
        if engine is not None:
            engine.set_activation(mode)
            groups = engine.generate(prompts.tolist(), n=1, max_tokens=NEW, temperature=1.0, seed=1)
            whole = [(i, g[0]) for i, g in enumerate(groups) if len(g[0].token_ids) == NEW]  # no early EOS
            sampled = [(prompts[i].tolist(), s.token_ids, s.logprobs) for i, s in whole]
        sampled = share(sampled)
        tokens = torch.tensor([prompt + ids for prompt, ids, _ in sampled])
        with record_routes(chunks) as routes:
            mine, _ = token_logprobs(chunks, tokens, args)
        gap = (mine[:, PROMPT - 1 :] - torch.tensor([lp for _, _, lp in sampled])).abs()
        row = {"tokens": gap.numel(), "mean": gap.mean().item(), "max": gap.max().item()}
        if engine is not None and mode == "w4a16":
            theirs = torch.stack(engine.record_routes(tokens.tolist())).sort(-1).values  # [b, layers, s, k]
            ours = torch.stack([routes.layer(i) for i in range(hf.num_layers)], 1).sort(-1).values
            row["routing_differs"] = (theirs != ours).any(-1).nonzero().tolist()
        found[mode] = row
    if engine is not None:
        engine.close()
        (out / "result.json").write_text(json.dumps(found))
    dist.barrier()
    runtime.shutdown()


if __name__ == "__main__":
    main()
