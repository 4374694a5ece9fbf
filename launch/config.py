"""Everything a launch needs, checked: ``LaunchConfig``. ``load.py`` reads it from files."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ..errors import QuadsError

SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CRED|AUTH|COOKIE|JWT|PRIVATE", re.IGNORECASE)
"""Names of variables whose values are never written anywhere."""
HERE = Path(__file__).resolve().parent
Word = Annotated[str, Field(pattern=r"^\S+$")]
Line = Annotated[str, Field(pattern=r"^[^\r\n]+$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Slurm(_Strict):
    """What is asked of SLURM."""

    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    time: Word = "04:00:00"
    exclusive: bool = True
    hetjob: bool = False
    """Trainer and rollout nodes as two components, which may then be of different kinds."""
    rollout_partition: Word | None = None
    """Partition of the rollout's component (hetjob only)."""
    signal_before_s: int = Field(default=300, ge=0)
    """USR1 this long before the time limit; a step and a save must fit in."""
    extra: list[Line] = []
    """More ``#SBATCH`` options, as they are."""

    @field_validator("time", mode="before")
    @classmethod
    def _quoted_time(cls, value: Any) -> Any:
        if isinstance(value, int):
            raise ValueError("quote it: YAML reads 12:00:00 as a number")
        return value


class Site(_Strict):
    """A machine's ways: how Python is reached on a compute node, and the network."""

    partition: Word | None = None
    account: Word | None = None
    interface: Word | None = None
    """Network interface of gloo and NCCL; None takes the one that routes to the master."""
    container: Literal["none", "pyxis", "apptainer"] = "none"
    image: str | None = None
    mounts: list[str] = []
    """``/from:/to`` pairs for the container; the run folder must be among them."""
    container_python: str = "python3"
    setup: list[str] = []
    """Shell lines of the job script before the supervisor starts (``module load ...``)."""

    @model_validator(mode="after")
    def _image(self) -> Site:
        if self.container != "none" and not self.image:
            raise ValueError("a container needs an image")
        return self


class Trainer(_Strict):
    """torchrun ranks."""

    nodes: int = Field(default=1, ge=1)
    ranks_per_node: int = Field(default=1, ge=1)
    gpus_per_node: int = Field(default=0, ge=0)


class RolloutServers(_Strict):
    """vLLM servers, one step each. ``servers: 0`` runs the engine inside rank 0's node (``--rollout local``)."""

    servers: int = Field(default=0, ge=0)
    servers_per_node: int = Field(default=1, ge=1)
    gpus_per_server: int = Field(default=0, ge=0)
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Sequences an engine batches; 1 makes samples independent of what else is in flight, to the last bit."""
    options: dict[str, Any] = {}
    """More options of vLLM's server, e.g. ``tensor-parallel-size: 8``, ``enable-expert-parallel: true``."""
    max_restarts: int = Field(default=2, ge=0)
    start_timeout_s: int = Field(default=1800, ge=1)


class Limits(_Strict):
    """When to give up."""

    max_requeues: int = Field(default=20, ge=0)
    max_idle_attempts: int = Field(default=2, ge=1)
    """Attempts in a row that may end without a new checkpoint."""
    node_start_s: int = Field(default=120, ge=1)
    """A node that has not started its first step by then is named and the job ends."""
    health_every_s: float = Field(default=10.0, gt=0)
    health_misses: int = Field(default=60, ge=1)
    """Health polls in a row that a server may miss before it is restarted."""
    save_s: int = Field(default=240, ge=1)
    """Time the trainer has for its step and save once it was told to stop."""
    fence_s: float = Field(default=120.0, gt=1)
    """A node that has not seen the supervisor's heartbeat for so long ends its processes itself."""


class LaunchConfig(_Strict):
    """Everything a launch needs, resolved."""

    name: str = Field(default="quads", pattern=r"^[\w.-]+$")
    job: Literal["rl", "train", "export"] = "rl"
    run: Path
    """Run folder, on a file system that all nodes share."""
    command: Literal["rl", "calibrate", "export"] = "rl"
    """The ``quads`` command of the trainer's ranks."""
    options: dict[str, Any] = {}
    """Its options and Megatron's, by name without dashes: ``lr: 1e-6``, ``expert-model-parallel-size: 16``."""
    slurm: Slurm = Slurm()
    site: Site = Site()
    trainer: Trainer = Trainer()
    rollout: RolloutServers = RolloutServers()
    placement: Literal["separate", "colocated"] = "separate"
    """Rollout servers on nodes of their own, or on the trainer's nodes with GPUs of their own."""
    limits: Limits = Limits()
    environment: dict[str, str] = {}
    """Variables for every role."""
    roles: dict[Literal["trainer", "rollout"], list[str]] = {}
    """Programs that stand in for a trainer rank or a rollout server."""

    @field_validator("run")
    @classmethod
    def _full_path(cls, run: Path) -> Path:
        if any(ord(c) < 32 for c in str(run)) or '"' in str(run):
            raise ValueError("a run folder's path may not hold quotes or control characters")
        return absolute(run)

    @model_validator(mode="after")
    def _consistent(self) -> LaunchConfig:
        if self.rollout.servers and self.command != "rl":
            raise ValueError(f"rollout.servers is for command rl, not {self.command}")
        if self.job == "train" and self.rollout.servers:
            raise ValueError("job train has no rollout servers: set job to rl, or rollout.servers to 0")
        if self.job == "export" and self.command != "export":
            raise ValueError(f"job export is for command export, not {self.command}")
        given = {name.replace("_", "-") for name in self.options}
        if taken := given & ({"out", "resume", "nproc", "rollout"} if self.command == "rl" else {"nproc"}):
            raise ValueError(f"options.{min(taken)} is set by the launch (run, trainer, rollout)")
        if self.slurm.hetjob and not self.rollout_nodes:
            raise ValueError("slurm.hetjob needs rollout servers on nodes of their own")
        if secret := next((n for n in self.environment if SECRET.search(n)), None):
            raise ValueError(f"environment.{secret} looks like a secret: export it in your shell, it reaches the job")
        return self

    @property
    def rollout_nodes(self) -> int:
        """Nodes that only run rollout servers."""
        if self.placement == "colocated":
            return 0
        return -(-self.rollout.servers // self.rollout.servers_per_node)

    @property
    def nodes(self) -> int:
        """Nodes of the allocation."""
        return self.trainer.nodes + self.rollout_nodes

    @property
    def world(self) -> int:
        """Trainer ranks."""
        return self.trainer.nodes * self.trainer.ranks_per_node


def check(values: dict[str, Any], *, where: str) -> LaunchConfig:
    """Plain values -> LaunchConfig; QuadsError with the first faulty key."""
    try:
        return LaunchConfig.model_validate(values)
    except ValidationError as e:
        fault = e.errors()[0]
        key = ".".join(str(part) for part in fault["loc"]) or "configuration"
        raise QuadsError(f"{key}: {fault['msg']}", where=where, do="correct the key; docs/slurm.md lists them") from e


def dump(config: LaunchConfig) -> str:
    """The resolved configuration as YAML that ``load`` reads back to the same values."""
    return yaml.safe_dump(json.loads(config.model_dump_json()), sort_keys=False, allow_unicode=True, width=1000)


def absolute(path: Path) -> Path:
    """Seen from the current folder, without ``..``."""
    return Path(os.path.abspath(path.expanduser()))
