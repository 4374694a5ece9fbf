"""Signals, limits and preemption: saved first, back to the queue, and the same numbers as an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from slurm_cluster import Cluster, Launch
from standin import expected

pytestmark = pytest.mark.slow
TWO = {"nodes": 2, "ranks_per_node": 1}


def test_usr1_during_a_slow_save_loses_nothing(idle: Cluster, run: Path) -> None:
    standin = {"steps": 8, "save_every": 3, "save_s": 3.0, "step_s": 0.3}
    job = Launch(idle, run, standin, trainer=TWO, rollout={"servers": 1}).submit()
    job.until(lambda: (run / "checkpoints" / ".step_000003.writing").exists())
    idle.run("scancel", "--signal=USR1", job.job)  # every process of every step ...
    idle.run("scancel", "--signal=USR1", "--batch", job.job)  # ... and the supervisor
    assert job.wait() == ("COMPLETED", 0), job.output()
    assert idle.show(job.job)["Restarts"] == "1"
    committed = sorted(p.parent.name for p in (run / "checkpoints").glob("step_*/COMMITTED.json"))
    assert committed[0] == "step_000003" and not list((run / "checkpoints").glob(".step*"))
    first, second = (json.loads((run / f"attempt-{n}" / "plan.json").read_text()) for n in (0, 1))
    assert (first["start_step"], second["start_step"]) == (0, int(committed[0][-1]))
    assert job.rows() == expected(8, servers=True)


def test_preemption_without_a_user_signal_saves_requeues_and_resumes_with_the_same_metrics(
    idle: Cluster, run: Path
) -> None:
    """As without preempt_send_user_signal: the steps get SIGTERM, the supervisor nothing. With it: test_launch_loop."""
    steps, slurm = 12, {"signal_before_s": 0}
    job = Launch(idle, run, {"steps": steps, "step_s": 0.5}, rollout={"servers": 2}, slurm=slurm).submit()
    job.until_step(4)
    urgent = idle.run(
        "sbatch", "--parsable", "-p", "urgent", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 2"
    )
    assert idle.wait(urgent.strip())[0] == "COMPLETED"
    assert job.wait() == ("COMPLETED", 0), job.output()
    assert job.slot("driver")["state"] == "requeued"
    start = json.loads((run / "attempt-1" / "plan.json").read_text())["start_step"]
    assert start >= 4 and job.rows() == expected(steps, servers=True)
    assert "told to save and exit: signal on node" in job.printed() and "SIGUSR1" not in job.printed()


def test_the_time_limit_saves_and_requeues(idle: Cluster, run: Path) -> None:
    job = Launch(idle, run, {"steps": 100, "step_s": 0.5}, slurm={"time": "00:10:00", "signal_before_s": 110}).submit()
    job.until_step(4)
    idle.run(
        "scontrol", "update", f"jobid={job.job}", "timelimit=2"
    )  # the signal is due (SLURM looks every 30 s), the end is not
    job.until(lambda: job.slot("driver").get("state") == "requeued")
    job.until(lambda: idle.show(job.job)["JobState"] == "PENDING")
    idle.run("scontrol", "update", f"jobid={job.job}", "timelimit=10")
    assert job.wait() == ("COMPLETED", 0), job.output()
    assert idle.show(job.job)["Restarts"] == "1" and "SIGUSR1: saved step" in job.printed()
    assert job.rows() == expected(100, servers=False)


def test_a_heterogeneous_job_runs_and_requeues(idle: Cluster, run: Path) -> None:
    job = Launch(
        idle, run, {"steps": 12, "step_s": 0.4}, rollout={"servers": 2}, trainer=TWO, slurm={"hetjob": True}
    ).submit()
    job.until_step(3)
    assert len(json.loads((run / "attempt-0" / "plan.json").read_text())["nodes"]) == 2
    idle.run("scancel", "--signal=USR1", "--batch", job.job)
    assert job.wait() == ("COMPLETED", 0), job.output()
    assert (run / "attempt-1").exists() and job.rows() == expected(12, servers=True)


def test_a_job_without_progress_is_not_requeued_for_ever(idle: Cluster, run: Path) -> None:
    job = Launch(idle, run, {"steps": 5, "step_s": 60.0}).submit()
    for attempt in range(2):
        job.until(lambda n=attempt: job.slot("rank-0", n).get("state") == "running")
        idle.run("scontrol", "requeue", job.job)
    assert job.wait() == ("FAILED", 72), job.output()
    assert "2 attempts in a row made no progress past step 0 (limits.max_idle_attempts)" in job.printed()


def test_requeues_are_counted(idle: Cluster, run: Path) -> None:
    job = Launch(idle, run, {"steps": 500, "step_s": 0.2}, limits={"max_requeues": 1}).submit()
    for attempt in range(2):
        job.until(lambda n=attempt: job.slot("rank-0", n).get("state") == "running")
        seen = len(job.rows())
        job.until_step(seen + 2)
        idle.run("scancel", "--signal=USR1", "--batch", job.job)
    assert job.wait() == ("FAILED", 72), job.output()
    assert "not requeued: requeued 2 times, the limit is 1 (limits.max_requeues)" in job.printed()
    assert (run / "checkpoints" / f"step_{len(job.rows()):06d}" / "COMMITTED.json").exists()


def test_scancel_is_an_end(idle: Cluster, run: Path) -> None:
    job = Launch(idle, run, {"steps": 500}, rollout={"servers": 1}).submit()
    job.until_step(2)
    idle.run("scancel", job.job)
    assert job.wait()[0] == "CANCELLED"
    assert not (run / "attempt-1").exists()


def test_the_login_node_may_lose_the_controller(idle: Cluster, run: Path) -> None:
    job = Launch(idle, run, {"steps": 40, "step_s": 0.3}, rollout={"servers": 1}).submit()
    job.until_step(2)
    os.kill(idle.pid("slurmctld"), signal.SIGKILL)
    try:
        seen = json.loads(idle.quads("status", str(run), "--json").stdout)
        assert seen["state"] == "running" and seen["step"] >= 2 and seen["job"] == job.job
        refused = idle.quads("submit", str(job.file), "--set", f"run={run.with_name('other')}")
        assert refused.returncode == 2, refused
        assert refused.stderr.startswith("quads: error: SLURM ") and len(refused.stderr.splitlines()) == 1
        job.until_step(len(job.rows()) + 2)
    finally:
        idle.run("slurmctld")
    assert job.wait() == ("COMPLETED", 0), job.output()
