"""The recipe installed on models of Megatron's own layers: the same numbers as the trainer whose spec quantises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_tiny_hf, run_ranks

pytestmark = pytest.mark.slow
WORKER = Path(__file__).parent / "te_worker.py"
LAYOUTS = {
    "one": (1, []),
    "ep2": (2, ["--expert-model-parallel-size", "2"]),
    "tp2": (2, ["--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", "2"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
}


def run(tmp_path: Path, mode: str, ranks: int, flags: list[str] | None = None) -> list[dict[str, Any]]:
    make_tiny_hf(tmp_path / "hf", dtype=torch.float32)
    run_ranks(ranks, WORKER, [mode, str(tmp_path), *(flags or [])])
    return [json.loads((tmp_path / f"{mode}-{r}.json").read_text()) for r in range(ranks)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_installed_is_the_quantising_trainer(name: str, tmp_path: Path) -> None:
    """Log-probs, steps, weights and checkpoints, bit for bit, with one quantisation a step."""
    ranks, flags = LAYOUTS[name]
    for out in run(tmp_path, "layout", ranks, flags):
        half = 2 if name in ("ep2", "pp2") else 1
        assert (out["modules"], out["weights"]) == (32 // half, 32 // half)
        assert out["groups"] == 2  # fc1 and fc2 of all layers: one launch each
        assert (
            out["differs_from_raw"] and out["logprobs"] and out["steps"] == [True, True, True] and out["values"] == []
        )
        assert out["alone"] == [[1], [2], [3]]  # micro-batches, log-probs and a second pass use what is there
        assert (ranks == 1) or "ranks have different Transformer Engines: 2.14, 2.15" in out["mixed"]
        assert out["bf16_loads"] and out["resumed"] and out["resumed_step"]
        assert out["packed_step"] and out["transient_step"]
        assert out["resumed_counts"] == [2]  # before the load, and after it
        assert out["copy_bytes"] == out["expert_bytes"] > 0 and out["transient_bytes"] == 0
        assert out["packed_bytes"] == out["expert_bytes"] * 9 // 64  # of FP32


def test_what_is_refused_and_found(tmp_path: Path) -> None:
    [out] = run(tmp_path, "faults", 1)
    assert "matched no module on rank 0 [--quads-module-pattern=no.such.*" in out["none"]
    assert "[--quads-activation-scale]; use token" in out["scale"]
    assert "[--quads-weight-hook recipe]; add --moe-grouped-gemm" in out["recipe_hook"]
    assert "[--delay-wgrad-compute]; leave it out" in out["delay_wgrad"]
    assert out["without_apex"] == [
        "NVIDIA apex is not importable: ColumnParallelLinear adds its weight gradient unfused"
    ]
    assert out["unfused"] and "fused_weight_gradient_mlp_cuda" in out["with_apex"]  # the patch leaves it to Megatron
    assert out["scoped"] == ["1"]
    assert "stale" in out["stale"] and "[layers.0.mlp.experts.3.linear_fc1.weight]" in out["stale"]
    assert out["fresh_differs"] and out["in_place_seen"] == ""
    assert "NaN or Inf [layers.0.mlp.experts.3.linear_fc1.weight]" in out["nan"]
    # a per-token scale does not see the router's probability, but for rounding
    assert out["symmetric_gap"] < 0.05 and out["symmetric_grad"]


def test_two_hundred_steps_on_one_and_two_ranks(tmp_path: Path) -> None:
    """The loss goes down alike; sums are in another order on two ranks, which decides ties of codes differently in time."""
    make_tiny_hf(tmp_path / "hf", dtype=torch.float32)
    for ranks, flags in ((1, []), (2, ["--expert-model-parallel-size", "2"])):
        run_ranks(ranks, WORKER, ["curve", str(tmp_path), *flags], timeout=600)
    one, two = (torch.tensor(json.loads((tmp_path / f"curve-{r}.json").read_text())) for r in (1, 2))
    assert (one[:3] - two[:3]).abs().max() < 1e-4
    smooth = [c.unfold(0, 20, 20).mean(1) for c in (one, two)]
    assert smooth[0][-1] < smooth[0][0] - 0.5
    assert (smooth[0] - smooth[1]).abs().max() < 0.02 * smooth[0][0]


@pytest.mark.parametrize(
    ("ranks", "flags", "to_ranks", "to_flags"),
    [
        (4, ["--expert-model-parallel-size", "4"], 2, ["--expert-model-parallel-size", "2"]),
        (2, ["--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", "2"], 1, []),
    ],
    ids=["ep4-ep2", "tp2-tp1"],
)
def test_a_checkpoint_in_another_layout(
    ranks: int, flags: list[str], to_ranks: int, to_flags: list[str], tmp_path: Path
) -> None:
    """The same master weights and the same quantised ones, bit for bit; the next step has the same loss."""
    make_tiny_hf(tmp_path / "hf", dtype=torch.float32)
    run_ranks(ranks, WORKER, ["reshard", str(tmp_path), *flags])
    run_ranks(to_ranks, WORKER, ["reshard", str(tmp_path), *to_flags])
    old, new = (json.loads((tmp_path / f"reshard-{n}.json").read_text()) for n in (ranks, to_ranks))
    assert len(new["digests"]) == 48 and new["digests"] == old["digests"] and new["master"] == old["master"]
    assert new["digests"] != {n: d for n, d in new["master"].items() if n in new["digests"]}
    assert abs(new["loss"] - old["loss"]) < 1e-4 and new["weights"] == 32 // to_ranks


def test_virtual_pipeline_stages(tmp_path: Path) -> None:
    """Two stages on each of two ranks: global layers, the first kept; losses and gradients bit for bit, one quantisation."""
    run_ranks(2, WORKER, ["virtual", str(tmp_path)])
    first, last = (json.loads((tmp_path / f"virtual-{r}.json").read_text()) for r in range(2))
    assert first["layers"] == [2] and last["layers"] == [1, 3]
    assert last["losses"] and last["reports"] == 4
    for out in (first, last):
        assert all(out["grads"]) and len(out["grads"]) > 10 and out["quantized"] == [1]
