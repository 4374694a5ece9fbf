"""The rollout's process is there before the trainer, serves what was asked for, and does not outlive a failing start."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_quads.errors import QuadsError
from megatron_quads.rollout import LocalRollout
from megatron_quads.rollout.process import EngineProcess

pytestmark = pytest.mark.slow


def _loaded(pid: int, name: str) -> bool:
    return name in Path(f"/proc/{pid}/maps").read_text()


def _wait(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_it_imports_vllm_before_it_is_asked(tiny_hf: Path, tmp_path: Path) -> None:
    process = EngineProcess(tmp_path / "logs" / "rollout.log")
    _wait(lambda: _loaded(process.pid, "/zmq/"))  # of vLLM's engine; nothing else here needs it
    pid = process.pid
    with LocalRollout(tiny_hf, max_model_len=32, process=process) as rollout:
        assert rollout.pid == pid and rollout.log == tmp_path / "logs" / "rollout.log"
        assert len(rollout.score([[5, 6, 7]])[0]) == 2
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(QuadsError, match="the rollout is closed"):
        process.exchange(("info", {}))
    process.close()


def test_a_fault_in_vllm_is_reported_once_it_is_asked(
    tiny_hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('broken on purpose')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    process = EngineProcess(tmp_path / "rollout.log")
    with pytest.raises(QuadsError, match="broken on purpose"):
        LocalRollout(tiny_hf, process=process)


TRAIN = """
import sys
from unittest import mock
from megatron_quads.rl import loop, setup
from megatron_quads.rl.config import RLConfig
seen = []
real = setup.EngineProcess
def note(log):
    seen.append(real(log))
    return seen[-1]
def fail(*_, **__):
    assert len(seen) == 1 and seen[0]._process.poll() is None
    print("pid", seen[0].pid, flush=True)
    raise RuntimeError("no trainer")
with mock.patch.object(setup, "EngineProcess", note), mock.patch.object(loop, "Session", fail), \\
     mock.patch.object(setup.dist, "get_rank", lambda: 0):
    try:
        loop.train(None, None, None, RLConfig(model=sys.argv[1], out=sys.argv[2]), resume=False)
    except RuntimeError as e:
        print("failed:", e, flush=True)
"""


def test_it_ends_with_a_session_that_cannot_be_built(tiny_hf: Path, tmp_path: Path) -> None:
    """Started before the trainer; while the parent still lives it is gone."""
    words = [sys.executable, "-W", "ignore", "-c", TRAIN + "input()\n", str(tiny_hf), str(tmp_path / "run")]
    parent = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline().removeprefix("pid "))
        assert parent.stdout.readline() == "failed: no trainer\n"
        assert parent.poll() is None and not Path(f"/proc/{pid}").exists()
    finally:
        parent.kill()
        parent.wait()
