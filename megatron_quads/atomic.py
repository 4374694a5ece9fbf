"""Write aside, fsync, rename. An interruption leaves the old output intact; a folder is complete only with its marker."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import QuadsError

MARKER = "COMMITTED.json"


def make_folder(path: str | Path) -> Path:
    """Create ``path`` and its parents; QuadsError when that cannot be."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise QuadsError(f"cannot create folder: {e.strerror}", where=str(path), do="choose another folder") from e
    return Path(path)


def fsync_path(path: Path) -> None:
    """fsync a file or a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_bytes(path: str | Path, data: bytes) -> None:
    """Atomically replace ``path`` with ``data``."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with open(aside, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(aside, path)
        fsync_path(path.parent)
    except OSError as e:
        aside.unlink(missing_ok=True)
        raise QuadsError(
            f"cannot write: {e.strerror}", where=str(path), do="free space or choose another folder"
        ) from e


def write_json(path: str | Path, value: Any) -> None:
    """Atomically write ``value`` as indented JSON."""
    write_bytes(path, (json.dumps(value, indent=1, sort_keys=False) + "\n").encode())


@contextlib.contextmanager
def folder(target: str | Path, *, marker: dict[str, Any] | None = None) -> Iterator[Path]:
    """Yield a temporary folder beside ``target``; on success fsync all, add the commit marker and swap it in.

    An existing target is replaced only after the new folder is complete. On any error the new folder is removed and the
    old one stays. Raises QuadsError on OS errors such as a full disk.
    """
    target = Path(target)
    aside = target.with_name(f".{target.name}.writing-{uuid.uuid4().hex[:8]}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        yield aside
        write_json(aside / MARKER, marker or {})
        commit(aside, target)
    except OSError as e:
        shutil.rmtree(aside, ignore_errors=True)
        raise QuadsError(
            f"cannot write: {e.strerror or e}", where=str(target), do="free space or choose another folder"
        ) from e
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def commit(aside: Path, target: Path) -> None:
    """fsync every file of ``aside`` and rename it over ``target`` (the old folder is moved away first, then removed)."""
    mask = os.umask(0o077)
    os.umask(mask)
    for root, _, files in os.walk(aside):
        for name in files:
            # some writers make private files: a server under another account must read them
            os.chmod(Path(root) / name, 0o666 & ~mask)
            fsync_path(Path(root) / name)
        fsync_path(Path(root))
    old = None
    if target.exists():
        old = target.with_name(f".{target.name}.old-{uuid.uuid4().hex[:8]}")
        os.rename(target, old)
    try:
        os.rename(aside, target)
    except OSError:
        if old is not None:
            os.rename(old, target)
        raise
    fsync_path(target.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def is_committed(target: str | Path) -> bool:
    """Whether a folder written by ``folder`` is complete."""
    return (Path(target) / MARKER).is_file()
