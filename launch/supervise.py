"""The driver of one attempt: starts the steps, watches them, and turns what happens into one true exit code.

Runs as the batch script's process (or in the foreground without SLURM). Every end is one of these:

    0      finished               1, 2   a rank's proof failed, or its input was refused (its own words are shown)
    N      a rank's own exit code, 128 + signal             70  rollout servers kept dying; the trainer has saved
    71     a node could not start a step                    72  no further attempt: no progress, or requeued too often
    75     saved and stopped, not requeued (a signal outside SLURM, scancel, or a requeue that SLURM refused)
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

from .. import atomic
from ..errors import QuadsError
from . import environment, history, plan
from .config import LaunchConfig, check
from .engine import Engine, LocalEngine, SlurmEngine
from .process import adopt_orphans, end_descendants
from .servers import Servers
from .verdict import NO_ATTEMPT, STOPPED, End, end_of_trainer, require_running, require_usable

POLL_S, BEAT_S, STOP_S = 0.25, 2.0, 15.0


class Supervisor:
    """One attempt from claim to exit."""

    def __init__(self, config: LaunchConfig, engine: Engine) -> None:
        self.config, self.engine = config, engine
        self.attempt = history.claim(config.run, engine.job)
        self.log = open(self.attempt.log("driver", engine.node), "a", buffering=1)  # noqa: SIM115 - for life
        self.slot = self.attempt.slot("driver").reserve(state="starting", node=engine.node, pid=os.getpid())
        (self.attempt.path / "heartbeat").touch()
        self.servers = Servers(config, self.attempt, engine, self._launch, self.say)
        self.trainer: subprocess.Popen[bytes] | None = None
        self._signals: list[int] = []
        self._told_at: float | None = None
        self._requeue = False
        self._next_beat = 0.0

    def say(self, text: str) -> None:
        """One line in the job's output and the driver's log; a full disk silences it, no more."""
        line = f"quads: attempt {self.attempt.number}: {text}"
        for stream in (sys.stdout, self.log):
            try:
                print(line, file=stream, flush=True)
            except OSError:
                continue

    def run(self) -> int:
        """The whole attempt; returns the exit code after everything has ended."""
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda n, _: self._signals.append(n))
        try:
            try:
                self._prepare()
                self._probe()
                self._start()
                while True:
                    self._tick()
            except QuadsError as e:
                raise End(e.exit_code, str(e)) from e
        except End as e:
            end = e
        self._stop_all(end.why)
        return self._finish(end)

    def _prepare(self) -> None:
        """Record what this attempt is, before anything starts."""
        refused = history.refuse_another(
            self.config.run, self.engine.job, self.config.limits, restarts=self.engine.restarts
        )
        self.plan = {
            "job": self.engine.job,
            "attempt": self.attempt.number,
            "start_step": history.latest_step(self.config.run),
            "servers": self.config.rollout.servers,
            "nodes": self.engine.nodes,
            "master": self.engine.nodes[0][0],
        }
        self._write_plan()
        if refused:
            raise End(NO_ATTEMPT, refused)
        atomic.write_json(self.attempt.path / "environment.json", environment.record(self.config))
        self.say(f"job {self.engine.job} on {self.engine.nodes}, from step {self.plan['start_step']}")

    def _write_plan(self) -> None:
        atomic.write_json(self.attempt.path / "plan.json", self.plan)

    def _launch(self, step: plan.Step) -> subprocess.Popen[bytes]:
        command = self.engine.command(self.config, step)
        self.say(f"starts {step.name}: {shlex.join(command)}")
        return self.engine.start(command, self.attempt)

    def _probe(self) -> None:
        """Every node must start a step and reach the master; one that does not is named."""
        steps = [self._launch(s) for s in plan.probes(self.config)]
        nodes = [n for group in self.engine.nodes for n in group]
        deadline = time.monotonic() + self.config.limits.node_start_s
        while any(p.poll() is None for p in steps):
            self._beat()
            if self._signals:
                raise End(STOPPED, "signalled while starting", requeue=self._may_requeue())
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        found = {n: self.attempt.slot(f"probe-{n}").read() or {} for n in nodes}
        first = str(self.plan["master"])
        code = max((p.poll() or 0 for p in steps), default=0)
        self.plan |= require_usable(found, first, waited_s=self.config.limits.node_start_s, code=code)
        self._write_plan()

    def _start(self) -> None:
        self.slot.write(state="running", node=self.engine.node, pid=os.getpid())
        self.servers.start()
        self.trainer = self._launch(plan.trainer(self.config))

    def _tick(self) -> None:
        """One look at everything; raises End when the attempt is over."""
        self._beat()
        if not history.owns(self.attempt):
            raise End(STOPPED, "another attempt has taken over the run")
        self._heed_signals()
        self._watch_trainer()
        if self._told_at is None:  # a trainer that leaves needs none of them
            self.servers.watch()
        time.sleep(POLL_S)

    def _beat(self) -> None:
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + BEAT_S
            try:
                self.attempt.beat()
            except OSError as e:  # a file system's hiccup: the roles are patient
                self.say(f"heartbeat: {e}")

    def _may_requeue(self) -> bool:
        """USR1 comes before the time limit or a preemption; SIGTERM also from scancel, which must stay an end."""
        return self.engine.can_requeue and not {signal.SIGTERM, signal.SIGINT} & set(self._signals)

    def _heed_signals(self) -> None:
        """Pass a signal on as the order to save; notice orders that roles or servers left."""
        if self._told_at is None and self._signals:
            self._requeue = self._may_requeue()
            self.attempt.tell("save_and_exit", signal.Signals(self._signals[0]).name)
        if self._told_at is None and (order := self.attempt.told("save_and_exit")):
            self._told_at = time.monotonic()
            # sites that do not pass the user's signal on preemption send SIGTERM to the steps
            self._requeue = self._requeue or ("code" not in order and self.engine.preempted())
            self.say(f"the trainer is told to save and exit: {order['reason']}")
        if self._told_at is not None and time.monotonic() - self._told_at > self.config.limits.save_s:
            # what the last committed checkpoint holds is resumed
            why = f"the trainer did not save within {self.config.limits.save_s} s (limits.save_s)"
            raise End(STOPPED, why, requeue=self._requeue)

    def _watch_trainer(self) -> None:
        assert self.trainer is not None
        # first the step, then its files: they are whole when it has ended
        code = self.trainer.poll()
        slots = {n: self.attempt.slot(f"trainer-{n}").read() or {} for n in self.engine.trainer_nodes}
        if not require_running(code, slots):
            order, saved = self.attempt.told("save_and_exit"), self.attempt.told("saved")
            raise end_of_trainer(order, saved, requeue=self._requeue)

    def _stop_all(self, why: str) -> None:
        """Tell every role to end, wait, then force it; the job must not leave a process anywhere."""
        try:
            self.attempt.tell("stop", why)
        except QuadsError as e:  # a full disk: the steps are ended by SLURM instead
            self.say(str(e))
        processes = self.servers.processes() + ([self.trainer] if self.trainer else [])
        deadline = time.monotonic() + STOP_S
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            self._beat()
            time.sleep(POLL_S)
        for process in processes:
            self.engine.end(process)
        self.servers.close()
        end_descendants(grace_s=2.0)

    def _finish(self, end: End) -> int:
        requeue = end.requeue
        if requeue and (
            refused := history.refuse_another(
                self.config.run, self.engine.job, self.config.limits, restarts=self.engine.restarts + 1
            )
        ):
            end, requeue = End(NO_ATTEMPT, f"{end.why}; not requeued: {refused}"), False
        state = "requeued" if requeue else "done" if end.code == 0 else "failed"
        self.say(f"{end.why} (exit code {end.code}{', back to the queue' if requeue else ''})")
        self.slot.write(state=state, code=end.code, reason=end.why, node=self.engine.node)
        if requeue and self.engine.requeue():
            return end.code
        history.release(self.attempt)
        return end.code


def main() -> None:
    """``python -m megatron_quads.launch.supervise CONFIG``; inside a SLURM job, or locally."""
    file = Path(sys.argv[1])
    adopt_orphans()
    try:
        config = check(yaml.safe_load(file.read_text()), where=str(file))
        in_job = "SLURM_JOB_ID" in os.environ and "--local" not in sys.argv
        engine: Engine = SlurmEngine(config) if in_job else LocalEngine(config)
        code = Supervisor(config, engine).run()
    except QuadsError as e:
        print(f"quads: error: {e}", file=sys.stderr, flush=True)
        code = e.exit_code
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
