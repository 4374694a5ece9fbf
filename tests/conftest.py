"""Session fixtures shared by all tests."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from helpers import make_tiny_hf, quads

from megatron_quads.rl.tasks import make_task
from megatron_quads.rl.tiny import TinyModel, make_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny fp32 Qwen3-MoE HF folder (2 layers, 8 experts, vocabulary 500). Read only: copy it before changing it."""
    return make_tiny_hf(tmp_path_factory.mktemp("tiny") / "hf")


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated (sorted) tiny checkpoint of the loop's tests. Read only; runs lie beside it under names of their own."""
    root = tmp_path_factory.mktemp("loop")
    task = make_task("spell_backward", {"min_word_len": 4, "max_word_len": 6})
    small = TinyModel(hidden=64, moe_intermediate=64, experts=4)
    model = make_tiny_checkpoint(root / "init", 0, task=task, model=small)
    lines = [json.dumps({"prompt": task.train(i).prompt_text}) for i in range(16)]
    (root / "prompts.jsonl").write_text("\n".join(lines))
    words = ["--model", model, "--prompts", root / "prompts.jsonl", "--out", root / "base"]
    done = quads("calibrate", *words, "--quads-rac-policy", "uniform")
    assert done.returncode == 0, done.stderr
    return root / "base"
