"""A child process with all that it starts: ended as a whole, and nothing outlives whoever started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_CHILD_SUBREAPER, _PR_SET_PDEATHSIG = 36, 1


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process, so that ``end_descendants`` finds them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """SIGKILL for this process when the one that started it ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def start(command: Sequence[str], env: Mapping[str, str], *, ignore: str = "USR1 USR2") -> subprocess.Popen[bytes]:
    """Start ``command`` in a session of its own, deaf to the ``ignore`` signals unless it asks for them.

    SLURM signals every process of a step: torchrun and the ranks would die of a USR1 that only means "save".
    """
    return subprocess.Popen(
        ["/bin/sh", "-c", f'trap "" {ignore}; exec "$@"', "sh", *command],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def descendants(pid: int) -> list[int]:
    """All processes below ``pid``, children first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                text = Path("/proc", entry, "stat").read_text()
                children.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(entry))
    found, level = [], [pid]
    while level:
        level = [c for p in level for c in children.get(p, [])]
        found += level
    return found


def end_descendants(*, grace_s: float = 0.0) -> None:
    """End every process below this one: SIGTERM and ``grace_s`` (0: none), then SIGKILL until none is left."""
    me, deadline = os.getpid(), time.monotonic() + grace_s
    sent = False
    while left := descendants(me):
        term = time.monotonic() < deadline
        for pid in left:
            if not (term and sent):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM if term else signal.SIGKILL)
        sent = True
        _reap()
        time.sleep(0.05)


def _reap() -> None:
    """Collect the ended ones, adopted orphans included."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def exit_code(returncode: int) -> int:
    """Popen's return code as a shell's: 128 + signal."""
    return 128 - returncode if returncode < 0 else returncode
