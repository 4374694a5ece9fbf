"""The rollout servers of an attempt: their steps, their health, their restarts within a limit."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from .. import atomic
from ..errors import QuadsError
from . import plan
from .attempt import Attempt, describe_exit
from .config import LaunchConfig
from .engine import Engine
from .health import NoAnswer, ask, require_ours
from .process import exit_code

ROLLOUT_FAILED = 70


class _Server:
    def __init__(self, step: plan.Step, process: subprocess.Popen[bytes]) -> None:
        self.step, self.process = step, process
        self.incarnation = self.misses = 0
        self.asked: Future[dict[str, Any]] | None = None
        self.next_ask = 0.0


class Servers:
    """All of them. A restarted server gets a new address; the trainer notices and gives it the current weights."""

    def __init__(
        self,
        config: LaunchConfig,
        attempt: Attempt,
        engine: Engine,
        launch: Callable[[plan.Step], subprocess.Popen[bytes]],
        say: Callable[[str], None],
    ) -> None:
        self.config, self.attempt, self.engine, self._launch, self.say = config, attempt, engine, launch, say
        self._servers: list[_Server] = []
        self._pool = ThreadPoolExecutor(max(1, config.rollout.servers))

    def start(self) -> None:
        """Start every server's step."""
        self._servers = [_Server(step, self._launch(step)) for step in plan.rollouts(self.config)]

    def processes(self) -> list[subprocess.Popen[bytes]]:
        """Their local handles (srun, or the role itself)."""
        return [s.process for s in self._servers]

    def close(self) -> None:
        """Ask no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def watch(self) -> None:
        """One look at each; a dead or refused one is restarted, or the trainer told to save and exit."""
        for server in self._servers:
            fault = self._fault(server)
            if fault is not None:
                self._restart(server, fault)

    def _fault(self, server: _Server) -> str | None:
        code = server.process.poll()
        slot = self.attempt.slot(server.step.name).read() or {}
        if code is None and slot.get("state") != "ended":
            fault = self._unhealthy(server, slot)
            if fault is not None:
                self.attempt.tell(f"stop-{server.step.name}-{server.incarnation}", fault)
            return fault
        return describe_exit(slot if slot.get("code") is not None else {"code": exit_code(code or 0)})

    def _restart(self, server: _Server, fault: str) -> None:
        if self.attempt.told("save_and_exit"):  # a step-wide signal ended it: the trainer saves without it
            return
        slot = self.attempt.slot(server.step.name)
        where = f"rollout server {server.step.index} on {(slot.read() or {}).get('node', '?')}"
        if server.incarnation >= self.config.rollout.max_restarts:
            why = f"{where} {fault}; it was restarted {server.incarnation} times (rollout.max_restarts)"
            self.attempt.tell("save_and_exit", why, code=ROLLOUT_FAILED)
            return
        self.say(f"{where} {fault}: restarts it")
        self.engine.end(server.process)
        server.incarnation += 1
        server.misses, server.asked = 0, None
        restarted = self.attempt.path / "control" / f"incarnation-{server.step.index}"
        atomic.write_json(restarted, {"number": server.incarnation})
        slot.reserve(state="restarting", restarts=server.incarnation)
        server.process = self._launch(server.step)

    def _unhealthy(self, server: _Server, slot: dict[str, Any]) -> str | None:
        """Ask a published server who it is, without waiting for the answer; the fault that ends it, or None."""
        endpoint = self.attempt.endpoint(server.step.index)
        if endpoint is None or endpoint["incarnation"] != server.incarnation:
            return None
        if server.asked is None:
            if time.monotonic() >= server.next_ask:
                server.asked = self._pool.submit(ask, endpoint["url"])
            return None
        if not server.asked.done():
            return None
        asked, server.asked = server.asked, None
        server.next_ask = time.monotonic() + self.config.limits.health_every_s
        expected = {"job": self.engine.job, "attempt": self.attempt.number, "where": endpoint["url"]}
        try:
            info = asked.result()
            offer = self.attempt.serving() or {}
            # a run that takes its selection anew changes it at refits, and holds its servers to it itself
            require_ours(info, **expected, rac_hash=False if offer.get("reselects") else offer.get("rac_hash"))
        except NoAnswer as e:
            server.misses += 1
            gone = server.misses >= self.config.limits.health_misses
            return f"did not answer {server.misses} times: {e}" if gone else None
        except QuadsError as e:
            return f"is refused: {e}"
        server.misses = 0
        about = {k: info.get(k) for k in ("version", "rac_hash", "job", "attempt")}
        atomic.write_json(
            self.attempt.path / "endpoints" / f"health-{server.step.index}.json",
            {**about, "time": time.time(), "restarts": server.incarnation, "node": slot.get("node")},
        )
        return None
