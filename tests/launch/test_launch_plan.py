"""Configuration, plan, ports, ownership and records, without a cluster."""

from __future__ import annotations

import itertools
import json
import os
import shlex
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
from megatron_quads.launch.config import HERE, LaunchConfig, check, dump
from megatron_quads.launch.health import NoAnswer, ask, require_ours
from megatron_quads.launch.load import load
from megatron_quads.launch.status import snapshot
from megatron_quads.launch.verdict import End, end_of_trainer, require_running, require_usable

# reproduce*.yaml are for `quads reproduce`
SHIPPED = sorted(p.stem for p in (HERE / "configs").glob("*.yaml") if not p.stem.startswith("reproduce"))


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
        (["slurm.time=12:00:00"], "quote it"),
        (["slurm.partition=a b"], "slurm.partition"),
        (['slurm.extra=["a\\n#SBATCH -N9"]'], "slurm.extra"),
        (["options=[1]"], "options"),
        (["options.out=x"], "options.out is set by the launch"),
        (["options.nproc=2"], "options.nproc is set by the launch"),
        (["job=export"], "job export is for command export"),
        (["job=train"], "job train has no rollout servers"),
        (["command=calibrate"], "rollout.servers is for command rl"),
        (["site=3"], "site"),
    ],
)
def test_faults_in_the_configuration_are_named(sets: list[str], said: str) -> None:
    with pytest.raises(QuadsError, match=said):
        load("tiny", sets)


@pytest.mark.parametrize("text", [b"", b"- 1", b"a:\tb: [", b"\xe2\x28\xa1", b"1: 2", b"trainer: 3"])
def test_a_file_that_is_no_configuration_gets_one_line(text: bytes, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(text)
    with pytest.raises(QuadsError) as e:
        load(file, ["run=r"])
    assert str(file) in str(e.value) and "\n" not in str(e.value)


def test_relative_paths_are_the_submitting_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load("tiny", ["run=here", "options.model=m", "options.task=p.jsonl"])
    assert config.run == tmp_path / "here"
    assert (config.options["model"], config.options["task"]) == (str(tmp_path / "m"), str(tmp_path / "p.jsonl"))


def test_colocated_roles_share_out_a_nodes_gpus() -> None:
    config = load("h200x8", [])
    assert plan.gpu_share(config, plan.trainer(config)) == (0, 4)
    assert plan.gpu_share(config, plan.rollouts(config)[0]) == (4, 4)
    assert "#SBATCH --gpus-per-node=8" in plan.job_script(config)
    four = load("qwen3-30b-a3b-4", [])
    assert plan.gpu_share(four, plan.trainer(four)) is None and [s.first for s in plan.rollouts(four)] == [2, 3]


def test_the_one_h200_configuration_is_the_published_run(tmp_path: Path) -> None:
    """Its command and GPU share are those that docs/results/loop_h200.md names; engine and trainer share the GPU."""
    page = (HERE.parent / "docs" / "results" / "loop_h200.md").read_text()
    lines = page[page.index("    QUADS_GPU_MEMORY_FRACTION=") :].split("\n    quads compare")[0]
    share, *published = shlex.split(lines.replace("\\\n", " "))
    config = load("h200", ["run=runs/quads"])
    asked = plan.rank_command(config, resume=False)[3:]
    assert published[0] == "quads" and _pairs(published[1:]) == _pairs(asked)
    assert share.partition("=")[::2] == (name := "QUADS_GPU_MEMORY_FRACTION", config.environment[name])
    assert not plan.rollouts(config) and "#SBATCH --gpus-per-node=1" in plan.job_script(config)


def _pairs(words: list[str]) -> dict[str, object]:
    """``rl --a 1 --b`` as {"rl": None, "--a": 1, "--b": None}: JSON where it is, full paths."""
    out: dict[str, object] = {}
    for word, value in itertools.zip_longest(words, words[1:]):
        if word.startswith("--") or word == "rl":
            flag = word == "rl" or value is None or value.startswith("--")
            out[word] = None if flag else value
            if not flag and value[0] in "0123456789{":
                out[word] = json.loads(value)
            elif word in ("--model", "--out"):
                out[word] = os.path.abspath(value)
    return out


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


def test_only_committed_checkpoints_are_resumed(tmp_path: Path) -> None:
    for step, committed in ((3, True), (9, False)):
        folder = tmp_path / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        if committed:
            (folder / "COMMITTED.json").write_text("{}")
    assert history.latest_step(tmp_path) == 3


def test_nodes_are_reached_by_a_way_that_leaves_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"n0": "127.0.1.1", "n1": "10.1.2.3", "m0": "127.0.0.1", "m1": "127.0.0.1"}
    monkeypatch.setattr(network, "address_of", table.__getitem__)
    assert network.outward("10.1.2.2", ["n0", "n1"]) == ("10.1.2.2", True)
    assert network.outward("127.0.1.1", ["n0", "n1"]) == ("10.1.2.3", True)  # n0's host file names its loopback
    assert network.outward("127.0.0.1", ["m0", "m1"]) == ("127.0.0.1", False)  # SLURM's nodes on one host
    assert network.outward("127.0.1.1", ["n0"]) == ("127.0.1.1", False)


def test_ends_are_told_by_the_status_files() -> None:
    node = {"node": "n0", "time": 2.0}
    assert require_running(None, {"n0": node})
    assert not require_running(0, {"n0": {**node, "code": 0}})
    stopped = {**node, "code": 143, "reason": "told to", "time": 1.0}
    with pytest.raises(End, match="trainer rank 3 on n1 ended with exit code 9: boom") as e:
        require_running(1, {"n0": stopped, "n1": {"node": "n1", "code": 9, "rank": 3, "error": "boom", "time": 2.0}})
    assert e.value.code == 9
    with pytest.raises(End, match="ended with 137 without a word from n0") as e:
        require_running(-9, {"n0": node})
    probe = {"code": 0, "master": "10.0.0.1", "port": 20001, "interface": "ib0"}
    local = {**probe, "master": "127.0.1.1"}
    assert require_usable({"n0": local, "n1": probe}, "n0", waited_s=1)["master_address"] == "10.0.0.1"
    with pytest.raises(End, match="node n1 could not start a step within 1 s"):
        require_usable({"n0": probe, "n1": {}}, "n0", waited_s=1)
    with pytest.raises(End, match="node n1 is not usable: the line above says why"):
        require_usable({"n0": probe, "n1": {}}, "n0", waited_s=1, code=2)
    with pytest.raises(End, match="different addresses"):
        require_usable({"n0": probe, "n1": {**probe, "master": "10.9.9.9"}}, "n0", waited_s=1)
    assert end_of_trainer(None, None, requeue=True).code == 0
    saved = end_of_trainer({"reason": "SIGUSR1"}, {"step": 4}, requeue=True)
    assert (saved.code, saved.why, saved.requeue) == (75, "SIGUSR1: saved step 4", True)


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
