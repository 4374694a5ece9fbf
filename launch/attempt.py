"""Files of one attempt at a run: ``RUN/attempt-N``. Supervisor, roles, trainer and `quads status` meet here only.

plan.json  environment.json  heartbeat  serve.json   control/{save_and_exit,stop,stop-rollout-K}   endpoints/K.json
status/{driver,trainer-NODE,rollout-K,rank-R,probe-NODE}.json   {trainer,rollout,driver}/NODE.log
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import atomic
from ..errors import QuadsError

DIR, JOB, NUMBER = "QUADS_ATTEMPT_DIR", "QUADS_JOB_ID", "QUADS_ATTEMPT"
SLOT_BYTES = 4096


class Attempt:
    """Paths and files of attempt ``number`` of a run, made for job ``job``."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.run = self.path.parent
        self.number = int(self.path.name.removeprefix("attempt-"))

    @classmethod
    def from_environment(cls) -> Attempt | None:
        """The attempt that this process belongs to, None outside a launch."""
        path = os.environ.get(DIR)
        return cls(path) if path else None

    @classmethod
    def create(cls, run: Path) -> Attempt:
        """The next attempt of ``run``; two creators never get the same one."""
        for number in range(len(attempts(run)), 1 << 20):
            try:
                (run / f"attempt-{number}").mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as e:
                raise QuadsError(f"cannot write: {e.strerror}", where=str(run), do="free space or fix access") from e
            found = cls(run / f"attempt-{number}")
            for name in ("control", "status", "endpoints", "trainer", "rollout", "driver"):
                atomic.make_folder(found.path / name)
            return found
        raise AssertionError("unreachable")

    @property
    def job(self) -> str:
        """Id of the SLURM job (or local launch) that runs it."""
        return str(self.plan()["job"])

    def plan(self) -> dict[str, Any]:
        """plan.json: job, nodes, ports, number of servers, the step it started from."""
        return read_json(self.path / "plan.json") or {}

    def environment(self) -> dict[str, str]:
        """Variables by which a role finds the attempt."""
        return {DIR: str(self.path), JOB: self.job, NUMBER: str(self.number)}

    def slot(self, name: str) -> Slot:
        """Status file of one process, e.g. ``rank-3``."""
        return Slot(self.path / "status" / f"{name}.json")

    def beat(self) -> None:
        """The supervisor is alive."""
        os.utime(self.path / "heartbeat")

    def heartbeat_age(self, now: float) -> float:
        """Seconds since the supervisor's last beat by this node's view of the file; inf when it is gone."""
        try:
            return now - (self.path / "heartbeat").stat().st_mtime
        except OSError:
            return float("inf")

    def tell(self, order: str, reason: str, **more: Any) -> None:
        """Leave an order (``save_and_exit``, ``stop``) for the roles; the first reason stands."""
        path = self.path / "control" / order
        if not path.exists():
            atomic.write_json(path, {"reason": reason, "time": time.time(), **more})

    def told(self, order: str) -> dict[str, Any] | None:
        """The order, None when it was not given."""
        return read_json(self.path / "control" / order)

    def offer(self, **settings: Any) -> None:
        """Trainer: what the rollout servers are to load and how."""
        atomic.write_json(self.path / "serve.json", settings)

    def serving(self) -> dict[str, Any] | None:
        """The trainer's offer, None before it was made."""
        return read_json(self.path / "serve.json")

    def publish(self, index: int, **values: Any) -> None:
        """Rollout server ``index`` answers under ``url`` in its ``incarnation``."""
        atomic.write_json(self.path / "endpoints" / f"{index}.json", values)

    def endpoint(self, index: int) -> dict[str, Any] | None:
        """Address of server ``index``, None while it starts."""
        return read_json(self.path / "endpoints" / f"{index}.json")

    def log(self, role: str, name: str) -> Path:
        """Log of a role on a node."""
        return self.path / role / f"{name}.log"


class Slot:
    """A status file whose space is taken when it is made, so that an end can be recorded on a full disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def reserve(self, **values: Any) -> Slot:
        """Create (or reuse) the file at its full size."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as e:
            raise QuadsError(f"cannot write: {e.strerror}", where=str(self.path), do="free space") from e
        os.close(fd)
        self.write(**values)
        return self

    def write(self, **values: Any) -> None:
        """Replace the content, in place."""
        text = json.dumps({**values, "time": time.time()})
        for key in ("error", "reason"):
            if len(text.encode()) >= SLOT_BYTES and isinstance(values.get(key), str):
                values[key] = values[key][:400] + " ..."
                text = json.dumps({**values, "time": time.time()})
        data = text.encode().ljust(SLOT_BYTES - 1) + b"\n"
        try:
            fd = os.open(self.path, os.O_WRONLY)
            try:
                os.pwrite(fd, data, 0)
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as e:
            raise QuadsError(f"cannot write: {e.strerror}", where=str(self.path), do="free space") from e

    def read(self) -> dict[str, Any] | None:
        """The content; None when there is none (yet) or it is being written."""
        return read_json(self.path)


def this_node() -> str:
    """The node's name as SLURM knows it, which may differ from its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, None when the file is missing or half written."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def attempts(run: Path) -> list[Attempt]:
    """All attempts of a run, oldest first."""
    numbers = [p.name.removeprefix("attempt-") for p in run.glob("attempt-*")]
    return [Attempt(run / f"attempt-{n}") for n in sorted(int(n) for n in numbers if n.isdigit())]


def describe_exit(values: Mapping[str, Any]) -> str:
    """A slot's end in words."""
    code = values.get("code")
    if code is None:
        return "did not end"
    if values.get("reason"):
        return f"was ended: {values['reason']}"
    said = f": {values['error']}" if values.get("error") else ""
    return (f"was killed by signal {code - 128}" if code > 128 else f"ended with exit code {code}") + said
