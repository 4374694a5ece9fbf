"""One rank of the tests of ``megatron_quads.te`` on Megatron's own layers: ``te_worker.py MODE FOLDER [FLAGS]``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from packaging.version import Version
from trainer_worker import batch, loss, tokens

from megatron_quads import recipe
from megatron_quads.checkpoint.gather import iter_hf_tensors
from megatron_quads.checkpoint.hf import read_model_config
from megatron_quads.config import QuadsConfig
from megatron_quads.errors import QuadsError
from megatron_quads.te import arguments
from megatron_quads.te.experts import expert_gemms
from megatron_quads.te.install import Installed, install
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
    transient = Trainer(args, hf, QuadsConfig(recipe="bf16"), load_weights=False)
    lean = install(transient.chunks, quads, cache="transient")
    transient.load(folder / "checkpoint")
    out["transient_step"] = transient.step(batch(7), loss)["grad_norm"] == back_grad_norm(folder, args, hf, quads)
    out["transient_bytes"] = sum(g.nbytes for g in lean.groups)
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


MODES = {"layout": layout, "faults": faults, "curve": curve}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("folder", type=Path)
    known, rest = parser.parse_known_args(sys.argv[1:])
    MODES[known.mode](known.folder, rest)
