"""What goes wrong on a cluster, one kind a test: the job must name it, end with the true code and leave nothing."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from slurm_cluster import HERE, Cluster, Launch
from standin import expected

from megatron_quads.launch.network import port_candidates

pytestmark = pytest.mark.slow
TWO = {"nodes": 2, "ranks_per_node": 1}


def test_a_rank_that_exits_9_ends_the_job_with_9(idle: Cluster, run: Path) -> None:
    job = Launch(idle, run, {"fault": "exit9", "steps": 50, "gloo": True}, trainer=TWO, rollout={"servers": 1}).submit()
    assert job.wait() == ("FAILED", 9)
    assert "trainer rank 1 on node1 ended with exit code 9" in job.printed()
    assert job.slot("rank-1")["code"] == 9
    assert job.slot("driver")["state"] == "failed"


def test_a_server_killed_during_a_refit_is_restarted_and_gets_the_current_weights(idle: Cluster, run: Path) -> None:
    job = Launch(idle, run, {"steps": 4, "step_s": 0.1, "update_s": 2.0}, rollout={"servers": 2}).submit()
    job.until_step(1)
    updating = run / "attempt-0" / "control" / f"updating-{job.slot('rollout-1')['pid']}"
    updating.unlink()
    job.until(updating.exists)
    job.kill_role("rollout-1")
    assert job.wait() == ("COMPLETED", 0), job.output()
    assert "rollout server 1 on node2 was killed by signal 9: restarts it" in job.printed()
    endpoint = json.loads((run / "attempt-0" / "endpoints" / "1.json").read_text())
    assert endpoint["incarnation"] == 1
    # samples depend on the version that the server holds: a restarted one without a refit would give others
    assert job.rows() == expected(4, servers=True)


def test_a_server_that_keeps_dying_makes_the_trainer_save_and_the_job_end(idle: Cluster, run: Path) -> None:
    job = Launch(idle, run, {"steps": 400}, rollout={"servers": 1, "max_restarts": 1}).submit()
    job.until_step(2)
    job.kill_role("rollout-0")
    job.until(lambda: job.slot("rollout-0").get("incarnation") == 1 and job.slot("rollout-0")["state"] == "running")
    steps = len(job.rows())
    job.until_step(steps + 2)
    job.kill_role("rollout-0")
    assert job.wait() == ("FAILED", 70), job.output()
    assert "it was restarted 1 times (rollout.max_restarts); the trainer saved step" in job.printed()
    saved = max(p.name for p in (run / "checkpoints").glob("step_*"))
    assert int(saved.removeprefix("step_")) == len(job.rows()) > steps
    assert f"the trainer saved step {len(job.rows())}" in job.printed()
    assert job.rows() == expected(len(job.rows()), servers=True)  # the first restart got the current weights


def test_a_killed_supervisor_ends_the_job_and_the_run_resumes(idle: Cluster, run: Path) -> None:
    standin = {"steps": 20, "step_s": 0.3, "save_every": 2}
    job = Launch(idle, run, standin, trainer=TWO, rollout={"servers": 1}).submit()
    job.until_step(3)
    os.kill(job.slot("driver")["pid"], signal.SIGKILL)
    assert job.wait() == ("FAILED", -signal.SIGKILL), job.output()
    again = Launch(idle, run, standin, trainer=TWO, rollout={"servers": 1}).submit("--resume")
    assert again.wait() == ("COMPLETED", 0), again.output()
    assert json.loads((run / "attempt-1" / "plan.json").read_text())["start_step"] >= 2
    assert again.rows() == expected(20, servers=True)


def test_node_death_requeues_on_other_nodes_and_fences_the_lost_one(idle: Cluster, run: Path) -> None:
    job = Launch(idle, run, {"steps": 75, "step_s": 0.4, "save_every": 5}, trainer=TWO, rollout={"servers": 1}).submit()
    job.until_step(6)
    os.kill(idle.pid("slurmd-node1"), signal.SIGKILL)
    try:
        assert job.wait() == ("COMPLETED", 0), job.output()
        assert idle.show(job.job)["Restarts"] == "1"
        assert "node1" not in json.loads((run / "attempt-1" / "plan.json").read_text())["nodes"][0]
        assert job.rows() == expected(75, servers=True)
        assert json.loads((run / "attempt-1" / "plan.json").read_text())["start_step"] >= 5
    finally:
        idle.restart_node("node1")


def test_a_node_that_cannot_start_a_step_is_named(idle: Cluster, run: Path) -> None:
    number = idle.pid("slurmd-node3")
    os.kill(number, signal.SIGSTOP)
    try:
        job = Launch(idle, run, trainer={"nodes": 4, "ranks_per_node": 1}, limits={"node_start_s": 5}).submit()
        job.until(lambda: job.slot("driver").get("state") == "failed")
    finally:
        os.kill(number, signal.SIGCONT)
    assert job.slot("driver")["code"] == 71
    job.wait()
    assert "node node3 could not start a step within 5 s; exclude it" in job.printed()


@pytest.mark.parametrize(
    ("interface", "said"), [("eth9", "eth9 does not exist or has no address"), ("lo", "lo cannot reach other nodes")]
)
def test_a_wrong_interface_is_refused_with_the_right_ones(idle: Cluster, run: Path, interface: str, said: str) -> None:
    idle.needs_network()
    job = Launch(idle, run, trainer=TWO, site={"interface": interface}).submit()
    assert job.wait() == ("FAILED", 2)
    assert said in job.printed() and "choose one of: eth0 (10." in job.printed()


def test_taken_ports_are_passed_over_and_a_stale_server_is_refused(idle: Cluster, run: Path) -> None:
    idle.needs_network()
    job = Launch(idle, run, {"steps": 30, "step_s": 0.3}, rollout={"servers": 1})
    next_job = str(int(idle.run("sbatch", "--parsable", "-o", "/dev/null", "--wrap", "true")) + 1)
    stale_env = {"QUADS_JOB_ID": "99999", "QUADS_ATTEMPT": "0"}
    stale = []
    trainer_port, server_port = (port_candidates(next_job, offset)[0] for offset in (0, 1))
    for node, port in itertools.product(("node0", "node1", "node2", "node3"), (trainer_port, server_port)):
        command = [sys.executable, str(HERE / "standin.py"), "rollout", "0.0.0.0", str(port)]
        stale.append(idle.on_node(node, *command, env=stale_env))
    try:
        for process in stale:  # the ports must be taken before the job looks for one
            assert process.stdout is not None
            while not process.stdout.readline().startswith("serving on"):
                assert process.poll() is None
        idle.wait_idle()
        job.submit()
        assert job.job == next_job
        job.until_step(2)
        attempt = run / "attempt-0"
        assert json.loads((attempt / "plan.json").read_text())["master_port"] == trainer_port + 2
        endpoint = attempt / "endpoints" / "0.json"
        ours = json.loads(endpoint.read_text())
        host, _, port = ours["url"].rpartition(":")
        assert int(port) == server_port + 1
        endpoint.write_text(json.dumps({**ours, "url": f"{host}:{server_port}"}))
        assert job.wait() == ("COMPLETED", 0), job.output()
    finally:
        for process in stale:
            process.kill()
            process.wait()
    assert "a stale server answers: it belongs to job 99999, attempt 0, not to job" in job.printed()
    assert json.loads(endpoint.read_text())["incarnation"] == 1


def test_a_full_disk_keeps_the_last_checkpoint_and_names_itself(idle: Cluster) -> None:
    idle.needs_network()  # and a small disk
    run = idle.small / "run"
    settings = {"steps": 12, "save_every": 2, "ballast": 1_000_000}
    job = Launch(idle, run, settings)
    filler = idle.small / "filler"
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as f:
        while f.write(bytes(4096)):
            pass
    refused = idle.quads("submit", str(job.file))
    assert refused.returncode == 2 and "No space left on device" in refused.stderr, refused.stderr
    assert len(refused.stderr.splitlines()) == 1 and not idle.run("squeue", "-h")
    filler.unlink()
    job.submit()
    assert job.wait() == ("FAILED", 2), job.output()
    reason = job.slot("driver")["reason"]
    assert "cannot write: No space left on device" in reason and "/checkpoints/" in reason
    steps = [p for p in (run / "checkpoints").glob("step_*") if (p / "COMMITTED.json").exists()]
    assert steps
    for aside in (run / "checkpoints").glob(".step*"):
        shutil.rmtree(aside)
    for checkpoint in steps:  # free space; what is left of a checkpoint is its number
        for shard in "01":
            (checkpoint / shard).write_text((checkpoint / shard).read_text()[:64])
    again = Launch(idle, run, {**settings, "ballast": 0}).submit("--resume")
    assert again.wait() == ("COMPLETED", 0), again.output()
    assert [r["step"] for r in again.rows()] == list(range(1, 13))
