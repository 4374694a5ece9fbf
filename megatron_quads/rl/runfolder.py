"""One run's folder: who owns it, what it holds, where it can be resumed.

run.json  metrics.jsonl  evals.jsonl  audit.jsonl  samples.jsonl  tb/  logs/  status.json
checkpoints/step_000010/   trainer state, committed        refit/v000010/   packed weights, the last two (flat refit: of saved steps)
export/                    the final checkpoint for vLLM
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import IO, Any

from .. import atomic
from ..errors import QuadsError

KEEP_REFITS = 2


class RunFolder:
    """Paths and state of a run. Opened for writing by one process (rank 0) at a time."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: IO[str] | None = None

    @property
    def exports(self) -> Path:
        return self.path / "refit"

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def audit(self) -> Path:
        return self.path / "audit.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def evals(self) -> Path:
        """One row a held-out evaluation: step, the reward of each problem; the last row of a step counts."""
        return self.path / "evals.jsonl"

    def refit(self, version: int) -> Path:
        """Folder of the packed weights after ``version`` optimizer steps."""
        return self.exports / f"v{version:06d}"

    def checkpoint(self, step: int) -> Path:
        """Folder of the trainer state after ``step`` optimizer steps."""
        return self.path / "checkpoints" / f"step_{step:06d}"

    def latest_step(self) -> int | None:
        """Highest committed trainer checkpoint, None when there is none."""
        found = self.path.glob("checkpoints/step_*")
        steps = [int(p.name.removeprefix("step_")) for p in found if atomic.is_committed(p)]
        return max(steps, default=None)

    def acquire(self, *, resume: bool) -> None:
        """Lock the folder for this process. Raises QuadsError when it is in use, or holds a run and resume is off."""
        atomic.make_folder(self.path)
        lock = open(self.path / ".lock", "a+")  # noqa: SIM115 - held for the life of the run
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            lock.close()
            raise QuadsError(
                "run folder is in use by another process",
                where=str(self.path),
                do="wait for it or choose another --out",
            ) from e
        self._lock = lock
        if (self.path / "run.json").exists() and not resume:
            raise QuadsError(
                "run folder already holds a run",
                where=str(self.path),
                do="give --resume to continue it or choose another --out",
            )
        if resume and not (self.path / "run.json").exists():
            raise QuadsError("nothing to resume: no run.json", where=str(self.path), do="start without --resume")

    def abandon(self) -> None:
        """Forget a new run that was refused before its first step, so that the mended command can use the folder."""
        if not self.metrics.exists() and self.latest_step() is None:
            (self.path / "run.json").unlink(missing_ok=True)

    def release(self) -> None:
        """Give the folder back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_status(self, state: str, step: int, **more: Any) -> None:
        """running | done | failed, with the number of completed steps."""
        atomic.write_json(self.path / "status.json", {"state": state, "step": step, "pid": os.getpid(), **more})

    def prune_refits(self, *, keep: int) -> None:
        """Remove all but the newest refit folders and version ``keep``, which the engine was started from and re-reads."""
        for old in sorted(self.exports.glob("v*"))[:-KEEP_REFITS]:
            if old != self.refit(keep):
                shutil.rmtree(old)

    def read_run(self) -> dict[str, Any]:
        """run.json; raises QuadsError when the folder is not a run."""
        path = self.path / "run.json"
        if not path.exists():
            raise QuadsError(
                "not a run folder: run.json is missing", where=str(self.path), do="give the --out of a `quads rl` run"
            )
        return json.loads(path.read_text())

    def append(self, file: Path, row: dict[str, Any]) -> None:
        """Append one row and flush it to the disk."""
        try:
            with open(file, "a") as f:
                f.write(json.dumps(row) + "\n")
                f.flush()
                os.fsync(f.fileno())
        except OSError as e:
            raise QuadsError(
                f"cannot write: {e.strerror}", where=str(file), do="free space, then resume the run"
            ) from e
