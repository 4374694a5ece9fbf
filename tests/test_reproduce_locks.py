"""Several processes in one folder: each run belongs to one, parts that all need are made once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from reproduce_helpers import make_root

HOLD = """
import sys
from pathlib import Path
from megatron_quads.reproduce.folder import Root
root = Root.read(Path(sys.argv[1]))
with root.run_lock("ours", 0) as mine, root.lock("bases"):
    print(mine, flush=True)
    sys.stdin.readline()
    Path(sys.argv[2]).write_text("made")
"""


def test_a_run_and_a_part_belong_to_one_process(tmp_path: Path) -> None:
    root, made = make_root(tmp_path / "root"), tmp_path / "made"
    command = [sys.executable, "-W", "ignore", "-c", HOLD, str(root.path), str(made)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "True\n"
        with root.run_lock("ours", 0) as mine, root.run_lock("ours", 1) as next_one:
            assert not mine and next_one
        other.stdin.write("\n")
        other.stdin.flush()
        with root.lock("bases"):  # waits for the other
            assert made.read_text() == "made"
    assert other.returncode == 0
    with root.run_lock("ours", 0) as mine:
        assert mine


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    command = [sys.executable, "-W", "ignore", "-c", HOLD, str(root.path), str(tmp_path / "made")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "True\n"
        other.kill()
    with root.run_lock("ours", 0) as mine, root.lock("bases"):
        assert mine
