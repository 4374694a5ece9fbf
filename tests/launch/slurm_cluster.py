"""A real SLURM on this host for the tests: every node has its own network, host name and mounts.

Where the kernel does not allow that (a container without CAP_SYS_ADMIN and CAP_NET_ADMIN), all nodes share this host's
loopback: SLURM, steps, signals and node deaths are as real, and the tests that need several addresses or a disk of
their own are skipped, each with that reason.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).resolve().parent
PACKAGES = "slurm-wlm munge iproute2"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")


class Cluster:
    """Controller and nodes; ``run`` runs a command on the login node."""

    def __init__(self, folder: Path, *, nodes: int = 4, small_mb: int = 4) -> None:
        self.folder, self.count = folder, nodes
        self._anchor: subprocess.Popen[bytes] | None = None
        path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"  # daemons are not on every user's PATH
        missing = [p for p in ("munged", "slurmctld", "slurmd", "sbatch", "ip") if shutil.which(p, path=path) is None]
        if missing:
            raise NoSlurm(f"{', '.join(missing)} not found: apt-get install --no-install-recommends {PACKAGES}")
        self.own_network = may_make_networks()
        self.small = folder / "small disk"
        self.small.mkdir(parents=True)
        if self.own_network:  # mounted before the nodes start: each of them has mounts of its own
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={small_mb}m", "none", str(self.small)], check=True)
        self.env = {
            **os.environ,
            "PATH": path,
            "SLURM_TEST_DIR": str(folder / "slurm"),
            "SLURM_TEST_NODES": str(nodes),
            "SLURM_TEST_NETNS": str(int(self.own_network)),
            "SLURM_TEST_GPUS": "8",
            "SLURM_TEST_GRACE": "120",
            "SLURM_TEST_TAG": f"q{os.getpid() % 10000}x",
            "SLURM_TEST_PORT": str(17000 + os.getpid() % 500 * 4),
            "SLURM_TEST_NET": f"10.77.{os.getpid() % 250}",
        }
        (folder / "slurm").mkdir()
        up = subprocess.run([str(HERE / "slurm_up.sh")], env=self.env, capture_output=True, text=True)
        if up.returncode:
            self.down()
            raise NoSlurm(f"SLURM did not start: {up.stderr[-3000:]}")
        self.env["SLURM_CONF"] = str(folder / "slurm" / "slurm.conf")
        self.on_ctl: list[str] = []
        if not self.own_network:
            return
        # commands run beside a process of the login node, which outlives the controller
        on_ctl = folder / "slurm" / "run" / "on_ctl"
        self._anchor = subprocess.Popen([str(on_ctl), "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE)
        assert self._anchor.stdout is not None
        self._anchor.stdout.readline()
        login = folder / "on_login"
        login.write_text(f'#!/bin/sh\nexec nsenter -t {self._anchor.pid} -n -m -u --wd="$PWD" -- "$@"\n')
        login.chmod(0o755)
        self.on_ctl = [str(login)]

    def down(self) -> None:
        """End every daemon, remove the networks and the mount."""
        subprocess.run([str(HERE / "slurm_down.sh")], env=self.env, check=False)
        if self._anchor is not None:
            self._anchor.kill()
            self._anchor.wait()
        if self.own_network:
            subprocess.run(["umount", "-l", str(self.small)], check=False)

    def needs_network(self) -> None:
        """Skip the test where nodes share this host's addresses and disks."""
        if not self.own_network:
            pytest.skip("needs nodes with networks of their own: CAP_SYS_ADMIN and CAP_NET_ADMIN")

    def run(self, *words: str, cwd: Path | None = None, env: dict[str, str] | None = None, check: bool = True) -> str:
        """Standard output of a command on the login node."""
        done = self.process(*words, cwd=cwd, env=env)
        if check and done.returncode:
            raise AssertionError(f"{words}: {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def process(
        self, *words: str, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A command on the login node."""
        return subprocess.run(
            [*self.on_ctl, *words],
            cwd=cwd,
            env={**self.env, **(env or {})},
            capture_output=True,
            text=True,
            timeout=240,
        )

    def quads(self, *words: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> Any:
        """The ``quads`` command on the login node."""
        return self.process(sys.executable, "-m", "megatron_quads.cli", *words, cwd=cwd, env=env)

    def pid(self, daemon: str) -> int:
        """Process id of ``slurmctld`` or ``slurmd-nodeN``."""
        return int((self.folder / "slurm" / "run" / f"{daemon}.pid").read_text())

    def on_node(self, node: str, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command on a node; its output is piped."""
        enter = ["nsenter", "-t", str(self.pid(f"slurmd-{node}")), "-n", "-m", "-u", "--"] if self.own_network else []
        return subprocess.Popen(
            [*enter, *words], env={**self.env, **(env or {})}, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def show(self, job: str) -> dict[str, str]:
        """``scontrol show job`` of the (leading) job."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).splitlines()[0].split()
        return dict(w.split("=", 1) for w in words if "=" in w)

    def wait(self, job: str, timeout_s: float = 400.0) -> tuple[str, int]:
        """(state, exit code or -signal) of a job that has ended, by then on no node."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.show(job)
            if found["JobState"] in ENDED:
                code, number = found["ExitCode"].split(":")
                return found["JobState"], int(code) or -int(number)
            if time.monotonic() > deadline:
                raise AssertionError(f"job {job} did not end: {found}\n{self.tail()}")
            time.sleep(0.3)

    def wait_idle(self, timeout_s: float = 90.0) -> None:
        """All nodes idle."""
        deadline = time.monotonic() + timeout_s
        while (states := self.run("sinfo", "-h", "-N", "-p", "batch", "-o", "%N %T").split("\n")) and any(
            s and not s.endswith(" idle") for s in states
        ):
            if time.monotonic() > deadline:
                raise AssertionError(f"nodes are not idle: {states}")
            time.sleep(0.3)

    def tail(self) -> str:
        """The end of the daemons' logs."""
        logs = sorted((self.folder / "slurm" / "log").glob("*.log"))
        return "\n".join(f"{p.name}: " + "\n".join(p.read_text().splitlines()[-5:]) for p in logs)

    def restart_node(self, node: str) -> None:
        """Start slurmd of a node again, in its namespaces."""
        if not self.own_network:
            subprocess.run(["slurmd", "-N", node, "-c"], env=self.env, check=True)
            return
        number = node.removeprefix("node")
        script = 'mount --bind "$1" /etc/hosts && hostname "$2" && exec slurmd -N "$2" -c'
        enter = ["nsenter", f"--net=/var/run/netns/{self.env['SLURM_TEST_TAG']}{number}", "unshare", "--mount", "--uts"]
        hosts = str(self.folder / "slurm" / "hosts")
        subprocess.run([*enter, "bash", "-c", script, "_", hosts, node], env=self.env, check=True)


class NoSlurm(Exception):
    """SLURM cannot run here; says why."""


def may_make_networks() -> bool:
    """Whether this process may give each node a network and mounts of its own; QUADS_TEST_LOOPBACK=1 says no."""
    if os.environ.get("QUADS_TEST_LOOPBACK") == "1":
        return False
    name = f"qtry{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    try:
        link = ["ip", "-n", name, "link", "add"]
        tries = [[*link, "v0", "type", "veth", "peer", "name", "v1"], [*link, "br0", "type", "bridge"]]
        tries += [["unshare", "--mount", "--uts", "sh", "-c", "mount -t tmpfs none /tmp && hostname try"]]
        return made and all(subprocess.run(words, capture_output=True).returncode == 0 for words in tries)
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def processes_of(folder: Path) -> list[str]:
    """Command lines of processes that belong to an attempt at a run below ``folder``, supervisors included."""
    mark, found = f"QUADS_ATTEMPT_DIR={folder}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                words = (entry / "cmdline").read_bytes()
                supervises = b"megatron_quads.launch.supervise" in words and str(folder).encode() in words
                if state != "Z" and (supervises or mark in (entry / "environ").read_bytes()):
                    found.append(words.replace(b"\0", b" ").decode(errors="replace"))
            except OSError:  # it ended meanwhile
                continue
    return found


def require_gone(folder: Path, timeout_s: float = 60.0) -> None:
    """No process of a run below ``folder`` lives on any node: they all are processes of this host."""
    deadline = time.monotonic() + timeout_s
    while left := processes_of(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


class Launch:
    """One run on the cluster: its configuration, its job, its files."""

    def __init__(self, cluster: Cluster, run: Path, standin: dict[str, Any] | None = None, **over: Any) -> None:
        self.cluster, self.run = cluster, run
        role = [sys.executable, "-u", str(HERE / "standin.py")]
        values: dict[str, Any] = {
            "name": "test",
            "run": str(run),
            "slurm": {"time": "00:05:00", "signal_before_s": 5},
            "trainer": {"nodes": 1, "ranks_per_node": 2},
            "rollout": {"servers": 0},
            "limits": {"node_start_s": 60, "health_every_s": 0.5, "health_misses": 60, "save_s": 90, "fence_s": 15},
            "roles": {"trainer": [*role, "trainer"], "rollout": [*role, "rollout"]},
            "environment": {"STANDIN": json.dumps(standin or {})},
        }
        for key, value in over.items():
            values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) and value else value
        run.parent.mkdir(parents=True, exist_ok=True)
        self.file = run.parent / f"{run.name}.yaml"
        self.file.write_text(yaml.safe_dump(values, allow_unicode=True))
        self.job = ""

    def submit(self, *more: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> Launch:
        """``quads submit``."""
        done = self.cluster.quads("submit", str(self.file), *more, cwd=cwd, env=env)
        assert done.returncode == 0, done.stderr
        self.job = done.stdout.split()[1].rstrip(";")
        return self

    def wait(self, timeout_s: float = 400.0) -> tuple[str, int]:
        """How the job ended; nothing of it is left anywhere."""
        try:
            end = self.cluster.wait(self.job, timeout_s)
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.output()}") from e
        require_gone(self.run)
        return end

    def output(self) -> str:
        """What the job printed, and the roles' logs."""
        files = [*sorted((self.run / "launch").glob("slurm-*.out")), *sorted(self.run.glob("attempt-*/*/*.log"))]
        return "\n".join(f"--- {p}\n{p.read_text(errors='replace')}" for p in files)

    def printed(self) -> str:
        """What the job printed."""
        return "".join(p.read_text(errors="replace") for p in sorted((self.run / "launch").glob("slurm-*.out")))

    def slot(self, name: str, attempt: int = 0) -> dict[str, Any]:
        """A status file."""
        try:
            return dict(json.loads((self.run / f"attempt-{attempt}" / "status" / f"{name}.json").read_text()))
        except (OSError, ValueError):
            return {}

    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl."""
        path = self.run / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, condition: Any, timeout_s: float = 180.0) -> None:
        """Wait until the run has come to a point."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{self.cluster.show(self.job)}\n{self.output()}"
            time.sleep(0.1)

    def until_step(self, step: int) -> None:
        """Wait for a step's row."""
        self.until(lambda: len(self.rows()) >= step)

    def kill_role(self, name: str) -> None:
        """SIGKILL the program of a role."""
        os.kill(self.slot(name)["pid"], signal.SIGKILL)
