"""Faulty checkpoints: the engine refuses to start with one line naming key and layer. One process tries them all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import make_tiny_hf
from rollout_helpers import half_metadata, write_export
from torch import Tensor

from megatron_quads import atomic, doctor_server
from megatron_quads.errors import QuadsError
from megatron_quads.rac.metadata import SIDECAR, RacMetadata
from megatron_quads.rollout import LocalRollout
from megatron_quads.rollout.process import engine_environment

pytestmark = pytest.mark.slow
EXPERT = "model.layers.1.mlp.experts.3"

TRY_ALL = """
import json, sys
from megatron_quads.errors import QuadsError
from megatron_quads.rollout.child import Engine

if __name__ == "__main__":
    for folder in sys.argv[1:]:
        try:
            Engine(folder, "float32", 64, 4, 0, {})
            said = "started"
        except QuadsError as e:
            said = str(e)
        except Exception as e:
            said = f"{type(e).__name__}: {e}"
        print("@@", json.dumps(said), flush=True)
"""


def _set(name: str, value: float | Tensor) -> object:
    def mutate(tensors: dict[str, Tensor], config: dict) -> None:
        t = tensors[name].clone()
        tensors[name] = value if isinstance(value, Tensor) else torch.full_like(t.float(), value).to(t.dtype)

    return mutate


def _drop(name: str) -> object:
    def mutate(tensors: dict[str, Tensor], config: dict) -> None:
        del tensors[name]

    return mutate


def _config(change: object) -> object:
    def mutate(tensors: dict[str, Tensor], config: dict) -> None:
        change(config["quantization_config"])  # type: ignore[operator]

    return mutate


def _schema(block: dict) -> None:
    block["rac"]["schema_version"] = 2


def _ratio(block: dict) -> None:
    block["rac"]["ratio"] = 0.75


def _exclude(block: dict) -> None:
    block["ignore"].append("model.layers.1.mlp.experts*")


def _no_rac(block: dict) -> None:
    del block["rac"]


def _no_rac_marked(block: dict) -> None:
    block["quads"] = {"activations": "w4a4"}
    del block["rac"]


CASES = {
    "missing scale": (
        _drop(f"{EXPERT}.up_proj.weight_scale_2"),
        "weight_scale_2 of layer 1 is missing",
        f"{EXPERT}.up_proj",
    ),
    "missing input scale": (
        _drop(f"{EXPERT}.down_proj.input_scale"),
        "input_scale of layer 1 is missing",
        f"{EXPERT}.down",
    ),
    "nan scale": (
        _set(f"{EXPERT}.down_proj.weight_scale", float("nan")),
        "weight_scale is not finite in layer 1",
        EXPERT,
    ),
    "inf scale": (_set(f"{EXPERT}.down_proj.weight_scale_2", float("inf")), "weight_scale_2 is not finite", EXPERT),
    "zero scale": (
        _set(f"{EXPERT}.gate_proj.weight_scale", 0.0),
        "weight_scale is zero in layer 1",
        f"{EXPERT}.gate_proj",
    ),
    "zero second scale": (_set(f"{EXPERT}.down_proj.weight_scale_2", 0.0), "weight_scale_2 is zero in layer 1", EXPERT),
    "zero input scale": (_set(f"{EXPERT}.up_proj.input_scale", 0.0), "input_scale is zero in layer 1", EXPERT),
    "gate is not up": (
        _set(f"{EXPERT}.up_proj.weight_scale_2", 1e-3),
        "gate and up",
        f"{EXPERT}.gate_proj.weight_scale_2",
    ),
    "shape": (
        _set(f"{EXPERT}.down_proj.weight_scale", torch.ones(128, 2).to(torch.float8_e4m3fn)),
        "tensor has shape [128, 2], layer 1 needs [128, 4]",
        f"{EXPERT}.down_proj.weight_scale",
    ),
    "dtype": (
        _set(f"{EXPERT}.down_proj.weight", torch.ones(128, 32)),
        "torch.float32, layer 1 needs torch.uint8",
        f"{EXPERT}.down_proj.weight",
    ),
    "schema": (_config(_schema), "schema version 2", "config.json"),
    "content": (_config(_ratio), "does not match its content", "config.json"),
    "excluded": (_config(_exclude), "RAC metadata selects layer 1", "ignore"),
    "sidecar, no block": (_config(_no_rac), "config.json has no rac block", SIDECAR),
    "sidecar, other block": (_config(_no_rac_marked), "config.json has no rac block", SIDECAR),
}


def test_faulty_checkpoints_do_not_start(tmp_path: Path) -> None:
    source = make_tiny_hf(tmp_path / "hf")
    metadata = half_metadata(source, [0, 1])
    folders, expected = [], []
    for i, (name, (mutate, *texts)) in enumerate(CASES.items()):
        folders.append(write_export(source, tmp_path / str(i), metadata=metadata, mutate=mutate))  # type: ignore[arg-type]
        expected.append((name, texts))

    def add(name: str, made: RacMetadata, sidecar: RacMetadata | None, *texts: str) -> None:
        folder = write_export(source, tmp_path / f"x{len(folders)}", metadata=made)
        if sidecar is None:
            (folder / SIDECAR).unlink()
        else:
            atomic.write_json(folder / SIDECAR, sidecar.to_block())
        folders.append(folder)
        expected.append((name, list(texts)))

    other = half_metadata(source, [0, 1], offset=1)
    add("other sidecar", metadata, other, "is not the sidecar's", SIDECAR)
    add("no sidecar", metadata, None, "sidecar of this checkpoint is missing", SIDECAR)
    foreign = metadata.model_copy(update={"model": metadata.model.model_copy(update={"hidden_size": 256})})
    add(
        "other model",
        foreign,
        foreign,
        "RAC metadata was made for hidden_size=256, the checkpoint has 128",
        "config.json",
    )
    fewer = half_metadata(source, [0])
    add("layer without entry", fewer, fewer, "no entry for quantised layer 1", "rac.layers")

    script = tmp_path / "try_all.py"
    script.write_text(TRY_ALL)
    env = {**engine_environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, str(script), *map(str, folders)], env=env, capture_output=True, text=True, timeout=400
    )
    said = [json.loads(line[3:]) for line in done.stdout.splitlines() if line.startswith("@@ ")]
    assert len(said) == len(folders), done.stderr[-3000:]
    wrong = []
    for (name, texts), line in zip(expected, said, strict=True):
        print(f"{name}: {line}")
        if "\n" in line or not all(t in line for t in texts):
            wrong.append((name, texts, line))
    assert not wrong


def test_a_plugin_that_vllm_skips_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through LocalRollout: the child's refusal arrives as the parent's exception, and no process is left."""
    source = make_tiny_hf(tmp_path / "hf")
    folder = write_export(source, tmp_path / "export", metadata=half_metadata(source, [0, 1]))
    monkeypatch.setenv("VLLM_PLUGINS", "another_plugin")
    with pytest.raises(QuadsError, match=r"did not load the megatron_quads plugin.*VLLM_PLUGINS"):
        LocalRollout(folder, log=tmp_path / "rollout.log")
    mine = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
    assert not any("rollout.child" in Path(f"/proc/{p}/cmdline").read_text() for p in Path(mine).read_text().split())


def test_stock_vllm_takes_a_rac_block_silently_and_the_doctor_says_so(tmp_path: Path) -> None:
    """Without the plugin vLLM reads the checkpoint as plain NVFP4. (On a CPU it then has no kernel for it.)"""
    source = make_tiny_hf(tmp_path / "hf")
    folder = write_export(source, tmp_path / "export", metadata=half_metadata(source, [0, 1]))
    program = """
import sys
from vllm.engine.arg_utils import EngineArgs
made = EngineArgs(model=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True).create_engine_config()
print("@@", type(made.quant_config).__name__, made.quant_config.get_name())
"""
    found = {}
    for plugins in ("another_plugin", "megatron_quads"):
        env = {**engine_environment(), "VLLM_PLUGINS": plugins}
        command = [sys.executable, "-c", program, str(folder)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
        (found[plugins],) = (line[3:].split() for line in done.stdout.splitlines() if line.startswith("@@ "))
    assert found["another_plugin"] == ["ModelOptNvFp4Config", "modelopt_fp4"]
    assert found["megatron_quads"] == ["ModelOptQuadsConfig", "modelopt_fp4_rac"]
    with pytest.raises(QuadsError, match=r"does not report RAC, which .*stock vLLM ignores it"):
        doctor_server.compare("http://server", {}, [], folder)


def test_another_model_type_and_a_long_context_are_refused(tmp_path: Path) -> None:
    """Before any process starts."""
    source = make_tiny_hf(tmp_path / "hf")
    with pytest.raises(QuadsError, match="context of 4096 exceeds the model's 512"):
        LocalRollout(source, max_model_len=4096)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(QuadsError, match="model_type 'llama'"):
        LocalRollout(source)


def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    """Killed by SIGKILL, so the parent cannot clean up. The engine's start is enough to see it."""
    source = make_tiny_hf(tmp_path / "hf")
    code = (
        f"from megatron_quads.rollout import LocalRollout; LocalRollout({str(source)!r}, log={str(tmp_path / 'log')!r})"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    deadline = time.monotonic() + 60
    while not (pids := children.read_text().split()):
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    child = Path(f"/proc/{pids[0]}/cmdline")
    while child.exists() and "rollout.child" in child.read_text():
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.1)
