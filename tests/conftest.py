"""Session fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from helpers import make_tiny_hf


@pytest.fixture(scope="session")
def tiny_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny fp32 Qwen3-MoE HF folder (2 layers, 8 experts, vocabulary 500). Read only: copy it before changing it."""
    return make_tiny_hf(tmp_path_factory.mktemp("tiny") / "hf")
