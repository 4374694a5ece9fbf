"""What a newcomer touches first: the environment script, the wheel, the progress bars."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from megatron_quads.screen import Screen

ROOT = Path(__file__).parent.parent


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files that the environment script reads, in a folder whose name has a space and an umlaut."""
    clone = tmp_path / "ä clone"
    for name in ("launch/setup_env.sh", "requirements/cpu.lock", "pyproject.toml"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    return clone


def setup(clone: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script; its programs are the shell's own and coreutils."""
    program = ["bash", str(clone / "launch" / "setup_env.sh")]
    return subprocess.run(program, env={"HOME": str(clone), **env}, capture_output=True, text=True, timeout=120)


def tools(folder: Path) -> Path:
    """A PATH of what the script calls, without any Python."""
    folder.mkdir()
    for name in ("bash", "cat", "cut", "df", "awk", "dirname", "sha256sum", "uname", "rm", "touch"):
        found = shutil.which(name)
        assert found, name
        (folder / name).symlink_to(found)
    return folder


def interpreter(path: Path, *, good: bool) -> None:
    """A stand-in for an interpreter: says what is asked of it and whether it would do, then refuses to make a venv."""
    path.parent.mkdir(parents=True, exist_ok=True)
    version = 'echo "Python 3.x"; exit 0' if good else "exit 1"
    usable = "exit 0" if good else "exit 1"
    path.write_text(
        f'#!/bin/bash\ncase "$1" in --version) {version};; -c) {usable};; *) echo "venv by $0"; exit 7;; esac\n'
    )
    path.chmod(0o755)


def test_without_an_interpreter_it_says_what_to_install(clone: Path, tmp_path: Path) -> None:
    path = tools(tmp_path / "bin")
    done = setup(clone, PATH=str(path))
    assert done.returncode == 2
    assert "no Python 3.12 or 3.13" in done.stderr and "apt-get install python3.12-venv" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    interpreter(path / "python3.12", good=False)  # one without venv, or a broken one
    assert setup(clone, PATH=str(path)).returncode == 2
    assert not (clone / ".venv").exists()


def test_the_finder_prefers_the_named_one_then_312_then_313_then_pyenv(clone: Path, tmp_path: Path) -> None:
    path = tools(tmp_path / "bin")
    pyenv = clone / ".pyenv" / "versions" / "3.12.7" / "bin" / "python"
    for program in (pyenv, path / "python3.13", path / "python3.12", tmp_path / "own"):
        interpreter(program, good=True)
        env = {"PYTHON": str(program)} if program.name == "own" else {}
        done = setup(clone, PATH=str(path), **env)
        assert done.returncode == 7, done.stderr
        assert f"venv by {program}" in done.stdout


def test_a_foreign_venv_is_left_alone_and_a_matching_one_is_kept(clone: Path, tmp_path: Path) -> None:
    path = tools(tmp_path / "bin")
    interpreter(path / "python3.12", good=True)
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "mine").touch()
    done = setup(clone, PATH=str(path))
    assert done.returncode == 2 and "move it away" in done.stderr
    assert (clone / ".venv" / "mine").exists()
    both = subprocess.run(
        'cat requirements/cpu.lock pyproject.toml | sha256sum | cut -d" " -f1',
        shell=True,
        cwd=clone,
        capture_output=True,
        text=True,
    )
    (clone / ".venv" / ".quads-lock.sha256").write_text(both.stdout)
    interpreter(clone / ".venv" / "bin" / "quads", good=True)
    done = setup(clone, PATH=str(path))
    assert done.returncode == 0 and done.stdout == ""
    assert (clone / ".venv" / "mine").exists()


def test_the_wheel_holds_the_linked_folders(tmp_path: Path) -> None:
    source = tmp_path / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if not name.startswith(("tests/", "docs/")) and os.path.lexists(ROOT / name):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    subprocess.run(build, cwd=source, check=True, timeout=300)
    [wheel] = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in ("kernels/nvfp4/reference.py", "kernels/rac/triton.py", "patches/registry.py", "launch/local.py"):
        assert f"megatron_quads/{name}" in names
    assert {"megatron_quads/cli.py", "megatron_quads/py.typed"} <= names
    # a top-level `kernels` package would collide with another project's
    assert {n.split("/")[0].split("-")[0] for n in names} == {"megatron_quads"}


def test_progress_follows_the_jobs_lines() -> None:
    out = io.StringIO()
    with Screen(stages=2, console=Console(file=out, force_terminal=True, width=100, color_system=None)) as screen:
        screen.stage("arm quads: GRPO")
        screen.line("step   3/20  reward [0.5]")
        assert (screen.progress.tasks[1].completed, screen.progress.tasks[1].total) == (3, 20)
        screen.stage("arm qat: GRPO")
        assert screen.progress.tasks[0].completed == 1 and screen.progress.tasks[1].completed == 0
        screen.end()
        assert screen.progress.finished or screen.progress.tasks[0].finished
    assert "step   3/20  reward [0.5]" in out.getvalue() and "all stages" in out.getvalue()
    plain = io.StringIO()
    with Screen(stages=1, console=Console(file=plain, force_terminal=False, width=80)) as screen:
        screen.line("step 1/2  " + "x" * 100)
    assert plain.getvalue() == "step 1/2  " + "x" * 100 + "\n"
