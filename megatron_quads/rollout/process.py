"""The child process that holds vLLM: start it, exchange messages with it, notice its death, end it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from .. import atomic
from ..errors import QuadsError

# a launcher's rank variables would make the child's single-process engine join the trainer's world
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def engine_environment() -> dict[str, str]:
    """Environment of a process that runs vLLM; what the user set wins."""
    env = {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES and not k.startswith("TORCHELASTIC_")}
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not torch.cuda.is_available():
        # no compiler on the CPU path, and no pinning of threads to cores that the trainer shares
        defaults |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return {**defaults, **env}


class EngineProcess:
    """A child that imports vLLM at once and starts its engine with the first message (see ``child.py``).

    It logs to ``log`` (None: a temporary file). When it dies every exchange raises QuadsError at once; when this process
    dies the child ends. QuadsError when it cannot be started.
    """

    def __init__(self, log: str | Path | None = None) -> None:
        if log is None:
            handle, name = tempfile.mkstemp(prefix="quads-rollout-", suffix=".log")
            os.close(handle)
            log = name
        self.log = Path(log)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        ours, theirs = socket.socketpair()
        self._lifeline, child_lifeline = socket.socketpair()
        atomic.make_folder(self.log.parent)
        env = {**engine_environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        try:
            with open(self.log, "ab") as out:
                fds = (theirs.fileno(), child_lifeline.fileno())
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "megatron_quads.rollout.child", *map(str, fds)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=env,
                    pass_fds=fds,
                )
        except OSError as e:
            raise QuadsError(f"cannot start the rollout: {e}", where=str(self.log), do="check the log's folder") from e
        theirs.close()
        child_lifeline.close()
        self._connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        """Process id of the child."""
        assert self._process is not None
        return self._process.pid

    def exchange(self, message: Any) -> Any:
        """Send a message (the first: settings of ``child.Engine``; then method and arguments) and return the reply."""
        with self._lock:
            if self._process is None:
                raise QuadsError("the rollout is closed", where=str(self.log), do="start another one")
            try:
                self._connection.send(message)
                # EOF tells of a dead child at once; a grandchild that kept the socket open must not hide it
                while not self._connection.poll(1.0):
                    if self._process.poll() is not None and not self._connection.poll(0):
                        raise EOFError
                kind, value = self._connection.recv()
            except (EOFError, OSError) as e:
                raise self._died() from e
        if kind == "refused":
            what, where, do = value
            raise QuadsError(what, where=where, do=do)
        if kind == "failed":
            raise QuadsError(f"rollout failed: {value}", where=str(self.log), do="read the log")
        return value

    def _died(self) -> QuadsError:
        assert self._process is not None
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return QuadsError(f"rollout process died ({how})", where=str(self.log), do="read the log, then resume the run")

    def close(self) -> None:
        """End the child (its own way first, then by signal). Harmless when already closed."""
        process, self._process = self._process, None
        if process is None:
            return
        self._connection.close()
        self._lifeline.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
