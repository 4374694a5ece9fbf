"""Bad checkpoints, refused exports, interrupted exports: one line each, and the old export stays."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_tiny_hf, run_ranks, tiny_config, tiny_weights, write_hf

from megatron_quads import atomic
from megatron_quads.checkpoint.hf import SafetensorsFolder, read_model_config

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("checkpoint_worker.py")
NAN = "model.layers.1.mlp.experts.6.up_proj.weight"
WRONG = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound checkpoint and broken ones."""
    root = tmp_path_factory.mktemp("checkpoints")
    make_tiny_hf(root / "tiny")
    make_tiny_hf(root / "odd", moe_intermediate_size=40)
    config = tiny_config()
    bad = tiny_weights(config)
    bad[NAN][2, 3] = float("nan")
    write_hf(root / "nan", config, bad)
    bad = tiny_weights(config)
    bad[WRONG] = bad[WRONG][:64].clone()
    write_hf(root / "misshapen", config, bad)
    make_tiny_hf(root / "missing", shards=3)
    (root / "missing" / "model-00002-of-00003.safetensors").unlink()
    make_tiny_hf(root / "truncated", shards=3)
    shard = root / "truncated" / "model-00003-of-00003.safetensors"
    os.truncate(shard, shard.stat().st_size - 1000)
    make_tiny_hf(root / "quantised", quantization_config={"quant_method": "modelopt"})
    return root


@pytest.fixture(scope="module")
def faults(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], Path]:
    """The lines that the worker's bad inputs gave, and its folder."""
    out = tmp_path_factory.mktemp("faults")
    run_ranks(1, WORKER, ["faults", str(root), str(out)])
    return json.loads((out / "result-0.json").read_text()), out


def snapshot(folder: Path) -> dict[str, str]:
    """sha256 of every file."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        ("nan", [NAN, "1 NaN"]),
        ("missing", ["shard is missing", "model-00002-of-00003.safetensors"]),
        ("truncated", ["truncated", "model-00003-of-00003.safetensors"]),
        ("misshapen", [WRONG, "[64, 128]", "[128, 128]"]),
        ("quantised", ["quantised"]),
        ("odd", ["K = 40", "model.layers.0.mlp.experts.0.down_proj.weight"]),
        ("no rac", ["no RAC metadata", "calibrate"]),
        ("rac without recipe", ["'qat'"]),
        ("other model", ["num_experts=16"]),
        ("other layers", ["[0]", "[0, 1]"]),
        ("source", ["source checkpoint"]),
        ("stranger", ["not an export", "stranger"]),
    ],
)
def test_bad_input_is_one_line_naming_it(fault: str, parts: list[str], faults: tuple[dict[str, str], Path]) -> None:
    said = faults[0][fault]
    assert "\n" not in said
    for part in parts:
        assert part in said


def test_refused_exports_write_nothing(faults: tuple[dict[str, str], Path]) -> None:
    out = faults[1]
    assert sorted(p.name for p in out.iterdir()) == ["kept", "odd", "result-0.json", "stranger"]
    assert [p.name for p in (out / "stranger").iterdir()] == ["thesis.tex"]
    # recipe bf16 takes any K, and the refused NVFP4 export over it left it alone
    assert "quantization_config" not in json.loads((out / "odd" / "config.json").read_text())
    assert SafetensorsFolder(out / "odd").shape("model.layers.0.mlp.experts.0.down_proj.weight") == (128, 40)


def test_kept_layers_stay_unquantised_for_readers_too(faults: tuple[dict[str, str], Path], root: Path) -> None:
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    folder = faults[1] / "kept"
    reader, source = SafetensorsFolder(folder), SafetensorsFolder(root / "tiny")
    for name in reader.names():
        if "layers.0." in name:
            assert torch.equal(reader.get(name), source.get(name).bfloat16()), name
    assert reader.dtype("model.layers.1.mlp.experts.0.up_proj.weight") == torch.uint8
    block = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert block["quads"] == {"activations": "w4a4", "activation_scale": "tensor"}
    assert "rac" not in block
    config = ModelOptNvFp4Config.from_config(block)
    assert config.is_layer_excluded("model.layers.0.mlp.experts")
    assert not config.is_layer_excluded("model.layers.1.mlp.experts")
    assert not config.is_layer_excluded("model.layers.10.mlp.experts")


def test_uncalibrated_input_scales_bound_the_real_inputs(faults: tuple[dict[str, str], Path], root: Path) -> None:
    """Without metadata the scale follows from the weights: no input of the real model clips, and none is far below."""
    from transformers import AutoModelForCausalLM

    reader = SafetensorsFolder(faults[1] / "kept")
    model = AutoModelForCausalLM.from_pretrained(root / "tiny", dtype=torch.float32).eval()
    seen: dict[str, float] = {}
    norm = model.model.layers[1].post_attention_layernorm
    norm.register_forward_hook(lambda m, i, o: seen.__setitem__("x", o.abs().max().item()))
    tokens = torch.randint(4, 500, (4, 64), generator=torch.Generator().manual_seed(3))
    x: list[torch.Tensor] = []
    norm.register_forward_hook(lambda m, i, o: x.append(o.flatten(0, 1)))
    with torch.no_grad():
        model(tokens)
    source = SafetensorsFolder(root / "tiny")
    for expert in range(8):
        stem = f"model.layers.1.mlp.experts.{expert}."
        gate, up = (source.get(f"{stem}{p}_proj.weight") for p in ("gate", "up"))
        inner = (torch.nn.functional.silu(x[0] @ gate.T) * (x[0] @ up.T)).abs().max().item()
        amax = {p: reader.get(f"{stem}{p}_proj.input_scale").item() * 2688 for p in ("gate", "up", "down")}
        assert amax["gate"] == amax["up"]
        assert seen["x"] <= amax["gate"] <= 100 * seen["x"]
        assert inner <= amax["down"] <= 1000 * inner


def test_nan_weight_and_full_disk_reach_every_rank_and_leave_the_old_export(root: Path, tmp_path: Path) -> None:
    run_ranks(2, WORKER, ["interrupted", str(root), str(tmp_path), "--expert-model-parallel-size", "2"])
    answers: list[dict[str, Any]] = [json.loads((tmp_path / f"result-{r}.json").read_text()) for r in range(2)]
    assert answers[0] == answers[1]
    assert "model.layers.1.mlp.experts.7.down_proj.weight holds 1 NaN" in answers[0]["nan"]
    assert "File too large" in answers[0]["full"]
    assert str(tmp_path / "export") in answers[0]["full"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["export", "result-0.json", "result-1.json"]
    assert atomic.is_committed(tmp_path / "export")
    assert len(SafetensorsFolder(tmp_path / "export").names()) > 200


def test_kill_in_mid_export_leaves_the_old_export(root: Path, tmp_path: Path) -> None:
    # one process without a launcher: the runtime picks its own port
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    log = open(tmp_path / "log", "w")  # noqa: SIM115
    worker = subprocess.Popen([sys.executable, WORKER, "stall", root, tmp_path], env=env, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "half-way").exists():
            assert worker.poll() is None, (tmp_path / "log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        before = snapshot(tmp_path / "export")
        partial = [p for p in tmp_path.iterdir() if p.name.startswith(".export.")]
        assert len(partial) == 1
    finally:
        worker.kill()
        worker.wait()
        log.close()
    assert snapshot(tmp_path / "export") == before
    assert atomic.is_committed(tmp_path / "export")
    assert not atomic.is_committed(partial[0])
    assert len(SafetensorsFolder(tmp_path / "export").names()) > 200
    assert read_model_config(tmp_path / "export").num_experts == 8
