"""One rank of the trainer tests: ``trainer_worker.py MODE FOLDER [MEGATRON FLAGS]``. Each rank writes into FOLDER."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_quads.checkpoint.hf import HFModel, read_model_config
from megatron_quads.checkpoint.load import load_hf
from megatron_quads.config import QuadsConfig
from megatron_quads.errors import QuadsError
from megatron_quads.kernels.nvfp4 import reference as nvfp4
from megatron_quads.kernels.rac import reference as rac_reference
from megatron_quads.patches import registry
from megatron_quads.rac.metadata import GemmSelection, LayerSelection, RacMetadata
from megatron_quads.trainer import runtime
from megatron_quads.trainer.activations import emulate_activations, observe_experts, swiglu
from megatron_quads.trainer.args import parse_args
from megatron_quads.trainer.experts import expert_linears, frozen_weights, require_match
from megatron_quads.trainer.logprobs import token_logprobs
from megatron_quads.trainer.model import build
from megatron_quads.trainer.trainer import Trainer

ROWS, LENGTH = 8, 21


def tokens(seed: int = 0) -> Tensor:
    """A global batch."""
    return torch.randint(4, 500, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def batch(seed: int = 0) -> dict[str, Tensor]:
    """Tokens and a mask with a different number of ones per row, so that ranks hold different numbers of tokens."""
    return {"tokens": tokens(seed), "mask": torch.arange(LENGTH - 1).expand(ROWS, -1) >= torch.arange(ROWS)[:, None]}


def loss(logprobs: Tensor, entropy: Tensor, part: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of masked tokens."""
    mask = part["mask"]
    sums = {"tokens": mask.sum(), "entropy": (entropy * mask).sum(), "lp_max": logprobs.max(), "rows": mask[:, 0].sum()}
    return -(logprobs * mask).sum(), {**sums, "ones": mask.sum()}


def rac(hf: HFModel, blocks: int) -> RacMetadata:
    """RAC with ``blocks`` 16-blocks of each GEMM, the last ones (so that shards get different numbers of them)."""

    def pick(k: int) -> GemmSelection:
        return GemmSelection(blocks=list(range(k // 16))[-blocks:] if blocks else [])

    layer = LayerSelection(gate_up=pick(hf.hidden_size), down=pick(hf.moe_intermediate_size))
    return RacMetadata(
        model=hf.shape, activation_scale="token", policy="uniform", ratio=0.5, sorted=False, layers={0: layer, 1: layer}
    )


def global_name(name: str) -> str:
    """Parameter name with global layer and expert indices."""
    first_layer = parallel_state.get_pipeline_model_parallel_rank() * (
        2 // parallel_state.get_pipeline_model_parallel_world_size()
    )
    first = parallel_state.get_expert_model_parallel_rank() * (
        8 // parallel_state.get_expert_model_parallel_world_size()
    )
    name = re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) + first_layer}", name)
    return re.sub(r"local_experts\.(\d+)", lambda m: f"experts.{int(m[1]) + first}", name)


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Final gradients after a step without clipping and without a distributed optimizer."""
    [model] = unwrap_model(trainer.chunks)
    return {global_name(n): p.main_grad.clone() for n, p in model.named_parameters()}


def layout(folder: Path, argv: list[str]) -> None:
    """Forward, gradients, weights, activations and routes of one parallel layout."""
    hf, plain_hf = read_model_config(folder / "hf"), read_model_config(folder / "hf_qdq")
    args = parse_args(
        ["--clip-grad", "0", "--lr", "0", "--no-distributed-optimizer", "--micro-batch-size", "4", *argv], hf
    )
    runtime.initialize(args)
    out: dict[str, Any] = {}
    for name, source, recipe in (("qat", hf, "qat"), ("plain", plain_hf, "bf16"), ("symmetric", hf, "symmetric")):
        trainer = Trainer(args, source, QuadsConfig(recipe=recipe))
        out[f"{name}_logprobs"], out[f"{name}_entropy"] = trainer.logprobs(tokens())
        out[f"{name}_metrics"] = trainer.step(batch(), loss)
        out[f"{name}_grads"] = gradients(trainer)
        if recipe == "qat":
            qat = trainer
    out["weights"] = {
        (x.layer, x.expert, x.kind): x.module.compute_weight().clone() for x in expert_linears(qat.chunks)
    }
    with frozen_weights(qat.chunks):
        out["frozen_equal"] = all(
            x.module.compute_weight().equal(out["weights"][x.layer, x.expert, x.kind])
            for x in expert_linears(qat.chunks)
        )
        out["frozen_once"] = all(
            x.module.compute_weight() is x.module.compute_weight() for x in expert_linears(qat.chunks)
        )
    for blocks in (None, 0, 2, 4):
        with emulate_activations(qat.chunks, None if blocks is None else rac(hf, blocks)):
            out[f"rac_{blocks}"] = qat.logprobs(tokens())[0]
    with qat.record_routes() as routes:
        qat.logprobs(tokens())
    out["routes"] = {layer: routes.layer(layer) for layer in routes.by_layer}
    out["rows"] = qat.dp_slice(ROWS)
    seen: dict[tuple, Tensor] = {}
    with observe_experts(
        qat.chunks, lambda layer, e, g, x: seen.__setitem__((layer, e, g), x.double().square().sum(0))
    ):
        token_logprobs(qat.chunks, tokens()[qat.dp_slice(ROWS)][:4], args)
    out["observed"] = seen
    out["mismatch"] = fault(
        lambda: require_match(build(args, hf, one_layer := QuadsConfig(keep_first_layers=1)), one_layer)
    )
    torch.save(out, folder / f"{dist.get_rank()}.pt")
    runtime.shutdown()


def fault(call: Any) -> str:
    """The QuadsError's text, or an empty string."""
    try:
        call()
    except QuadsError as e:
        return str(e)
    return ""


def expert(folder: Path, argv: list[str]) -> None:
    """One expert under emulated activations against the formula written out, value and gradient."""
    hf = read_model_config(folder / "hf")
    args = parse_args(argv, hf)
    runtime.initialize(args)
    quads = QuadsConfig(recipe="qat")
    chunks = build(args, hf, quads)
    load_hf(chunks, hf)
    fc1, fc2 = (x.module for x in expert_linears(chunks)[:2])
    mlp = unwrap_model(chunks)[0].decoder.layers[0].mlp.experts.local_experts[0]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, hf.hidden_size, generator=generator) * torch.logspace(-2, 2, 7)[:, None]
    p = torch.rand(7, generator=generator)
    blocks = torch.tensor(rac(hf, 2).layers[0].down.indices()), torch.tensor(rac(hf, 2).layers[0].gate_up.indices())

    mode: Any = "token"

    def through(value: Tensor, which: Tensor) -> Tensor:
        scale = nvfp4.row_scale(value) if mode == "token" else nvfp4.tensor_scale(nvfp4.amax(value))
        quantised = rac_reference.qdq_with_residual(value.detach(), scale, which)
        return value + (quantised - value).detach()  # same gradient; the value only up to rounding

    def formula(x: Tensor, *, probability_first: bool = False) -> Tensor:
        h = swiglu(through(x, blocks[1]) @ fc1.compute_weight().T)
        h = through(h * p[:, None], blocks[0]) if probability_first else through(h, blocks[0]) * p[:, None]
        return h @ fc2.compute_weight().T

    def run(f: Any) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        y = f(leaf)
        (y.square().sum()).backward()
        assert leaf.grad is not None
        return y.detach(), leaf.grad

    result: dict[str, Any] = {"plain": mlp(x, p)[0].detach()}
    for mode in ("token", "tensor"):
        with emulate_activations(chunks, rac(hf, 2), activation_scale=mode):
            emulated = run(lambda v: mlp(v, p)[0])
        result[mode] = {
            "emulated": emulated,
            "formula": run(formula),
            "probability_first": run(lambda v: formula(v, probability_first=True)),
        }
    for name, unit in (("down_only", (0, "down")), ("other_layer", (1, "down"))):
        with emulate_activations(chunks, rac(hf, 2), units={unit}):  # type: ignore[arg-type]
            result[name] = mlp(x, p)[0].detach()
    torch.save(result, folder / "expert.pt")
    runtime.shutdown()


def resume(folder: Path, argv: list[str]) -> None:
    """Train, save, train on; load into a fresh trainer and train on alike."""
    hf = read_model_config(folder / "hf")
    args = parse_args(["--lr", "1e-3", "--lr-warmup-iters", "3", "--bf16", *argv], hf)
    runtime.initialize(args)
    quads = QuadsConfig(recipe="qat")
    target = folder / "checkpoint"
    result: dict[str, Any] = {}
    first = Trainer(args, hf, quads)
    if dist.get_world_size() > 1:
        first.save(target, {"untrained": True})
        assert Trainer(args, hf, quads).load(target) == {"untrained": True}
        for i in range(2):
            first.step(batch(i), loss)
        first.save(target, {"note": "after two"})
        draw = torch.rand(3)
        result["failed_save"] = fault_of_any(lambda: first.save(target, {"bad": object()}))
        result["kept"] = json.loads((target / "COMMITTED.json").read_text())
        straight = [first.step(batch(i), loss) for i in range(2, 5)]
        second = Trainer(args, hf, quads)
        result["extra"] = second.load(target)
        result["same_draw"] = torch.rand(3).equal(draw)
        resumed = [second.step(batch(i), loss) for i in range(2, 5)]
        result |= {"straight": straight, "resumed": resumed}
        result["iteration"] = second.iteration
        result["state_equal"] = same_state(first, second)
        third = Trainer(args, hf, quads)
        third.load(target)
    else:
        result["missing"] = fault(lambda: first.load(folder / "nothing"))
        third = first
        third.load(target)
        third.save(folder / "from_one", {})
    result["iteration_loaded"] = third.iteration
    result["logprobs"] = third.logprobs(tokens(9))[0].tolist()
    result["next"] = third.step(batch(2), loss)
    (folder / f"resume-{dist.get_world_size()}-{dist.get_rank()}.json").write_text(json.dumps(result))
    runtime.shutdown()


def reshard(folder: Path, argv: list[str]) -> None:
    """Load what another layout saved and take one step."""
    hf = read_model_config(folder / "hf")
    args = parse_args(["--lr", "1e-3", "--lr-warmup-iters", "3", "--bf16", *argv], hf)
    runtime.initialize(args)
    trainer = Trainer(args, hf, QuadsConfig(recipe="qat"))
    trainer.load(folder / "from_one")
    result = {"iteration_loaded": trainer.iteration, "next": trainer.step(batch(2), loss)}
    (folder / f"reshard-{dist.get_rank()}.json").write_text(json.dumps(result))
    runtime.shutdown()


def fault_of_any(call: Any) -> str:
    """The error's text; rank 0 fails with its own kind."""
    try:
        call()
    except (QuadsError, TypeError) as e:
        return f"{type(e).__name__}: {e}"
    return ""


def same_state(a: Trainer, b: Trainer) -> bool:
    """Parameters, fp32 masters, moments and steps, bit for bit; there must be some."""
    flat = []
    for t in (a, b):
        values = [p.detach() for c in t.chunks for p in c.parameters()]
        for part in t.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                for p in group["params"]:
                    s = part.optimizer.state[p]
                    values += [p.detach(), s["exp_avg"], s["exp_avg_sq"], s["step"]]
        flat.append(values)
    assert len(flat[0]) > 100 and {int(v) for v in flat[0] if v.ndim == 0} == {5}
    return len(flat[0]) == len(flat[1]) and all(x.equal(y) for x, y in zip(*flat, strict=True))


def patches(folder: Path, argv: list[str]) -> None:
    """Apply every registered patch twice."""
    every = runtime.required_patches()
    before = {s.target: s.applied for s in registry.status(every)}
    registry.apply(every)
    objects = [registry._locate(p)[2] for p in every]
    registry.apply(every)
    result = {
        "before": before,
        "after": {s.target: s.applied for s in registry.status(every)},
        "same_objects": all(a is registry._locate(p)[2] for a, p in zip(objects, every, strict=True)),
        "device": str(torch.cuda.current_device()),
    }
    (folder / "patches.json").write_text(json.dumps(result))


MODES = {"layout": layout, "expert": expert, "resume": resume, "reshard": reshard, "patches": patches}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("folder", type=Path)
    known, rest = parser.parse_known_args(sys.argv[1:])
    MODES[known.mode](known.folder, rest)
