"""Submitting: from anywhere, what was shown is what runs, nobody's folder is taken, no secret is written."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster, Launch, require_gone

pytestmark = pytest.mark.slow
SECRETS = {"HF_TOKEN": "hf_s3cr3tvalue", "WANDB_API_KEY": "wb_s3cr3tvalue", "NCCL_TEST_PASSWORD": "nc_s3cr3tvalue"}


def test_dry_run_from_another_folder_is_what_runs_and_secrets_stay_out(
    idle: Cluster, tmp_path: Path, run: Path
) -> None:
    elsewhere = tmp_path / "some where"
    elsewhere.mkdir()
    # colocated, with GPUs of the nodes shared out; the run folder is given relative to the submitting folder
    job = Launch(
        idle,
        run,
        {"steps": 4},
        placement="colocated",
        trainer={"nodes": 2, "ranks_per_node": 1, "gpus_per_node": 3},
        rollout={"servers": 2, "gpus_per_server": 2},
    )
    relative = ["--set", f"run=../{run.relative_to(tmp_path)}"]
    shown = idle.quads("submit", str(job.file), *relative, "--dry-run", cwd=elsewhere)
    assert shown.returncode == 0, shown.stderr
    assert not run.exists()
    # a proxy that does not exist: nothing inside the cluster may be asked through it
    env = {**SECRETS, "http_proxy": "http://user:pr0xyvalue@127.0.0.1:9", "NCCL_DEBUG": "WARN"}
    job.submit(*relative, cwd=elsewhere, env=env)
    assert job.wait() == ("COMPLETED", 0), job.output()

    assert (run / "launch" / "dry_run.txt").read_text() == shown.stdout
    script = idle.run("scontrol", "write", "batch_script", job.job, "-")
    assert script.strip() in shown.stdout and "#SBATCH --gpus-per-node=5" in script
    assert (run / "launch" / "config.yaml").read_text() in shown.stdout
    started = [line.split(": ", 3)[3] for line in job.printed().splitlines() if ": starts " in line]
    steps = shown.stdout.split("# steps\n")[1].split("# each trainer rank")[0].splitlines()
    assert started == steps and len(steps) == 4
    rank = shown.stdout.strip().splitlines()[-1]
    assert shlex.split(rank)[-1] == "trainer" and rank in (run / "attempt-0" / "trainer" / "node1.log").read_text()
    assert "visible GPUs: 0,1,2" in (run / "attempt-0" / "trainer" / "node1.log").read_text()
    assert "visible GPUs: 3,4" in (run / "attempt-0" / "rollout" / "node1.log").read_text()
    assert (run / "attempt-0" / "driver" / "node0.log").exists()

    written = b"".join(p.read_bytes() for p in run.rglob("*") if p.is_file())
    for value in ("s3cr3tvalue", "pr0xyvalue"):
        assert value.encode() not in written
    assert "has HF_TOKEN: True" in (run / "attempt-0" / "trainer" / "node0.log").read_text()
    record = json.loads((run / "attempt-0" / "environment.json").read_text())
    assert record["variables"]["NCCL_DEBUG"] == "WARN" and record["packages"]["torch"]


def test_test_only_asks_slurm(idle: Cluster, run: Path) -> None:
    job = Launch(idle, run)
    good = idle.quads("submit", str(job.file), "--test-only")
    assert good.returncode == 0 and "to start at" in good.stdout
    bad = idle.quads("submit", str(job.file), "--test-only", "--set", "slurm.partition=nowhere")
    assert bad.returncode == 2
    assert bad.stderr.startswith("quads: error: SLURM refuses the job:") and "partition" in bad.stderr
    assert not run.exists()
    closed = idle.quads("submit", str(job.file), "--set", "run=/dev/null/run")
    assert closed.returncode == 2 and closed.stderr.startswith("quads: error: cannot write: Not a directory")
    assert len(closed.stderr.splitlines()) == 1 and not idle.run("squeue", "-h")


def test_a_run_folder_has_one_job_which_status_follows(idle: Cluster, run: Path) -> None:
    """Refused: the other of two submits at once, one beside a running job, and a job that got past both."""
    job = Launch(idle, run, {"steps": 14, "step_s": 1.0}, rollout={"servers": 1})
    command = [*idle.on_ctl, sys.executable, "-m", "megatron_quads.cli"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": idle.env}
    idle.run("scontrol", "update", "partition=batch", "state=down")
    try:
        both = [subprocess.Popen([*command, "submit", str(job.file)], **pipes) for _ in range(2)]  # type: ignore[call-overload]
        said = {p.wait(): p.communicate() for p in both}
        assert sorted(said) == [0, 2], said
        job.job = said[0][0].split()[1].rstrip(";")
        assert f"run folder is in use by job {job.job}" in said[2][1]
        queued = json.loads(idle.quads("status", str(run), "--json").stdout)
        assert (queued["state"], queued["job"], queued["rows"]) == ("queued", job.job, [])
        master, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
        watch = subprocess.Popen([*command, "status", str(run), "--watch"], stdout=terminal, env=idle.env)
        os.close(terminal)
        shown: list[bytes] = []
        reader = threading.Thread(target=lambda: shown.extend(_read_all(master)), daemon=True)
        reader.start()
        job.until(lambda: b"queued" in b"".join(shown))
    finally:
        idle.run("scontrol", "update", "partition=batch", "state=up")
    job.until_step(2)
    late = idle.run("sbatch", "--parsable", str(run / "launch" / "job.sbatch")).strip()
    early = idle.quads("submit", str(job.file), "--resume")
    assert early.returncode == 2 and f"run folder is in use by job {job.job}" in early.stderr
    assert idle.wait(late) == ("FAILED", 2)
    assert f"run folder is in use by job {job.job}" in (run / "launch" / f"slurm-{late}.out").read_text()
    assert job.wait() == ("COMPLETED", 0), job.output()
    assert not (run / "attempt-1").exists() and [r["step"] for r in job.rows()] == list(range(1, 15))
    again = idle.quads("submit", str(job.file))
    assert again.returncode == 2 and "already holds a run" in again.stderr
    assert watch.wait(60) == 0
    reader.join(60)
    text = b"".join(shown).decode()
    for words in ("queued", "running", "done (exit code 0)", "rollout-0", "trainer-node0", "rank-1"):
        assert words in text, text
    steps = {int(s) for s in re.findall(r"step (\d+) ", text)}
    assert len(steps) >= 4 and max(steps) == 14, steps  # it was live
    assert "tokens/s" in text and "gap 1.00e-02" in text
    # the weight version of each server, between state and restarts
    assert len(set(re.findall(r"rollout-0 +node1 +running +(\d+)", text))) >= 3, text


def _read_all(fd: int) -> Iterator[bytes]:
    """What a terminal's other side wrote, until it is closed."""
    with contextlib.suppress(OSError):
        while data := os.read(fd, 65536):
            yield data


def test_local_runs_the_same_plan_without_slurm(idle: Cluster, run: Path) -> None:
    job = Launch(idle, run, {"steps": 4}, trainer={"nodes": 1, "ranks_per_node": 2}, rollout={"servers": 1})
    done = idle.quads("submit", str(job.file), "--local")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [r["step"] for r in job.rows()] == [1, 2, 3, 4]
    require_gone(run)
    shown = idle.quads("status", str(run))
    assert shown.returncode == 0 and "rollout-0" in shown.stdout and "step 4" in shown.stdout
    bad = Launch(idle, run.with_name("bad"), {"fault": "exit9"}, trainer={"nodes": 1, "ranks_per_node": 2})
    done = idle.quads("submit", str(bad.file), "--local")
    assert done.returncode == 9 and "trainer rank 1" in done.stdout
    require_gone(bad.run)
    lost = Launch(idle, run.with_name("lost"), {"steps": 900}, rollout={"servers": 1}, limits={"fence_s": 3})
    words = [*idle.on_ctl, sys.executable, "-m", "megatron_quads.cli", "submit", str(lost.file), "--local"]
    submit = subprocess.Popen(words, env=idle.env, stdout=subprocess.DEVNULL)
    lost.until_step(2)
    os.kill(lost.slot("driver")["pid"], signal.SIGKILL)
    assert submit.wait(60) == 137
    require_gone(lost.run)  # the roles miss its heartbeat
