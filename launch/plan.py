"""From a configuration to the commands that run it: one named step per role, the same with SLURM and without.

Nothing here depends on where a job lands: steps name nodes relative to the allocation, and ports, addresses and the
attempt's folder reach the roles through plan.json. What ``--dry-run`` prints is therefore what runs.
"""

from __future__ import annotations

import json
import shlex
import string
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import HERE, LaunchConfig

MODULE = "megatron_quads.launch"


@dataclass(frozen=True)
class Step:
    """One srun (or one local process): ``role`` with ``index`` on ``nodes`` nodes from ``first`` of a component."""

    role: str
    index: int
    component: int
    first: int
    nodes: int
    gpus: int

    @property
    def name(self) -> str:
        """``trainer``, ``rollout-2``, ``probe-0``."""
        return self.role if self.role == "trainer" else f"{self.role}-{self.index}"


def probes(config: LaunchConfig) -> list[Step]:
    """The first step of each component: every node says that it can start one."""
    if config.slurm.hetjob:
        sizes = [config.trainer.nodes, config.rollout_nodes]
    else:
        sizes = [config.nodes]
    return [Step("probe", i, i, 0, n, 0) for i, n in enumerate(sizes)]


def trainer(config: LaunchConfig) -> Step:
    """The trainer's step."""
    return Step("trainer", 0, 0, 0, config.trainer.nodes, _gpus_per_node(config, trainer=True))


def rollouts(config: LaunchConfig) -> list[Step]:
    """One step per rollout server: the unit that is restarted."""
    out, per_node = [], config.rollout.servers_per_node
    for k in range(config.rollout.servers):
        node, component = k // per_node, 0
        if config.placement == "colocated":
            node %= config.trainer.nodes
        elif config.slurm.hetjob:
            component = 1
        else:
            node += config.trainer.nodes
        out.append(Step("rollout", k, component, node, 1, _gpus_per_node(config, trainer=False)))
    return out


def _gpus_per_node(config: LaunchConfig, *, trainer: bool) -> int:
    """GPUs a step asks for on its node; roles that share a node see the node's and take their own (``gpu_share``)."""
    mine, servers = config.trainer.gpus_per_node, config.rollout.gpus_per_server * config.rollout.servers_per_node
    if config.placement == "colocated":
        return mine + servers
    return mine if trainer else servers


def gpu_share(config: LaunchConfig, step: Step) -> tuple[int, int] | None:
    """(first, count) of the step's GPUs among those it is given, None without GPUs or when it takes all."""
    servers = config.rollout.gpus_per_server
    first = config.trainer.gpus_per_node if config.placement == "colocated" else 0
    if step.role == "rollout" and servers:
        return first + step.index % config.rollout.servers_per_node * servers, servers
    if step.role == "trainer" and config.trainer.gpus_per_node and config.placement == "colocated":
        return 0, config.trainer.gpus_per_node
    return None


def role_command(config: LaunchConfig, step: Step) -> list[str]:
    """What runs on each node of a step."""
    python = sys.executable if config.site.container == "none" else config.site.container_python
    inner = [
        python,
        "-u",
        "-m",
        f"{MODULE}.role",
        step.role,
        str(step.index),
        str(launch_folder(config) / "config.yaml"),
    ]
    if config.site.container == "apptainer":
        binds = [word for mount in config.site.mounts for word in ("--bind", mount)]
        gpu = ["--nv"] if step.gpus else []
        return ["apptainer", "exec", *gpu, *binds, str(config.site.image), *inner]
    return inner


def srun_command(config: LaunchConfig, step: Step) -> list[str]:
    """The step under SLURM. A failing task ends nothing by itself: the supervisor decides, from the status files."""
    words = ["srun", f"--job-name=quads-{step.name}"]
    if config.slurm.hetjob:
        words.append(f"--het-group={step.component}")
    words += [f"--nodes={step.nodes}", f"--ntasks={step.nodes}", "--ntasks-per-node=1", f"--relative={step.first}"]
    # --overlap: steps on a node share its cores; a probe, a restarted server and colocated roles would queue otherwise
    words += ["--overlap", "--kill-on-bad-exit=0", "--wait=0", "--unbuffered", "--input=none"]
    if step.gpus:
        words.append(f"--gpus-per-node={step.gpus}")
    if config.site.container == "pyxis":
        words.append(f"--container-image={config.site.image}")
        if config.site.mounts:
            words.append("--container-mounts=" + ",".join(config.site.mounts))
    return [*words, *role_command(config, step)]


def rank_command(config: LaunchConfig, *, resume: bool) -> list[str]:
    """One trainer rank, as torchrun starts it."""
    if "trainer" in config.roles:
        return list(config.roles["trainer"])
    words = [sys.executable, "-m", "megatron_quads.cli", config.command]
    options = dict(config.options)
    if config.command == "rl":
        options["out"] = str(config.run)
        if config.rollout.servers:
            options["rollout"] = "launch"
        if resume:
            options["resume"] = True
    return words + flags(options)


def torchrun_command(config: LaunchConfig, node_rank: int, master: str, port: int, *, resume: bool) -> list[str]:
    """The launcher of one trainer node's ranks. A rank that fails is not restarted by torchrun: the attempt ends."""
    rendezvous = [f"--nnodes={config.trainer.nodes}", f"--node-rank={node_rank}", f"--master-addr={master}"]
    return [
        *(sys.executable, "-m", "torch.distributed.run", *rendezvous, f"--master-port={port}"),
        *(f"--nproc-per-node={config.trainer.ranks_per_node}", "--max-restarts=0", "--no-python"),
        *(sys.executable, "-u", "-m", f"{MODULE}.rank", *rank_command(config, resume=resume)),
    ]


def flags(options: dict[str, Any]) -> list[str]:
    """``{"lr": 1e-6, "bf16": True, "task-config": {...}}`` -> command line words; None and False are left out."""
    words: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, dict):
            words.append(json.dumps(value, ensure_ascii=False))
        elif isinstance(value, list):
            words += [str(v) for v in value]
        elif value is not True:
            words.append(str(value))
    return words


def launch_folder(config: LaunchConfig) -> Path:
    """Where the resolved configuration and the job script are kept."""
    return config.run / "launch"


def commands(config: LaunchConfig) -> list[str]:
    """Every step's command, one shell line each, in starting order."""
    return [shlex.join(srun_command(config, s)) for s in [*probes(config), *rollouts(config), trainer(config)]]


def local_commands(config: LaunchConfig) -> list[str]:
    """The same plan on this host without SLURM."""
    return [shlex.join(role_command(config, s)) for s in [*probes(config), *rollouts(config), trainer(config)]]


def job_script(config: LaunchConfig) -> str:
    """The sbatch file of ``config.job`` with its directives filled in."""
    template = string.Template((HERE / f"quads_{config.job}.sbatch").read_text())
    return template.substitute(
        directives="\n".join(_directives(config)),
        setup="\n".join(config.site.setup) or ":",
        supervisor=shlex.join(
            [sys.executable, "-u", "-m", f"{MODULE}.supervise", str(launch_folder(config) / "config.yaml")]
        ),
    )


def _directives(config: LaunchConfig) -> list[str]:
    s, site = config.slurm, config.site
    folder = _quoted(launch_folder(config))
    output = _quoted(str(launch_folder(config)).replace("%", "%%") + "/slurm-%j.out")
    common = ["--ntasks-per-node=1"]
    common += ["--exclusive"] if s.exclusive else []
    common += [f"--account={a}" for a in [s.account or site.account] if a]
    common += [f"--qos={s.qos}"] if s.qos else []
    common += [f"--time={s.time}"]
    common += s.extra
    partition = s.partition or site.partition
    # B: only this script's process gets the signal; the steps are told through files
    signal = [f"--signal=B:USR1@{s.signal_before_s}"] if s.signal_before_s and config.job != "export" else []
    files = [f"--chdir={folder}", f"--output={output}", "--open-mode=append", "--requeue", *signal]
    gpus = _gpus_per_node(config, trainer=True), _gpus_per_node(config, trainer=False)
    groups = [[f"--job-name={config.name}", *files, *_component(config.nodes, partition, max(gpus)), *common]]
    if s.hetjob:
        first = [f"--job-name={config.name}", *files, *_component(config.trainer.nodes, partition, gpus[0]), *common]
        second = [*_component(config.rollout_nodes, s.rollout_partition or partition, gpus[1]), *common]
        groups = [first, ["hetjob"], second]
    return [f"#SBATCH {word}" for group in groups for word in group]


def _component(nodes: int, partition: str | None, gpus: int) -> list[str]:
    words = [f"--nodes={nodes}", *([f"--partition={partition}"] if partition else [])]
    return words + ([f"--gpus-per-node={gpus}"] if gpus else [])


def _quoted(value: object) -> str:
    return f'"{value}"'
