"""Refits of ``quads rl`` from the trainer's memory against those through export folders: the same numbers, fewer files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import TIMES, quads
from safetensors import safe_open
from test_rl_loop import SMALL, TASK, rl, rollout_pid

from megatron_quads.errors import QuadsError
from megatron_quads.rl.config import RLConfig
from megatron_quads.rl.metrics import read_rows
from megatron_quads.rl.tasks import make_task
from megatron_quads.rl.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.slow


@dataclass
class Runs:
    """A flat run whose engine was killed in mid-refit and that was resumed, and a run through folders as long."""

    flat: Path
    folder: Path
    steps: int
    killed: subprocess.CompletedProcess[str]
    verified: subprocess.CompletedProcess[str]
    said: dict[str, str]
    left: list[str]


@pytest.fixture(scope="module")
def runs(base: Path) -> Runs:
    """Two ranks with half of the experts each."""
    flat, folder = base.parent / "flat", base.parent / "folder"
    killed = _killed_in_refit(rl(base, flat, "--steps", "50", "--save-every", "1", "--refit", "flat"), flat)
    steps = 1 + len(list(flat.glob("checkpoints/step_*")))
    left, verified = _refits(flat), quads("verify", flat, "--no-engine")
    said = {}
    for out, words in ((flat, ["--refit", "flat", "--resume"]), (folder, ["--refit", "folder"])):
        done = quads(*rl(base, out, "--steps", str(steps), "--save-every", "1", *words))
        assert done.returncode == 0, done.stdout + done.stderr
        said[out.name] = done.stdout
    return Runs(flat, folder, steps, killed, verified, said, left)


def _killed_in_refit(words: list[str], run: Path) -> subprocess.CompletedProcess[str]:
    """Kill the engine once a saved step is followed by a refit under way: its shared file is there."""
    program = [sys.executable, "-m", "megatron_quads.cli", *words]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 300
        while not ((run / "refit" / "v000001").exists() and (run / "refit" / "flat.bin").exists()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
        os.kill(rollout_pid(run), signal.SIGKILL)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return subprocess.CompletedProcess(program, process.returncode, out, err)


def _refits(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "refit").iterdir())


def _rows(run: Path, *left_out: str) -> list[dict]:
    return [
        {k: v for k, v in r.items() if k not in TIMES and k not in left_out} for r in read_rows(run / "metrics.jsonl")
    ]


def test_a_kill_in_mid_refit_is_one_line_and_what_is_left_is_whole(runs: Runs) -> None:
    assert runs.killed.returncode == 2
    assert "quads: error: rollout process died (signal SIGKILL)" in runs.killed.stderr.strip().splitlines()[-1]
    saved = f"v{runs.steps - 1:06d}"
    assert "flat.bin" not in runs.left and saved in runs.left
    last = f"verify: version {runs.steps - 1}: 0 mismatched bits"
    assert runs.verified.returncode == 0 and runs.verified.stdout.strip().endswith(last), runs.verified.stderr


def test_both_ways_give_the_same_run(runs: Runs) -> None:
    assert runs.said["flat"].count("refit: packed weights from memory, through a file") == 1
    assert runs.said["folder"].count("refit: export folders") == 1
    flat, folder = _rows(runs.flat, "refit_bytes"), _rows(runs.folder, "refit_bytes")
    assert flat == folder and len(flat) == runs.steps
    assert read_rows(runs.flat / "audit.jsonl") == read_rows(runs.folder / "audit.jsonl")
    weights = [(run / "export" / "model.safetensors").read_bytes() for run in (runs.flat, runs.folder)]
    assert weights[0] == weights[1]
    # flat refits write folders of saved steps alone; the last step has export/
    assert f"v{runs.steps:06d}" in _refits(runs.folder) and f"v{runs.steps:06d}" not in _refits(runs.flat)


def test_bytes_are_those_of_the_tensors(runs: Runs) -> None:
    with safe_open(runs.folder / "export" / "model.safetensors", framework="pt") as reader:
        tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    whole = sum(t.nbytes for t in tensors.values())
    # input scales stay where they are, gate and up share one FP32 scale
    unsent = [n for n in tensors if n.endswith(("input_scale", "up_proj.weight_scale_2"))]
    values = {n: t.numel() * (2 if t.element_size() == 1 and n.endswith(".weight") else 1) for n, t in tensors.items()}
    bf16 = 2 * sum(v for n, v in values.items() if n.endswith(".weight"))
    for run, size in ((runs.folder, whole), (runs.flat, whole - 4 * len(unsent))):
        rows = read_rows(run / "metrics.jsonl")
        assert {(r["refit_bytes"], r["bf16_refit_bytes"]) for r in rows} == {(size, bf16)}


def test_what_cannot_be_flat_is_refused() -> None:
    with pytest.raises(QuadsError, match="only a local rollout takes flat refits"):
        RLConfig(model="m", out="o", refit="flat", rollout="http://127.0.0.1:8000")
    with pytest.raises(QuadsError, match="unknown refit 'fast'"):
        RLConfig(model="m", out="o", refit="fast")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_colocated_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer and engine on one GPU, BF16: through CUDA IPC, every expert weight the trainer's bit for bit."""
    monkeypatch.delenv("QUADS_GPU_MEMORY_FRACTION", raising=False)
    monkeypatch.setenv("QUADS_KV_CACHE_GIB", "1")
    task = make_task("spell_backward", {"min_word_len": 4, "max_word_len": 6})
    model = make_tiny_checkpoint(tmp_path / "init", 0, task=task)
    layout = ["--nproc", "1", "--bf16", "--lr", "1e-3", "--micro-batch-size", "8", "--quads-recipe", "qat"]
    found = {}
    for mode in ("auto", "folder"):
        out = tmp_path / mode
        done = quads("rl", "--model", model, "--out", out, *TASK, *SMALL, *layout, "--steps", "3", "--refit", mode)
        assert done.returncode == 0, done.stdout + done.stderr
        if mode == "auto":
            assert "refit: packed weights from memory, CUDA IPC" in done.stdout and _refits(out) == ["v000000"]
        rows = found[mode] = read_rows(out / "metrics.jsonl")
        assert all(r["weight_bits_mismatched"] == 0 and r["refit_bytes"] < r["bf16_refit_bytes"] for r in rows)
        print(mode, [(round(r["refit_s"], 3), r["refit_bytes"], r["bf16_refit_bytes"]) for r in rows])
