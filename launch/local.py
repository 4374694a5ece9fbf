"""Run a job as N ranks on this host: one process per rank, torchrun's environment variables, fail as one.

Unlike torchrun, the exit code of the first rank that failed is kept (2 = bad input, 1 = a failed proof) and its last
error line is what the user sees. Under torchrun or srun (RANK set) this module is not used: the job runs in place.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from .. import atomic
from ..errors import QuadsError
from . import network

GRACE_S = 15.0
LAUNCHER = "QUADS_LAUNCHER_PID"


def free_port() -> int:
    """A free TCP port, from a random start below the ports that the kernel gives to clients.

    A rank listens seconds after its port was chosen: one of the kernel's own choice may be a client's by then.
    """
    return network.free_port(network.port_candidates(str(secrets.randbelow(1 << 31))))


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Environment of one rank, as torchrun sets it."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONUNBUFFERED": "1",
        LAUNCHER: str(os.getpid()),
        # Megatron wants this on GPUs older than Blackwell, and it is harmless elsewhere
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
    }


def end_with_launcher() -> None:
    """In a rank started by ``run_ranks``: the kernel ends this process when the launcher dies, however it dies."""
    launcher = int(os.environ.get(LAUNCHER, "0"))
    if not launcher:
        return
    pr_set_pdeathsig = 1
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != launcher:  # it died before the kernel was asked
        os._exit(2)


def _pump(stream: IO[bytes], log: Path, show: Callable[[str], None] | None) -> None:
    with open(log, "ab") as f:
        for line in stream:
            f.write(line)
            f.flush()
            if show is not None:
                show(line.decode(errors="replace").rstrip("\n"))
                sys.stdout.flush()


def run_ranks(argv: Sequence[str], *, nproc: int, logs: Path, show: Callable[[str], None] = print) -> None:
    """Run ``argv`` as ``nproc`` ranks; ``show`` gets rank 0's stdout, stderr of rank R goes to ``logs/rank{R}.log``.

    Raises QuadsError (with the failing rank's exit code) when any rank fails; the others are then ended.
    """
    atomic.make_folder(logs)
    port = free_port()
    ranks: list[subprocess.Popen[bytes]] = []
    pumps: list[threading.Thread] = []
    files = [logs / f"rank{r}.log" for r in range(nproc)]
    starts = [f.stat().st_size if f.exists() else 0 for f in files]
    try:
        for r in range(nproc):
            with open(files[r], "ab") as err:
                p = subprocess.Popen(
                    list(argv),
                    env=rank_environment(r, nproc, port),
                    stdout=subprocess.PIPE,
                    stderr=err,
                    start_new_session=True,
                )
            ranks.append(p)
            pumps.append(
                threading.Thread(target=_pump, args=(p.stdout, files[r], show if r == 0 else None), daemon=True)
            )
            pumps[-1].start()
        failed = _wait(ranks)
        for t in pumps:
            t.join(timeout=5)
    except KeyboardInterrupt as e:
        _end(ranks)
        error = QuadsError("interrupted", where=str(logs), do="a run can be continued with --resume")
        error.exit_code = 130
        raise error from e
    except BaseException:
        _end(ranks)
        raise
    if failed is None:
        return
    _end(ranks)
    code = ranks[failed].returncode
    raise _error_of(failed, code, files, starts)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int | None:
    """Index of the first rank that failed, None when all ended well."""
    while True:
        codes = [p.poll() for p in ranks]
        bad = [i for i, c in enumerate(codes) if c not in (None, 0)]
        if bad:
            # a peer of the culprit may die of the broken connection first: give the others a moment and prefer one
            # that ended by a QuadsError (1 or 2) over one that crashed
            time.sleep(1.0)
            codes = [p.poll() for p in ranks]
            spoken = [i for i, c in enumerate(codes) if c == 2]
            return (spoken or bad)[0]
        if all(c == 0 for c in codes):
            return None
        time.sleep(0.1)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for sig in (signal.SIGTERM, signal.SIGKILL):
        for p in ranks:
            if p.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(p.pid, sig)
        deadline = time.monotonic() + (GRACE_S if sig == signal.SIGTERM else 2.0)
        while time.monotonic() < deadline and any(p.poll() is None for p in ranks):
            time.sleep(0.1)


def _error_of(rank: int, code: int, files: list[Path], starts: list[int]) -> QuadsError:
    with open(files[rank], "rb") as f:
        f.seek(starts[rank])
        lines = f.read().decode(errors="replace").splitlines()
    said = [line for line in lines if line.startswith("quads: error: ")]
    if said:
        error = QuadsError(said[-1].removeprefix("quads: error: "))
        error.exit_code = code if code in (1, 2) else 2
        return error
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    else:
        tail = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        how = f"ended with exit code {code}: {tail[:200]}"
    error = QuadsError(
        f"rank {rank} {how}",
        where=str(files[rank]),
        do="read its log; a run can be continued with --resume",
    )
    error.exit_code = 2
    return error
