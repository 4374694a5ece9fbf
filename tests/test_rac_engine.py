"""Calibration's statistics from vLLM's workers against the trainer's, and against the engine's own routes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import make_tiny_hf, quads
from rollout_helpers import HFReference, dequantized, half_metadata, write_export
from safetensors.torch import load_file
from torch import Tensor

from megatron_quads.checkpoint.hf import read_model_config
from megatron_quads.errors import QuadsError
from megatron_quads.kernels import nvfp4
from megatron_quads.kernels.rac import reference
from megatron_quads.rac import sort
from megatron_quads.rac.budget import REPORT
from megatron_quads.rac.metadata import load_sidecar
from megatron_quads.rac.statistics import Moments, ResidualEnergy
from megatron_quads.rac.store import add_files, write
from megatron_quads.rollout import LocalRollout
from megatron_quads.rollout.observe import Observer, require_observable

LENGTHS = [5, 12, 20, 33, 47]


def _sequences(n: int = 2) -> list[list[int]]:
    gen = torch.Generator().manual_seed(5)
    return [torch.randint(3, 500, (length,), generator=gen).tolist() for length in LENGTHS for _ in range(n)]


@pytest.mark.slow
def test_both_engines_choose_alike(tiny_hf: Path, tmp_path: Path) -> None:
    """fp32: statistics equal up to the order of sums in two engines' GEMMs and attention, the selection exactly."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"tokens": s}) for s in _sequences()))
    flags = ["--quads-rac-policy", "uniform"]
    found = {}
    for where in ("trainer", "vllm"):
        out = tmp_path / where
        done = quads("calibrate", "--model", tiny_hf, "--prompts", prompts, "--out", out, "--statistics", where, *flags)
        assert done.returncode == 0, done.stdout + done.stderr
        found[where] = json.loads((out / REPORT).read_text()), load_sidecar(out), sort.read_calibration(out)
        assert (tmp_path / f"{where}.logs" / "rollout.log").exists() == (where == "vllm")
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]  # packed models are gone
    (mine, rac, order), (theirs, other, their_order) = found["trainer"], found["vllm"]
    assert rac is not None and other is not None and order["order_sha256"] == their_order["order_sha256"]
    for layer in rac.layers:
        a, b = rac.layers[layer], other.layers[layer]
        assert a.gate_up.blocks == b.gate_up.blocks and a.down.prefix == b.down.prefix
    assert mine["expert_tokens"] == theirs["expert_tokens"] and mine["tokens"] == theirs["tokens"] == 2 * sum(LENGTHS)
    for name in ("amax", "energy"):
        for unit, value in mine[name].items():
            assert theirs[name][unit] == pytest.approx(value, rel=1e-3), (name, unit)
    # not the trainer's own numbers
    assert mine["energy"] != theirs["energy"]


@pytest.mark.slow
def test_engine_statistics_are_of_its_own_routes(tmp_path: Path) -> None:
    source = make_tiny_hf(tmp_path / "hf", num_hidden_layers=3)
    export = write_export(source, tmp_path / "export", metadata=half_metadata(source, [0, 1]), keep=(2,))
    shape, sequences = read_model_config(source).shape, _sequences(1)
    static = {(layer, gemm): 3.0 for layer in (0, 1) for gemm in ("gate_up", "down")}
    with LocalRollout(export, max_model_len=48, max_num_seqs=16, log=tmp_path / "rollout.log") as rollout:
        with pytest.raises(QuadsError, match="the layers run rac, not w4a16"):
            rollout.statistics(Moments(shape), sequences, tmp_path)
        rollout.set_activation("w4a16")
        with pytest.raises(QuadsError, match="a tensor scale depends on what shares a batch"):
            rollout.statistics(ResidualEnergy(shape, "tensor", {}), sequences, tmp_path)
        moments = Moments(shape)
        pairs = rollout.statistics(moments, sequences, tmp_path)
        residual = ResidualEnergy(shape, "static", static)  # type: ignore[arg-type]
        assert rollout.statistics(residual, sequences, tmp_path, static_amax=static) == pairs  # type: ignore[arg-type]
        scores = rollout.score(sequences)  # nobody looks any more
        routes = rollout.record_routes(sequences)
        assert rollout.score(sequences) == scores
    assert pairs == {0: 2 * sum(LENGTHS), 1: 2 * sum(LENGTHS)}  # the last layer is unquantised
    for layer in (0, 1):
        chosen = torch.cat([r[layer].flatten() for r in routes])
        assert torch.equal(moments.tokens[layer], torch.bincount(chosen, minlength=8).double())
    assert not moments.tokens[2].any()
    seen = _reference(source, tmp_path / "reference", sequences)
    for unit, rows in seen.items():
        layer, gemm = unit
        assert float(moments.amax[gemm][layer].max()) == pytest.approx(float(rows.abs().max()), rel=1e-4)
        rest = reference.residual(rows, nvfp4.tensor_scale(torch.tensor(3.0)))[1]
        want = rest.double().square().sum(0).unflatten(0, (-1, 16)).sum(-1)
        assert residual.energy[gemm][layer].tolist() == pytest.approx(want.tolist(), rel=1e-3)
        clipped = float((rows.abs() > 3.0).sum())
        assert float(residual.clipped[gemm][layer]) == pytest.approx(clipped, abs=2)


def _reference(source: Path, scratch: Path, sequences: list[list[int]]) -> dict:
    """Rows [pairs, K] that Transformers' experts get with dequantised weights, by (layer, GEMM)."""
    seen: dict[tuple[int, str], list[Tensor]] = {}

    class Seeing(HFReference):
        def _activate(self, layer: int, gemm: str, x: Tensor) -> Tensor:
            if layer < 2:
                seen.setdefault((layer, gemm), []).append(x)
            return x

    model = Seeing(source, dequantized(load_file(source / "model.safetensors"), (2,)), None, scratch)
    for sequence in sequences:
        model.score(torch.tensor([sequence]))
    return {unit: torch.cat(rows) for unit, rows in seen.items()}


def test_workers_parts_add_up(tmp_path: Path) -> None:
    """Two workers with half of the experts each against one with all of them."""
    gen = torch.Generator().manual_seed(0)
    experts, hidden, inter, tokens = 8, 128, 64, 40
    x = torch.randn(tokens, hidden, generator=gen)
    w13 = torch.randn(experts, 2 * inter, hidden, generator=gen) / 8
    ids = torch.stack([torch.randperm(experts, generator=gen)[:2] for _ in range(tokens)])
    shape = read_model_config(make_tiny_hf(tmp_path / "hf")).shape

    def run(held: range, name: str, kind: str) -> Path:
        made: Moments | ResidualEnergy = Moments(shape) if kind == "moments" else ResidualEnergy(shape, "token", {})
        slots = torch.full((experts,), -1)
        slots[held.start : held.stop] = torch.arange(len(held))
        layer = SimpleNamespace(expert_map=None if len(held) == experts else slots, local_num_experts=len(held))
        method = SimpleNamespace(index=1, weights=lambda: (w13[held.start : held.stop], None))
        observer = Observer(made)
        for part in (slice(0, 23), slice(23, None)):
            observer(layer, method, x[part], ids[part])
        write(made, tmp_path / name)
        return tmp_path / name

    for kind in ("moments", "residual"):
        whole, parts = (Moments(shape), Moments(shape)) if kind == "moments" else (
            ResidualEnergy(shape, "token", {}), ResidualEnergy(shape, "token", {})
        )  # fmt: skip
        add_files(whole, [run(range(8), "whole", kind)])
        add_files(parts, [run(range(4), "first", kind), run(range(4, 8), "second", kind)])
        for name, table in whole.tables().items():
            assert torch.allclose(parts.tables()[name], table, rtol=1e-12), name
            assert table.any() or name.startswith("clipped")
    with pytest.raises(QuadsError, match="another model or kind"):
        add_files(Moments(shape), [tmp_path / "whole"])


def test_captured_graphs_are_refused() -> None:
    require_observable("emulation", False, "w4a16")
    require_observable("marlin", True, "w4a16")
    for kernel in ("marlin", "native"):
        with pytest.raises(QuadsError, match=r"CUDA graphs do not call the observer.*enforce_eager"):
            require_observable(kernel, False, "w4a16")
