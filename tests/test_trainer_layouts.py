"""The sharded trainer: straight-through gradients, and the same function under every parallel layout."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_ranks, tiny_config, tiny_weights, write_hf
from torch import Tensor

from megatron_quads.kernels.nvfp4 import reference as nvfp4

pytestmark = pytest.mark.slow
WORKER = Path(__file__).parent / "trainer_worker.py"
LAYOUTS = {
    "one": (1, []),
    "ep2": (2, ["--expert-model-parallel-size", "2"]),
    "etp2": (2, ["--expert-tensor-parallel-size", "2"]),
    "tp2": (2, ["--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", "2"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
}
SHARDED = [name for name in LAYOUTS if name != "one"]


def scale_of(weights: dict[str, Tensor], name: str) -> Tensor:
    """FP32 scale of an expert weight: gate and up share one amax."""
    pair = [name, name.replace("gate_proj", "up_proj"), name.replace("up_proj", "gate_proj")]
    return nvfp4.tensor_scale(nvfp4.amax(*(weights[n] for n in dict.fromkeys(pair))))


@dataclass
class Runs:
    """What each rank of each layout wrote, and the quantised weights of the checkpoint."""

    by_layout: dict[str, list[dict[str, Any]]]
    quantised: dict[str, Tensor]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("layouts")
    config = tiny_config()
    weights = tiny_weights(config)
    quantised = {n: nvfp4.qdq(w, scale_of(weights, n)) if ".experts." in n else w for n, w in weights.items()}
    found = {}
    for name, (ranks, flags) in LAYOUTS.items():
        folder = root / name
        write_hf(folder / "hf", config, weights)
        write_hf(folder / "hf_qdq", config, quantised)
        run_ranks(ranks, WORKER, ["layout", str(folder), *flags])
        found[name] = [torch.load(folder / f"{r}.pt", weights_only=False) for r in range(ranks)]
        shutil.rmtree(folder)
    return Runs(found, quantised)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_a_plain_model_with_the_quantised_weights(runs: Runs, name: str) -> None:
    for rank in runs.by_layout[name]:
        assert rank["qat_logprobs"].equal(rank["plain_logprobs"])
        assert rank["qat_metrics"] == rank["plain_metrics"]
        assert rank["qat_grads"].keys() == rank["plain_grads"].keys()
        for parameter, grad in rank["qat_grads"].items():
            assert grad.equal(rank["plain_grads"][parameter]), parameter
            assert grad.abs().sum() > 0, parameter


@pytest.mark.parametrize("name", ["ep2", "etp2"])
def test_two_ranks_agree(runs: Runs, name: str) -> None:
    a, b = runs.by_layout[name]
    assert a["qat_metrics"] == b["qat_metrics"]
    shared = [n for n in a["qat_grads"] if ".experts." not in n]
    assert len(shared) > 10
    for parameter in shared:
        assert a["qat_grads"][parameter].equal(b["qat_grads"][parameter]), parameter


@pytest.mark.parametrize("name", SHARDED)
def test_every_layout_computes_the_same_function(runs: Runs, name: str) -> None:
    [one] = runs.by_layout["one"]
    for rank in runs.by_layout[name]:
        assert (rank["qat_logprobs"] - one["qat_logprobs"]).abs().max() < 2e-5
        for key, value in one["qat_metrics"].items():
            assert rank["qat_metrics"][key] == pytest.approx(value, rel=1e-5, abs=1e-7), key
    if name == "ep2":
        for rank in runs.by_layout[name]:
            assert rank["qat_logprobs"].equal(one["qat_logprobs"])
            for parameter, grad in rank["qat_grads"].items():
                reference = one["qat_grads"][parameter]
                assert (grad - reference).abs().max() <= 1e-5 * reference.abs().max(), parameter


def test_metrics_are_per_token_over_all_ranks(runs: Runs) -> None:
    for name in LAYOUTS:
        for rank in runs.by_layout[name]:
            metrics, count = rank["qat_metrics"], sum(20 - i for i in range(8))
            assert metrics["tokens"] == count and metrics["ones"] == 1.0
            assert metrics["rows"] == pytest.approx(1 / count)
            assert metrics["lp_max"] <= 0 and metrics["grad_norm"] > 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_shards_multiply_with_slices_of_the_whole_quantised_tensor(runs: Runs, name: str) -> None:
    ranks = runs.by_layout[name]
    shards = 2 if name in ("etp2", "tp2") else 1
    seen = set()
    for index, rank in enumerate(ranks):
        assert rank["frozen_equal"] and rank["frozen_once"]
        for (layer, expert, kind), weight in rank["weights"].items():
            stem = f"model.layers.{layer}.mlp.experts.{expert}"
            part = index if shards == 2 else 0
            if kind == "fc1":
                gate, up = (runs.quantised[f"{stem}.{p}_proj.weight"].chunk(shards)[part] for p in ("gate", "up"))
                expected = torch.cat([gate, up])
            else:
                expected = runs.quantised[f"{stem}.down_proj.weight"].chunk(shards, 1)[part]
            assert weight.equal(expected), (layer, expert, kind)
            seen.add((layer, expert, kind))
    assert len(seen) == 2 * 8 * 2


@pytest.mark.parametrize("name", LAYOUTS)
def test_emulated_activations_agree_and_compensation_narrows_the_gap(runs: Runs, name: str) -> None:
    [one] = runs.by_layout["one"]
    for rank in runs.by_layout[name]:
        gap = {k: (rank[f"rac_{k}"] - rank["qat_logprobs"]).abs().mean() for k in (None, 0, 2, 4)}
        assert gap[None] == gap[0] > gap[2] > gap[4] > 0
        # a rounding tie that falls the other way moves single tokens: the mean must agree
        for k in (None, 2, 4):
            assert (rank[f"rac_{k}"] - one[f"rac_{k}"]).abs().mean() < 0.05 * gap[k]
        assert rank["symmetric_logprobs"].equal(rank["rac_None"])
        grads = rank["symmetric_grads"]
        assert all(torch.isfinite(g).all() for g in grads.values())
        assert any(not g.equal(rank["qat_grads"][n]) for n, g in grads.items())


@pytest.mark.parametrize("name", SHARDED)
def test_recorded_routes(runs: Runs, name: str) -> None:
    [one] = runs.by_layout["one"]
    layers = set()
    for rank in runs.by_layout[name]:
        for layer, routes in rank["routes"].items():
            whole = one["routes"][layer]
            assert whole.shape[0] == 8 and whole.shape[2] == 2 and (whole[..., 0] < whole[..., 1]).all()
            length = one["qat_logprobs"].shape[1] + 1  # behind it is padding
            assert routes[:, :length].equal(whole[rank["rows"], :length])
            layers.add(layer)
    assert layers == {0, 1}


def test_observed_inputs_are_whole_under_expert_tensor_parallelism(runs: Runs) -> None:
    a, b = runs.by_layout["etp2"]
    assert a["observed"].keys() == b["observed"].keys()
    assert {g for _, _, g in a["observed"]} == {"gate_up", "down"}
    for (_, _, gemm), value in a["observed"].items():
        assert value.shape == ((128,) if gemm == "gate_up" else (64,))
    for key, value in a["observed"].items():
        assert value.equal(b["observed"][key])


def test_a_stage_without_a_quantised_module_raises_on_every_rank(runs: Runs) -> None:
    for rank in runs.by_layout["pp2"]:
        assert "matched no module on rank 0" in rank["mismatch"]
    for rank in runs.by_layout["ep2"]:
        assert rank["mismatch"] == ""


def test_an_expert_computes_the_written_out_formula(tmp_path: Path) -> None:
    config = tiny_config()
    write_hf(tmp_path / "hf", config, tiny_weights(config))
    run_ranks(1, WORKER, ["expert", str(tmp_path)])
    out = torch.load(tmp_path / "expert.pt")
    for mode in ("token", "tensor"):
        found = out[mode]
        for got, expected in zip(found["emulated"], found["formula"], strict=True):
            assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
    # the router's probability comes after the quantisation; a scale per token cannot tell, any other can
    got, wrong = out["tensor"]["emulated"][0], out["tensor"]["probability_first"][0]
    assert (got - wrong).abs().max() > 1e-3 * got.abs().max()
    assert out["other_layer"].equal(out["plain"])
    assert not out["down_only"].equal(out["plain"]) and not out["down_only"].equal(out["token"]["emulated"][0])
