"""Trainer (Transformer Engine) and rollout (Marlin, CUDA graphs) on one GPU: a selection taken anew, the engine's statistics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import make_tiny_hf, quads
from test_rac_engine import LENGTHS, _sequences
from test_rl_loop import SMALL, TASK
from test_rl_recalibrate import _base, _hash

from megatron_quads.rac.budget import REPORT
from megatron_quads.rac.metadata import load_sidecar
from megatron_quads.rl.metrics import read_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
LAYOUT = ["--nproc", "1", "--bf16", "--lr", "1e-3", "--micro-batch-size", "8"]


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other engines and the trainer share the GPU."""
    monkeypatch.delenv("QUADS_GPU_MEMORY_FRACTION", raising=False)
    monkeypatch.setenv("QUADS_KV_CACHE_GIB", "1")


@pytest.mark.parametrize("refit", ["flat", "folder"])
def test_graphs_follow_a_new_selection(tmp_path: Path, refit: str) -> None:
    """Each version is proven with the selection whose hash the worker acknowledged; a resumed run goes on with its own."""
    base, out = _base(tmp_path), tmp_path / "run"
    words = ["rl", "--model", base, "--out", out, *TASK, *SMALL, *LAYOUT, "--quads-recipe", "quads", "--refit", refit]
    words += ["--recalibrate-every", "2", "--save-every", "2"]
    for steps in (["--steps", "3"], ["--steps", "5", "--resume"]):
        done = quads(*words, *steps)
        assert done.returncode == 0, done.stdout + done.stderr
    rows, audit = read_rows(out / "metrics.jsonl"), read_rows(out / "audit.jsonl")
    assert [r["rac_version"] for r in rows] == [0, 2, 2, 4, 4]
    assert rows[1]["rac_blocks_changed"] > 0
    assert all(r["weight_bits_mismatched"] == 0 for r in rows)
    assert all(a["trainer"] == a["rollout"] for a in audit)
    held = [a["rac"] for a in audit]
    assert held[:2] == [_hash(base)] * 2 and held[2] == held[3] and len(set(held)) == 3
    assert _hash(out / "export") == held[-1]
    done = quads("verify", out)
    assert done.returncode == 0 and done.stdout.strip().endswith("verify: version 5: 0 mismatched bits"), done.stderr
    print(refit, [(round(r["refit_s"], 3), r["rac_blocks_changed"]) for r in rows])


def test_the_engines_statistics_are_the_trainers(tmp_path: Path) -> None:
    """BF16 on both sides: routes and rounding differ by the engines' noise, so counts and energies are near, not equal."""
    model = make_tiny_hf(tmp_path / "hf", dtype=torch.bfloat16)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"tokens": s}) for s in _sequences(8)))
    flags = ["--bf16", "--quads-rac-policy", "uniform"]
    found = {}
    for where in ("trainer", "vllm"):
        out = tmp_path / where
        done = quads("calibrate", "--model", model, "--prompts", prompts, "--out", out, "--statistics", where, *flags)
        assert done.returncode == 0, done.stdout + done.stderr
        found[where] = json.loads((out / REPORT).read_text()), load_sidecar(out)
    (mine, rac), (theirs, other) = found["trainer"], found["vllm"]
    assert mine["tokens"] == theirs["tokens"] == 8 * sum(LENGTHS)
    counts = [torch.tensor(list(r["expert_tokens"].values()), dtype=torch.float64) for r in (mine, theirs)]
    moved = float((counts[0] - counts[1]).abs().sum() / counts[0].sum())
    worst = {name: max(_difference(theirs[name][u], v) for u, v in mine[name].items()) for name in ("amax", "energy")}
    assert rac is not None and other is not None
    common = [
        len(set(rac.layers[i].gate_up.blocks or ()) & set(other.layers[i].gate_up.blocks or ()))
        / len(rac.layers[i].gate_up.blocks or ())
        for i in rac.layers
    ]
    print(f"pairs moved {moved:.4f}, relative difference {worst}, gate/up blocks in common {common}")
    assert moved < 0.05 and max(worst.values()) < 0.1 and min(common) >= 0.75


def _difference(a: float | list[float], b: float | list[float]) -> float:
    """Sum of the differences over the sum of ``b``."""
    x, y = (torch.tensor(v, dtype=torch.float64).reshape(-1) for v in (a, b))
    return float((x - y).abs().sum() / y.abs().sum())
