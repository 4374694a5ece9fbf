"""Whose run folder is it, and may a further attempt start? Two jobs on one folder would overwrite each other."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import atomic
from ..errors import QuadsError
from .attempt import Attempt, attempts, read_json
from .config import Limits

OWNER = "owner.json"


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Nobody else submits, claims or releases ``run`` meanwhile; QuadsError when the folder cannot be written."""
    with contextlib.ExitStack() as stack:
        try:
            run.mkdir(parents=True, exist_ok=True)
            f = stack.enter_context(open(run / ".owner.lock", "a"))
            fcntl.flock(f, fcntl.LOCK_EX)
        except OSError as e:
            raise QuadsError(
                f"cannot write: {e.strerror}", where=str(run), do="free space, fix access or choose another run folder"
            ) from e
        yield


def reserve(run: Path, job: str) -> None:
    """A submitted job owns the folder from the queue on; call it inside ``locked``."""
    me = {"job": job, "attempt": None, "host": socket.gethostname(), "pid": os.getpid()}
    atomic.write_json(run / OWNER, me)


def claim(run: Path, job: str) -> Attempt:
    """Take the folder for ``job`` and make its next attempt. QuadsError when a living job holds it."""
    with locked(run):
        require_free(run, job)
        attempt = Attempt.create(run)
        me = {"job": job, "attempt": attempt.number, "host": socket.gethostname(), "pid": os.getpid()}
        atomic.write_json(run / OWNER, me)
    return attempt


def require_free(run: Path, job: str | None) -> None:
    """Raise QuadsError when another living job (or local launch) than ``job`` holds the run folder."""
    owner = read_json(run / OWNER)
    if owner is None or (job is not None and owner["job"] == job):
        return
    if owner_lives(owner):
        raise QuadsError(
            f"run folder is in use by job {owner['job']} (host {owner['host']})",
            where=str(run),
            do=f"wait for it, end it, or choose another run folder; remove {OWNER} only when it is surely gone",
        )


def owner_lives(owner: dict[str, Any]) -> bool:
    """Whether the recorded job still exists. Unknown counts as alive: a wrong guess would ruin the run."""
    job = str(owner["job"])
    if job.startswith("local"):
        if owner["host"] != socket.gethostname():
            return True
        return Path(f"/proc/{owner['pid']}").exists()
    try:
        done = subprocess.run(
            ["squeue", "--noheader", "--jobs", job, "--format=%T"], capture_output=True, text=True, timeout=60
        )
    except FileNotFoundError:
        return True
    except subprocess.TimeoutExpired:
        return True
    if done.returncode == 0:
        return bool(done.stdout.strip())
    return "Invalid job id" not in done.stderr


def owns(attempt: Attempt) -> bool:
    """Whether this attempt is still the run's current one."""
    try:
        owner = json.loads((attempt.run / OWNER).read_text())
    except FileNotFoundError:
        return False
    except (OSError, ValueError):  # a file system's hiccup is no change of owner
        return True
    return bool(owner.get("attempt") == attempt.number)


def release(attempt: Attempt) -> None:
    """Give the folder back, if it is still ours."""
    with locked(attempt.run):
        if owns(attempt):
            (attempt.run / OWNER).unlink(missing_ok=True)


def latest_step(run: Path) -> int:
    """Steps held by the newest committed trainer checkpoint; 0 without one."""
    found = run.glob("checkpoints/step_*")
    return max((int(p.name.removeprefix("step_")) for p in found if atomic.is_committed(p)), default=0)


def refuse_another(run: Path, job: str, limits: Limits, *, restarts: int) -> str | None:
    """Why no further attempt of ``job`` may start, None when one may.

    ``restarts``: how often SLURM has restarted the job. Attempts that ended where they began made no progress,
    whatever ended them.
    """
    if restarts > limits.max_requeues:
        return f"requeued {restarts} times, the limit is {limits.max_requeues} (limits.max_requeues)"
    mine = [a for a in attempts(run) if (a.plan().get("job")) == job]
    now = latest_step(run)
    idle = 0
    for attempt in reversed(mine):
        if attempt.plan().get("start_step") != now:
            break
        idle += 1
    if idle >= limits.max_idle_attempts:
        return f"{idle} attempts in a row made no progress past step {now} (limits.max_idle_attempts)"
    return None
