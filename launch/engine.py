"""Where steps run: srun inside an allocation, or plain processes on this host. The supervisor sees no difference."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from typing import Protocol

from ..errors import QuadsError
from . import plan
from .attempt import Attempt, this_node
from .config import LaunchConfig

END_S, REQUEUE_S = 10.0, 300.0


class Engine(Protocol):
    """``job``: id; ``nodes``: host names per component; ``restarts``: how often SLURM restarted the job."""

    job: str
    node: str
    restarts: int
    can_requeue: bool
    nodes: list[list[str]]
    trainer_nodes: list[str]

    def command(self, config: LaunchConfig, step: plan.Step) -> list[str]:
        """The step's command line."""

    def start(self, command: Sequence[str], attempt: Attempt) -> subprocess.Popen[bytes]:
        """Start it."""

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """End it when it does not end by itself."""

    def preempted(self) -> bool:
        """Whether SLURM is preempting the job now."""

    def requeue(self) -> bool:
        """Put the job back into the queue and wait for the end that this brings; False when that is refused."""


class SlurmEngine:
    """Steps of the allocation that this process runs in."""

    def __init__(self, config: LaunchConfig) -> None:
        self.job = os.environ["SLURM_JOB_ID"]
        self.node = this_node()
        self.restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        groups = int(os.environ.get("SLURM_HET_SIZE", "0"))
        lists = [f"SLURM_JOB_NODELIST_HET_GROUP_{g}" for g in range(groups)] or ["SLURM_JOB_NODELIST"]
        self.nodes = [_hostnames(os.environ[name]) for name in lists]
        self.trainer_nodes = self.nodes[0][: config.trainer.nodes]
        self.can_requeue = True
        wanted = [config.trainer.nodes, config.rollout_nodes] if config.slurm.hetjob else [config.nodes]
        if [len(n) for n in self.nodes] != wanted:
            raise QuadsError(
                f"the allocation has {[len(n) for n in self.nodes]} nodes per component, the plan needs {wanted}",
                where=f"job {self.job}",
                do="submit with `quads submit`",
            )

    def command(self, config: LaunchConfig, step: plan.Step) -> list[str]:
        """The step's command line."""
        return plan.srun_command(config, step)

    def start(self, command: Sequence[str], attempt: Attempt) -> subprocess.Popen[bytes]:
        """Start a step. srun leaves this process's signals alone: they are orders for the supervisor."""
        # the batch step's own layout must not narrow the steps'
        drop = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NNODES")
        env = {k: v for k, v in os.environ.items() if k not in drop}
        return subprocess.Popen(
            list(command), env={**env, **attempt.environment()}, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """End a step that did not end by itself: srun passes SIGTERM on and forces the end a moment later."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if process.poll() is not None:
                return
            process.send_signal(number)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                continue

    def preempted(self) -> bool:
        """See Engine.preempted."""
        done = subprocess.run(["scontrol", "show", "job", self.job], capture_output=True, text=True)
        found = re.search(r"PreemptTime=(\S+)", done.stdout)
        return found is not None and found[1] not in ("None", "Unknown", "N/A")

    def requeue(self) -> bool:
        """Put the job back into the queue; waits for the end that this brings. False when SLURM refuses."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        deadline = time.monotonic() + REQUEUE_S
        while time.monotonic() < deadline:
            done = subprocess.run(["scontrol", "requeue", self.job], capture_output=True, text=True)
            if done.returncode == 0:
                time.sleep(REQUEUE_S)  # SLURM ends this process
                return True
            print(f"quads: scontrol requeue {self.job}: {done.stderr.strip()}", flush=True)
            # the controller may be away for a moment; SLURM may also be requeuing the job itself (preemption)
            time.sleep(5.0)
        return False


class LocalEngine:
    """All roles on this host: the same plan for one node without SLURM."""

    def __init__(self, config: LaunchConfig) -> None:
        self.job = f"local-{uuid.uuid4().hex[:8]}"
        self.node = this_node()
        self.restarts, self.can_requeue = 0, False
        self.nodes = [[self.node]]
        self.trainer_nodes = [self.node]
        if config.trainer.nodes != 1 or config.slurm.hetjob:
            raise QuadsError(
                f"{config.trainer.nodes} trainer nodes do not fit one host",
                where="--local",
                do="set trainer.nodes=1 and more trainer.ranks_per_node",
            )

    def command(self, config: LaunchConfig, step: plan.Step) -> list[str]:
        """The step's command line."""
        return plan.role_command(config, step)

    def start(self, command: Sequence[str], attempt: Attempt) -> subprocess.Popen[bytes]:
        """Start a role."""
        return subprocess.Popen(
            list(command),
            env={**os.environ, **attempt.environment()},
            stdin=subprocess.DEVNULL,
            stdout=sys.stdout,
            start_new_session=True,
        )

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a role that did not end by itself; what it started is ended with the supervisor's other descendants."""
        if process.poll() is None:
            process.kill()
            process.wait()

    def preempted(self) -> bool:
        """There is no queue."""
        return False

    def requeue(self) -> bool:
        """There is no queue."""
        return False


def _hostnames(nodelist: str) -> list[str]:
    done = subprocess.run(["scontrol", "show", "hostnames", nodelist], capture_output=True, text=True)
    names = done.stdout.split()
    if done.returncode or not names:
        raise QuadsError(
            f"cannot expand the node list: {done.stderr.strip()}", where=nodelist, do="check `scontrol show hostnames`"
        )
    return names
