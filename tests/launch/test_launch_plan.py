"""Configuration, plan, ports, ownership and records, without a cluster."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from standin import RAC_HASH

from megatron_quads.errors import QuadsError
from megatron_quads.launch import environment, history, network, plan
from megatron_quads.launch.attempt import SLOT_BYTES, Attempt, Slot
from megatron_quads.launch.config import HERE, LaunchConfig, check, dump, load
from megatron_quads.launch.health import NoAnswer, ask, require_ours
from megatron_quads.launch.status import snapshot

SHIPPED = sorted(p.stem for p in (HERE / "configs").glob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("site", ["plain", "pyxis", "apptainer"])
def test_shipped_configurations_resolve_and_read_back(name: str, site: str, tmp_path: Path) -> None:
    config = load(name, [f"run={tmp_path / 'run'}"], site=site)
    assert check(yaml.safe_load(dump(config)), where="dump") == config
    layout = config.options
    assert config.world % layout.get("expert-model-parallel-size", 1) == 0
    assert config.world % layout.get("tensor-model-parallel-size", 1) == 0
    script, steps = plan.job_script(config), plan.commands(config)
    assert "$" not in script.replace("$@", "") and f"#SBATCH --nodes={config.nodes}" in script
    assert len(steps) == 2 + config.rollout.servers
    assert ("--container-image=/shared/images/quads.sqsh" in steps[0]) == (site == "pyxis")
    assert (" apptainer exec " in steps[0]) == (site == "apptainer")


def test_the_papers_run_is_the_papers() -> None:
    config = load("moe-25b-a3b", [])
    o = config.options
    assert (o["tensor-model-parallel-size"], o["expert-model-parallel-size"], o["steps"]) == (2, 16, 260)
    assert (o["samples-per-prompt"], o["prompts-per-step"], o["lr"]) == (16, 256, 1e-6)
    assert o["prompts-per-step"] // o["updates-per-step"] == 128


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["trainer.nods=2"], "trainer.nods"),
        (["trainer.nodes=two"], "trainer.nodes"),
        (["trainer.nodes"], "not KEY=VALUE"),
        (["name.x=1"], "name holds a value"),
        (["slurm.hetjob=true", "placement=colocated"], "nodes of their own"),
        (["environment.HF_TOKEN=hf_x"], "looks like a secret"),
        (['run=a"b'], "quotes"),
    ],
)
def test_faults_in_the_configuration_are_named(sets: list[str], said: str) -> None:
    with pytest.raises(QuadsError, match=said):
        load("tiny", sets)


def test_relative_paths_are_the_submitting_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load("tiny", ["run=here", "options.model=m", "options.task=p.jsonl"])
    assert config.run == tmp_path / "here"
    assert (config.options["model"], config.options["task"]) == (str(tmp_path / "m"), str(tmp_path / "p.jsonl"))


def test_colocated_roles_share_out_a_nodes_gpus() -> None:
    config = load("h200", [])
    assert plan.gpu_share(config, plan.trainer(config)) == (0, 4)
    assert plan.gpu_share(config, plan.rollouts(config)[0]) == (4, 4)
    assert "#SBATCH --gpus-per-node=8" in plan.job_script(config)
    four = load("qwen3-30b-a3b-4", [])
    assert plan.gpu_share(four, plan.trainer(four)) is None and [s.first for s in plan.rollouts(four)] == [2, 3]


def test_ports_follow_the_job_id_below_the_ephemeral_range() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for job in ("1", "71234", "local-ab12"):
        assert all(1024 < p < low for p in network.port_candidates(job))
    one, two = (network.port_candidates(j)[: network.PORTS_PER_JOB] for j in ("500", "501"))
    assert not set(one) & set(two)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        assert network.free_port([port, one[3]]) == one[3]
        with pytest.raises(QuadsError, match="all 1 candidate ports are taken"):
            network.free_port([port])


def test_a_slot_keeps_its_size_and_can_always_be_written(tmp_path: Path) -> None:
    slot = Slot(tmp_path / "s.json").reserve(state="running")
    slot.write(state="ended", code=9, error="é" * 5000)
    assert slot.path.stat().st_size == SLOT_BYTES
    found = slot.read()
    assert found is not None and found["code"] == 9 and found["error"].startswith("éé")


def test_a_run_folder_has_one_owner(tmp_path: Path) -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    owner = {"job": "local-1", "attempt": 0, "host": socket.gethostname(), "pid": sleeper.pid}
    (tmp_path / "owner.json").write_text(json.dumps(owner))
    with pytest.raises(QuadsError, match="in use by job local-1"):
        history.claim(tmp_path, "local-2")
    sleeper.kill()
    sleeper.wait()
    attempt = history.claim(tmp_path, "local-2")
    assert attempt.number == 0 and history.owns(attempt)
    later = history.claim(tmp_path, "local-2")  # the same job, requeued
    assert later.number == 1 and history.owns(later) and not history.owns(attempt)
    elsewhere = {**owner, "job": "local-3", "host": "another-host"}
    (tmp_path / "owner.json").write_text(json.dumps(elsewhere))
    with pytest.raises(QuadsError, match="in use by job local-3"):
        history.claim(tmp_path, "local-2")


def test_the_environment_record_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_API_KEY", "VLLM_API_KEY", "HF_TOKEN", "SLURM_JWT", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "hidden-value")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("VLLM_PROXY", "http://me:hidden-value@host/")
    record = environment.record(LaunchConfig(run=Path("/x")))
    assert record["variables"]["NCCL_DEBUG"] == "INFO" and "hidden-value" not in json.dumps(record)


def test_a_server_of_another_job_attempt_or_selection_is_refused() -> None:
    port = network.free_port(network.port_candidates("4242"))
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(NoAnswer):
        ask(url)
    env = {**os.environ, "QUADS_JOB_ID": "77", "QUADS_ATTEMPT": "3"}
    file = Path(__file__).with_name("standin.py")
    server = subprocess.Popen([sys.executable, str(file), "rollout", "127.0.0.1", str(port)], env=env)
    try:
        deadline = time.monotonic() + 30
        info = None
        while info is None and time.monotonic() < deadline:
            try:
                info = ask(url)
            except NoAnswer:
                time.sleep(0.1)
        assert info is not None
        require_ours(info, job="77", attempt=3, where=url, rac_hash=RAC_HASH)
        for job, attempt in (("78", 3), ("77", 2)):
            with pytest.raises(QuadsError, match="belongs to job 77, attempt 3, not to"):
                require_ours(info, job=job, attempt=attempt, where=url)
        with pytest.raises(QuadsError, match="runs RAC metadata 0123abcd, the run has feed"):
            require_ours(info, job="77", attempt=3, where=url, rac_hash="feed")
    finally:
        server.kill()
        server.wait()


def test_status_tells_a_lost_supervisor_from_a_running_one(tmp_path: Path) -> None:
    with pytest.raises(QuadsError, match="no attempt was made"):
        snapshot(tmp_path)
    attempt = Attempt.create(tmp_path)
    (attempt.path / "plan.json").write_text(json.dumps({"job": "5", "start_step": 0}))
    attempt.slot("driver").reserve(state="running", node="n0")
    attempt.slot("rollout-0").reserve(state="running", node="n1")
    (attempt.path / "endpoints" / "health-0.json").write_text(json.dumps({"version": 7, "restarts": 1}))
    row = {"step": 7, "train_rollout_logprob_abs_diff/mean": 0.01, "tokens_per_s": 50.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n" + '{"step": 8, "torn')
    (attempt.path / "heartbeat").touch()
    found = snapshot(tmp_path)
    assert (found["state"], found["step"], found["gap"], found["tokens_per_s"]) == ("running", 7, 0.01, 50.0)
    assert [(r["role"], r["version"], r["restarts"]) for r in found["rows"]] == [
        ("driver", "", 0),
        ("rollout-0", "7", 1),
    ]
    os.utime(attempt.path / "heartbeat", (1, 1))
    assert snapshot(tmp_path)["state"].startswith("lost: no sign for")
