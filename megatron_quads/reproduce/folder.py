"""The folder of a reproduction: what is done, what belongs to which configuration, and its logs as one small archive.

reproduce.json   configuration and its hash           init/  warm/  warm-run/   the model before and after the warm-up
warm.json        digest and pass@1 of the warm checkpoint
bases/NAME/      calibrated checkpoints               study/study.json          measurements on the warm checkpoint
arms/ARM/seed-N/ run folders of `quads rl`, and arm.json: hashes of configuration, checkpoint and selection, the machine
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import atomic
from ..errors import QuadsError
from ..rac.metadata import load_sidecar
from ..rl.runfolder import RunFolder
from .config import SHARED_NOT, Config, check, first_difference

RUN_LOGS = ("arm.json", "run.json", "status.json", "metrics.jsonl", "evals.jsonl", "audit.jsonl")


class Root:
    """A reproduction's folder, bound to one configuration."""

    def __init__(self, path: Path, config: Config) -> None:
        self.path, self.config = path, config

    @classmethod
    def open(cls, path: Path, config: Config) -> Root:
        """Make the folder, or take it up again; QuadsError when it was made with other settings.

        Arms, seeds, study and saving may change; the file then holds the newest.
        """
        atomic.make_folder(path)
        file = path / "reproduce.json"
        if file.exists() and _read(file)["hash"] != config.shared_hash:
            key = first_difference(_read(file)["config"], config.model_dump(mode="json"), SHARED_NOT)
            raise QuadsError(
                f"made with other settings: {key}",
                where=str(path),
                do="choose another --root, or go back to the settings in its reproduce.json",
            )
        atomic.write_json(file, {"hash": config.shared_hash, "config": config.model_dump(mode="json")})
        return cls(path, config)

    @classmethod
    def read(cls, path: Path) -> Root:
        """An existing folder with the configuration it holds."""
        file = path / "reproduce.json"
        if not file.exists():
            raise QuadsError("no reproduction here", where=str(path), do="start with `quads reproduce warm`")
        return cls(path, check(_read(file)["config"], where=str(file)))

    @property
    def init(self) -> Path:
        return self.path / "init"

    @property
    def warm(self) -> Path:
        return self.path / "warm"

    @property
    def study(self) -> Path:
        return self.path / "study" / "study.json"

    def base(self, name: str | None) -> Path:
        """A calibrated checkpoint; None: the warm one."""
        return self.warm if name is None else self.path / "bases" / name

    def run(self, arm: str, seed: int) -> Path:
        """Run folder of an arm and seed."""
        return self.path / "arms" / arm / f"seed-{seed}"

    def runs(self) -> Iterator[tuple[str, int]]:
        """Arms and seeds of the configuration, all arms of a seed before the next."""
        arms = {name: arm for name, arm in self.config.arms.items() if arm.unavailable is None}
        for seed in range(max((arm.seeds for arm in arms.values()), default=0)):
            yield from ((name, seed) for name, arm in arms.items() if seed < arm.seeds)

    def state(self, arm: str, seed: int) -> dict[str, Any]:
        """status.json of the run; state ``not run`` before it starts."""
        file = self.run(arm, seed) / "status.json"
        return _read(file) if file.exists() else {"state": "not run", "step": 0}

    def require_warm(self) -> str:
        """Digest of the warm checkpoint's weights; QuadsError when it is not there or of another configuration."""
        if not atomic.is_committed(self.warm):
            raise QuadsError("no warm checkpoint", where=str(self.warm), do="run `quads reproduce warm` first")
        made = _read(self.warm / atomic.MARKER)
        if made.get("config") != self.config.warm_hash:
            raise QuadsError(
                f"warm checkpoint of configuration {made.get('config')}, this one is {self.config.warm_hash}",
                where=str(self.warm),
                do="give the one that belongs to the configuration, or run `quads reproduce warm`",
            )
        digest = weights_digest(self.warm)
        if not (self.path / "warm.json").exists():  # what tables need of it where the weights are not
            found = {"weights": digest, "steps": made["steps"], "pass@1": made["pass@1"]}
            atomic.write_json(self.path / "warm.json", found)
        return digest

    def claim(self, arm: str, seed: int, machine: dict[str, Any]) -> Path:
        """Bind a run folder to configuration, warm checkpoint and selection; QuadsError when it is bound to others."""
        run = atomic.make_folder(self.run(arm, seed))
        rac = load_sidecar(self.base(self.config.arm(arm).base))
        bound = {
            "arm": arm,
            "seed": seed,
            "config": self.config.arm_hash(arm),
            "warm": self.require_warm(),
            "rac": rac.content_hash if rac is not None else None,
        }
        if (run / "arm.json").exists():
            old = _read(run / "arm.json")
            for key, value in bound.items():
                if old[key] != value:
                    raise QuadsError(
                        f"{key} was {old[key]} and is now {value}",
                        where=str(run / "arm.json"),
                        do="move the run away, or go back to what it was made with",
                    )
            machine = old["machine"]
        atomic.write_json(run / "arm.json", {**bound, "machine": machine})
        return run

    def prune(self, arm: str, seed: int) -> None:
        """Keep only the newest committed trainer checkpoint of a run."""
        folder = RunFolder(self.run(arm, seed))
        for old in folder.path.glob("checkpoints/step_*"):
            if atomic.is_committed(old) and old != folder.checkpoint(folder.latest_step() or 0):
                shutil.rmtree(old)

    @contextmanager
    def lock(self, part: str) -> Iterator[None]:
        """One process at a time makes a part (warm, a base, study, merge); others wait. A killed one holds nothing."""
        with open(self.path / f".lock-{part}", "a+") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    @contextmanager
    def run_lock(self, arm: str, seed: int) -> Iterator[bool]:
        """Whether this process has the run to itself: several may work on the arms of one folder."""
        run = atomic.make_folder(self.run(arm, seed))
        with open(run / ".reproduce.lock", "a+") as handle:  # `quads rl` has a lock of its own in there
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def pack(self, out: Path) -> list[str]:
        """Write all logs (no weights) as ``out``, a .tar.gz; names of the files in it."""
        if out.is_dir():
            raise QuadsError("is a folder", where=str(out), do="name a file, such as logs.tar.gz")
        names = [n for n in ("reproduce.json", "warm.json", "study/study.json") if (self.path / n).exists()]
        for arm, seed in self.runs():
            run = self.run(arm, seed).relative_to(self.path)
            names += [str(run / n) for n in RUN_LOGS if (self.path / run / n).exists()]
        made = io.BytesIO()  # logs alone: some megabytes
        with tarfile.open(fileobj=made, mode="w:gz") as archive:
            for name in names:
                data = self._without_paths(self.path / name)
                entry = tarfile.TarInfo(name)
                entry.size, entry.mtime = len(data), int((self.path / name).stat().st_mtime)
                archive.addfile(entry, io.BytesIO(data))
        atomic.make_folder(out.parent)
        atomic.write_bytes(out, made.getvalue())
        return names

    def _without_paths(self, file: Path) -> bytes:
        """A log as an archive holds it: run.json names model and run as they lie in the root, wherever that was."""
        if file.name != "run.json":
            return file.read_bytes()
        run, settings = file.parent.relative_to(self.path), _read(file)
        base = self.base(self.config.arm(run.parts[1]).base)
        settings["rl"] |= {"model": str(base.relative_to(self.path)), "out": str(run)}
        return json.dumps(settings, indent=1).encode()

    @classmethod
    def like(cls, path: Path, archive: Path) -> Root:
        """A folder with the configuration of an archive of ``pack``; QuadsError when the archive cannot be read."""
        with _unpacked(archive) as other:
            return cls.open(path, other.config)

    def merge(self, archive: Path) -> list[str]:
        """Take the logs of another machine's ``pack``; a run here that is as far or further stays. Runs taken.

        QuadsError when they are of another configuration, or rest on another warm checkpoint.
        """
        with _unpacked(archive) as other:
            if other.config.shared_hash != self.config.shared_hash:
                raise QuadsError(
                    f"logs of configuration {other.config.shared_hash}, here it is {self.config.shared_hash}",
                    where=str(archive),
                    do="merge it into a folder of its own",
                )
            return _take(other, self)


@contextmanager
def _unpacked(archive: Path) -> Iterator[Root]:
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with tarfile.open(archive) as opened:
                opened.extractall(scratch, filter="data")
        except (OSError, EOFError, zlib.error, tarfile.TarError) as e:  # the middle two: cut off, damaged
            raise QuadsError(
                f"cannot read: {e}", where=str(archive), do="give an archive of `quads reproduce pack`"
            ) from e
        if not (Path(scratch) / "reproduce.json").exists():
            raise QuadsError("no logs in it", where=str(archive), do="give an archive of `quads reproduce pack`")
        yield Root.read(Path(scratch))


def _take(other: Root, mine: Root) -> list[str]:
    taken = []
    warm = {_read(r.run(*k) / "arm.json")["warm"] for r in (mine, other) for k in r.runs() if _bound(r, *k)}
    warm |= {_read(r.path / "warm.json")["weights"] for r in (mine, other) if (r.path / "warm.json").exists()}
    if len(warm) > 1:
        raise QuadsError("runs rest on different warm checkpoints", where=str(mine.path), do="keep them apart")
    for arm, seed in other.runs():
        if not _bound(other, arm, seed) or other.config.arm_hash(arm) != mine.config.arm_hash(arm):
            continue
        theirs, ours = other.state(arm, seed), mine.state(arm, seed)
        further = (theirs["state"] == "done", theirs["step"]) > (ours["state"] == "done", ours["step"])
        if not (further or _damaged(mine, arm, seed)) or RunFolder(mine.run(arm, seed)).latest_step() is not None:
            continue
        target = mine.run(arm, seed)
        atomic.make_folder(target.parent)
        with atomic.folder(target) as aside:
            shutil.copytree(other.run(arm, seed), aside, dirs_exist_ok=True)
        taken.append(f"{arm}/seed-{seed}")
    for name in ("warm.json", "study/study.json"):
        if (other.path / name).exists() and not (mine.path / name).exists():
            atomic.make_folder((mine.path / name).parent)
            atomic.write_bytes(mine.path / name, (other.path / name).read_bytes())
    return taken


def _damaged(root: Root, arm: str, seed: int) -> bool:
    from .logs import read_run

    try:
        read_run(root, arm, seed)
    except QuadsError:
        return True
    return False


def _bound(root: Root, arm: str, seed: int) -> bool:
    return arm in root.config.arms and (root.run(arm, seed) / "arm.json").exists()


def weights_digest(checkpoint: Path) -> str:
    """sha256 over a checkpoint's safetensors files, 16 digits."""
    found = hashlib.sha256()
    for file in sorted(checkpoint.glob("*.safetensors")):
        found.update(file.name.encode())
        with open(file, "rb") as f:
            found.update(hashlib.file_digest(f, "sha256").digest())
    return found.hexdigest()[:16]


def _read(file: Path) -> dict[str, Any]:
    value = json.loads(file.read_text())
    assert isinstance(value, dict), file
    return value
