"""One rank of the tests of ``megatron_quads.te`` on Megatron's own layers: ``te_worker.py MODE FOLDER [FLAGS]``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.utils import unwrap_model
from packaging.version import Version
from trainer_worker import batch, loss, tokens

from megatron_quads import recipe
from megatron_quads.checkpoint.gather import iter_hf_tensors
from megatron_quads.checkpoint.hf import read_model_config
from megatron_quads.config import QuadsConfig
from megatron_quads.digest import tensor_digest
from megatron_quads.errors import QuadsError
from megatron_quads.patches import megatron_cpu, megatron_te, registry
from megatron_quads.rl.held import is_expert
from megatron_quads.te import arguments, single
from megatron_quads.te.experts import expert_gemms
from megatron_quads.te.install import Installed, compute_weight, install
from megatron_quads.trainer import runtime
from megatron_quads.trainer.args import parse_args
from megatron_quads.trainer.trainer import Trainer


def fault(call: Any) -> str:
    """The one line of a QuadsError, empty without one."""
    try:
        call()
    except QuadsError as e:
        assert e.exit_code == 2 and "\n" not in str(e)
        return str(e)
    return ""


def counts(done: Installed) -> list[int]:
    return sorted({g.quantized for g in done.groups})


def same(a: Trainer, b: Trainer) -> bool:
    """Parameters of two trainers, bit for bit; some."""
    pairs = [list(c.parameters()) for t in (a, b) for c in t.chunks]
    return len(pairs[0]) > 20 and all(x.equal(y) for x, y in zip(*pairs, strict=True))


def layout(folder: Path, argv: list[str]) -> None:
    """A plain model with the recipe installed against the trainer whose spec has quantising layers."""
    hf = read_model_config(folder / "hf")
    args = parse_args(["--lr", "1e-3", "--micro-batch-size", "2", *argv], hf)
    runtime.initialize(args)
    quads = QuadsConfig(recipe="qat", keep_first_layers=0)
    out: dict[str, Any] = {}
    reference, plain = Trainer(args, hf, quads), Trainer(args, hf, QuadsConfig(recipe="bf16"))
    raw = plain.logprobs(tokens())[0]
    with mock.patch.object(arguments, "te_version", lambda: Version(f"2.{14 + dist.get_rank()}")):
        out["mixed"] = fault(lambda: install(plain.chunks, quads)) if dist.get_world_size() > 1 else ""
    done = install(plain.chunks, quads)
    out["modules"], out["weights"], out["groups"] = done.modules, done.weights, len(done.groups)
    out["differs_from_raw"] = not plain.logprobs(tokens())[0].equal(raw)
    out["logprobs"] = plain.logprobs(tokens())[0].equal(reference.logprobs(tokens())[0])
    out["counts"] = [counts(done)]
    steps = []
    for i in range(3):
        a, b = reference.step(batch(i), loss), plain.step(batch(i), loss)
        steps.append(a == b and same(reference, plain))
        out["counts"].append(counts(done))
        plain.logprobs(tokens())
    out["steps"] = steps
    invalidated = [g.quantized for g in done.groups]
    out["alone"] = []
    for i in range(3):  # no other optimizer steps in this process now
        plain.step(batch(i), loss)
        plain.logprobs(tokens())
        plain.logprobs(tokens(1))
        out["alone"].append(sorted({g.quantized - n for g, n in zip(done.groups, invalidated, strict=True)}))
    for i in range(3):
        reference.step(batch(i), loss)
    out["values"] = sorted(
        n for n, w in iter_hf_tensors(plain.chunks, hf, weights="compute")
        if not w.equal(dict(iter_hf_tensors(reference.chunks, hf, weights="compute"))[n])
    ) if dist.get_world_size() == 1 else []  # fmt: skip
    plain.save(folder / "checkpoint", {})
    bf16 = Trainer(args, hf, QuadsConfig(recipe="bf16"), load_weights=False)
    bf16.load(folder / "checkpoint")
    out["bf16_loads"] = same(bf16, plain)
    back = Trainer(args, hf, QuadsConfig(recipe="bf16"), load_weights=False)
    before = install(back.chunks, quads)
    back.logprobs(tokens())
    back.load(folder / "checkpoint")
    out["resumed"] = back.logprobs(tokens())[0].equal(plain.logprobs(tokens())[0])
    out["resumed_counts"] = counts(before)
    out["resumed_step"] = back.step(batch(7), loss) == plain.step(batch(7), loss)
    wanted = back_grad_norm(folder, args, hf, quads)
    for cache in ("packed", "transient"):
        lean = Trainer(args, hf, QuadsConfig(recipe="bf16"), load_weights=False)
        groups = install(lean.chunks, quads, cache=cache, debug=True).groups  # type: ignore[arg-type]
        lean.load(folder / "checkpoint")
        out[f"{cache}_step"] = lean.step(batch(7), loss)["grad_norm"] == wanted
        out[f"{cache}_bytes"] = sum(g.nbytes for g in groups)
    out["copy_bytes"] = sum(g.nbytes for g in done.groups)
    out["expert_bytes"] = sum(p.numel() * p.element_size() for g in done.groups for p in g.params)
    (folder / f"layout-{dist.get_rank()}.json").write_text(json.dumps(out))
    runtime.shutdown()


def back_grad_norm(folder: Path, args: argparse.Namespace, hf: Any, quads: QuadsConfig) -> float:
    """Of step 7 by the trainer with quantising layers, from the same checkpoint."""
    trainer = Trainer(args, hf, quads, load_weights=False)
    trainer.load(folder / "checkpoint")
    return trainer.step(batch(7), loss)["grad_norm"]


def faults(folder: Path, argv: list[str]) -> None:
    """What ``install`` refuses, and what the debug mode and the checks of values find."""
    hf = read_model_config(folder / "hf")
    args = parse_args(["--lr", "1e-3", *argv], hf)
    runtime.initialize(args)

    def plain() -> Trainer:
        return Trainer(args, hf, QuadsConfig(recipe="bf16"))

    out: dict[str, Any] = {}
    out["none"] = fault(lambda: install(plain().chunks, QuadsConfig(recipe="qat", module_pattern="no.such.*")))
    out["scale"] = fault(lambda: install(plain().chunks, QuadsConfig(recipe="symmetric", activation_scale="tensor")))
    out["recipe_hook"] = fault(lambda: install(plain().chunks, QuadsConfig(recipe="qat"), hook="recipe"))
    config_fault = plain()
    unwrap_model(config_fault.chunks)[0].config.delay_wgrad_compute = True
    out["delay_wgrad"] = fault(lambda: install(config_fault.chunks, QuadsConfig(recipe="qat")))

    out.update(output_layer(unwrap_model(config_fault.chunks)[0].config))

    trainer = plain()
    scoped = install(trainer.chunks, QuadsConfig(recipe="qat", keep_first_layers=1))
    out["scoped"] = sorted({n.split(".")[1] for g in scoped.groups for n in g.names})

    trainer = plain()
    install(trainer.chunks, QuadsConfig(recipe="qat"), debug=True)
    first = trainer.logprobs(tokens())[0]
    assert trainer.logprobs(tokens())[0].equal(first)
    weight = expert_gemms(trainer.chunks)[0].modules[3].weight
    weight.data.mul_(1.0625)  # no version counter sees this
    out["stale"] = fault(lambda: trainer.logprobs(tokens()))
    recipe.invalidate(trainer.chunks)
    out["fresh_differs"] = not trainer.logprobs(tokens())[0].equal(first)
    with torch.no_grad():
        weight.mul_(2)  # seen
    out["in_place_seen"] = fault(lambda: trainer.logprobs(tokens()))
    with torch.no_grad():
        weight[3, 5] = float("nan")
    out["nan"] = fault(lambda: trainer.logprobs(tokens()))
    with torch.no_grad():
        weight[3, 5] = 0.0

    symmetric, reference = plain(), Trainer(args, hf, QuadsConfig(recipe="symmetric"))
    install(symmetric.chunks, QuadsConfig(recipe="symmetric"))
    a, b = symmetric.logprobs(tokens())[0], reference.logprobs(tokens())[0]
    weights_only = Trainer(args, hf, QuadsConfig(recipe="qat")).logprobs(tokens())[0]
    out["symmetric_gap"] = (a - b).abs().mean().item() / (weights_only - b).abs().mean().item()
    out["symmetric_grad"] = symmetric.step(batch(), loss)["grad_norm"] > 0
    (folder / f"faults-{dist.get_rank()}.json").write_text(json.dumps(out))
    runtime.shutdown()


def output_layer(config: Any) -> dict[str, Any]:
    """Megatron's output layer asked to fuse its weight gradient, with and without NVIDIA apex's extension."""
    registry.apply((megatron_te.OUTPUT_LAYER,))
    fused = dataclasses.replace(config, gradient_accumulation_fusion=True, delay_wgrad_compute=False)
    said: list[str] = []

    def build() -> ColumnParallelLinear:
        return ColumnParallelLinear(32, 32, config=fused, init_method=torch.nn.init.ones_, bias=False)

    with mock.patch.object(megatron_te.log, "warning", lambda text, *args: said.append(text % args)):
        without = build()
        with mock.patch.object(megatron_te, "has_apex_fusion", lambda: True):  # it is not there: Megatron says so
            try:
                build()
                raised = ""
            except RuntimeError as e:
                raised = str(e)
    return {
        "without_apex": said,
        "unfused": not without.gradient_accumulation_fusion and fused.gradient_accumulation_fusion,
        "with_apex": raised,
    }


def curve(folder: Path, argv: list[str]) -> None:
    """Losses of many steps."""
    hf = read_model_config(folder / "hf")
    args = parse_args(["--lr", "1e-3", *argv], hf)
    runtime.initialize(args)
    trainer = Trainer(args, hf, QuadsConfig(recipe="bf16"))
    install(trainer.chunks, QuadsConfig(recipe="qat"))
    losses = [trainer.step(batch(i % 8), loss)["loss"] for i in range(200)]
    if dist.get_rank() == 0:
        (folder / f"curve-{dist.get_world_size()}.json").write_text(json.dumps(losses))
    runtime.shutdown()


def reshard(folder: Path, argv: list[str]) -> None:
    """Save in one layout, or load in another what was saved: the digests of what the GEMMs multiply with, and a loss."""
    hf = read_model_config(folder / "hf")
    args = parse_args(["--lr", "1e-3", "--micro-batch-size", "2", *argv], hf)
    runtime.initialize(args)
    saved = folder / "checkpoint"
    trainer = Trainer(args, hf, QuadsConfig(recipe="bf16"), load_weights=not saved.exists())
    done = install(trainer.chunks, QuadsConfig(recipe="qat"))
    out: dict[str, Any] = {"weights": done.weights}
    if saved.exists():
        trainer.load(saved)
    else:
        for i in range(2):
            trainer.step(batch(i), loss)
        trainer.save(saved, {})
    out["digests"] = {
        n: tensor_digest(w) for n, w in iter_hf_tensors(trainer.chunks, hf, weights="compute") if is_expert(n)
    }
    out["master"] = {n: tensor_digest(w) for n, w in iter_hf_tensors(trainer.chunks, hf)}
    out["loss"] = trainer.step(batch(2), loss)["loss"]
    if dist.get_rank() == 0:
        (folder / f"reshard-{dist.get_world_size()}.json").write_text(json.dumps(out))
    runtime.shutdown()


def virtual(folder: Path, argv: list[str]) -> None:
    """Two virtual stages on each of two ranks: losses and gradients against chunks that hold the quantised weights."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    runtime.apply_patches()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, create_gloo_process_groups=True
    )
    shape = single.Shape(layers=4, experts=4, hidden=64, head_dim=16, inner=32, sequence=16, tokens=32, vocab=64)
    settings: dict[str, Any] = {
        "te": False, "grouped": False, "normalization": "LayerNorm", "dtype": torch.float32,
        "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "deallocate_pipeline_outputs": False,
    }  # fmt: skip
    models = [[single.build(shape, seed=s, vp_stage=s, **settings) for s in range(2)] for _ in range(2)]
    done = install(models[0], QuadsConfig(recipe="qat", keep_first_layers=1))
    for quads, plain in zip(*models, strict=True):
        for (name, p), q in zip(quads.named_parameters(), plain.parameters(), strict=True):
            module = quads.get_submodule(name.rpartition(".")[0])
            q.data.copy_(compute_weight(module, p))
    ids = [torch.randint(0, shape.vocab, (2, 16), generator=torch.Generator().manual_seed(i)) for i in range(4)]

    def forward(iterator: Any, model: Any) -> Any:
        return single.losses(model, next(iterator)), lambda out: (out.mean(), {"loss": out.detach().mean().item()})

    found = []
    for chunks in models:
        with megatron_cpu.CudaLiterals():  # the interleaved schedule has no patch of its own
            reports = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=[iter(ids), iter(ids)], model=chunks, num_microbatches=4,
            seq_length=16, micro_batch_size=2, forward_only=False,
        )  # fmt: skip
        found.append(([r["loss"] for r in reports], [p.grad for c in chunks for p in c.parameters()]))
    (losses, grads), (expected, reference) = found
    out = {
        "layers": sorted({int(n.split(".")[1]) for g in done.groups for n in g.names}),
        "losses": losses == expected,
        "reports": len(losses),
        "grads": [a is not None and a.equal(b) for a, b in zip(grads, reference, strict=True)],
        "quantized": counts(done),
    }
    (folder / f"virtual-{dist.get_rank()}.json").write_text(json.dumps(out))
    runtime.shutdown()


MODES = {"layout": layout, "faults": faults, "curve": curve, "reshard": reshard, "virtual": virtual}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("folder", type=Path)
    known, rest = parser.parse_known_args(sys.argv[1:])
    MODES[known.mode](known.folder, rest)
