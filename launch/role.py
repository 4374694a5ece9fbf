"""One node's part of a step: ``python -m megatron_quads.launch.role ROLE INDEX CONFIG``, started by srun or locally.

It keeps the log and the status file, starts the real program, and ends it with everything below it when told to, when
the supervisor is gone, or when another attempt has taken over the run.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ..errors import QuadsError
from . import history, network, plan
from .attempt import Attempt, this_node
from .config import LaunchConfig, check
from .health import NoAnswer, ask, require_ours
from .process import adopt_orphans, end_descendants, exit_code, start
from .rank import SAID, failures, refuse

POLL_S, FENCE_POLL_S = 0.25, 2.0
ROLLOUT_GRACE_S = 5.0


class Role:
    """State of this process."""

    def __init__(self, role: str, index: int, config: LaunchConfig, attempt: Attempt) -> None:
        self.role, self.index, self.config, self.attempt = role, index, config, attempt
        self.node = this_node()
        self.task = int(os.environ.get("SLURM_PROCID", "0")) if "SLURM_STEP_ID" in os.environ else 0
        self.incarnation = int((attempt.told(f"incarnation-{index}") or {"number": 0})["number"])
        self.key = f"rollout-{index}" if role == "rollout" else f"{role}-{self.node}"
        self.slot = attempt.slot(self.key)
        self.about: dict[str, Any] = {"role": role, "index": index, "node": self.node, "task": self.task}
        self.started = time.time()
        per_node = config.rollout.servers_per_node if role == "rollout" else 1
        self.log = attempt.log(role, f"{self.node}.{index}" if per_node > 1 else self.node)
        self.log_start = 0
        self._terminated = False
        self._next_fence = 0.0

    def open_log(self) -> None:
        """Let this process and all that it starts write to the role's log; a probe's words belong to the job's output."""
        if self.role == "probe":
            return
        try:
            fd = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self.log_start = self.log.stat().st_size
        except OSError as e:
            raise QuadsError(f"cannot write: {e.strerror}", where=str(self.log), do="free space") from e
        os.dup2(fd, 1)
        os.dup2(fd, 2)

    def run(self) -> NoReturn:
        """Do the role's work and exit with its code."""
        self.slot.reserve(state="starting", pid=os.getpid(), **self.about)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._signalled)
        try:
            code, more = getattr(self, f"_{self.role}")()
        except QuadsError as e:
            code, more = refuse(e), {"error": str(e)}
        finally:
            end_descendants(grace_s=ROLLOUT_GRACE_S if self.role == "rollout" else 0.0)
        self.slot.write(state="ended", code=code, **more, **self.about)
        os._exit(code)

    def _signalled(self, number: int, frame: object) -> None:
        """SLURM signals steps on preemption and `scancel --signal`: that means save, the end comes by itself."""
        self._terminated = True

    def _order(self) -> str | None:
        """Why to end now, None to go on."""
        if self._terminated:
            self._terminated = False
            if self.attempt.told("stop") is None:
                self.attempt.tell("save_and_exit", f"signal on {self.node}")
        for order in ("stop", f"stop-{self.key}-{self.incarnation}"):
            if told := self.attempt.told(order):
                return str(told["reason"])
        if time.monotonic() < self._next_fence:
            return None
        self._next_fence = time.monotonic() + FENCE_POLL_S
        age = self.attempt.heartbeat_age(time.time())
        if age > self.config.limits.fence_s and time.time() - self.started > self.config.limits.fence_s:
            return f"the supervisor gave no sign for {age:.0f} s"
        if not history.owns(self.attempt):
            return "another attempt has taken over the run"
        return None

    def _watch(self, command: list[str], env: dict[str, str], **kept: Any) -> tuple[int, dict[str, Any]]:
        """Run ``command`` to its end, or end it on an order; (exit code, more for the status file)."""
        ignore = "USR1 USR2 TERM" if self.role == "trainer" else "USR1 USR2"
        print(f"quads: {self.key} on {self.node}: {shlex.join(command)}", flush=True)
        child = start(command, {**env, **self.attempt.environment()}, ignore=ignore)
        self.slot.write(state="running", pid=child.pid, **kept, **self.about)
        published = not kept
        while (code := child.poll()) is None:
            if order := self._order():
                print(f"quads: {self.key} ends: {order}", flush=True)
                # a trainer that was ended has not finished; a server never does anything else
                return 143 if self.role == "trainer" else 0, {"reason": order, **kept}
            if not published:
                published = self._publish(kept)
            if self.role == "trainer" and (bad := failures(self.attempt, self.node)):
                return int(bad[0]["code"]), {"error": str(bad[0].get("error", "")), "rank": bad[0]["rank"]}  # type: ignore[call-overload]
            time.sleep(POLL_S)
        if self._terminated:  # the order stands before this end is recorded: the supervisor takes it for the cause
            self._order()
        bad = failures(self.attempt, self.node) if self.role == "trainer" else []
        if bad:
            more: dict[str, Any] = {"error": str(bad[0].get("error", "")), "rank": bad[0]["rank"]}
            return int(bad[0]["code"]), {**more, **kept}  # type: ignore[call-overload]
        said = self._said() if code > 0 else None  # e.g. a disk too full for any rank's status file
        return (2 if said else exit_code(code)), {**({"error": said} if said else {}), **kept}

    def _said(self) -> str | None:
        """The last error line that this step's programs left in the log."""
        with open(self.log, "rb") as f:
            f.seek(max(self.log_start, self.log.stat().st_size - 65536))
            lines = f.read().decode(errors="replace").splitlines()
        found = [line.removeprefix(SAID) for line in lines if line.startswith(SAID)]
        return found[-1] if found else None

    def _environment(self, interface: str) -> dict[str, str]:
        gpus = plan.gpu_share(self.config, plan.Step(self.role, self.index, 0, 0, 1, 0))
        env = {**os.environ, **self.config.environment, "PYTHONUNBUFFERED": "1"}
        env |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        env.setdefault("OMP_NUM_THREADS", "1")
        if gpus is not None:
            first, count = gpus
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            given = visible if visible != [""] else [str(i) for i in range(first + count)]
            if len(given) < first + count:
                raise QuadsError(
                    f"{len(given)} GPUs are visible, {self.key} needs number {first} to {first + count - 1}",
                    where=self.node,
                    do="ask for more GPUs per node",
                )
            env["CUDA_VISIBLE_DEVICES"] = ",".join(given[first : first + count])
        return env

    def _interface(self, master: str) -> tuple[str, str]:
        nodes = [n for group in self.attempt.plan()["nodes"] for n in group]
        target, several = network.outward(master, nodes)
        return network.choose_interface(target, self.config.site.interface, several_nodes=several)

    def _probe(self) -> tuple[int, dict[str, Any]]:
        """This node can start a step, sees the run folder, resolves the master and has an interface to it."""
        master = network.address_of(self.attempt.plan()["master"])
        interface, address = self._interface(master)
        port = network.free_port(network.port_candidates(self.attempt.job))
        return 0, {"master": master, "interface": interface, "address": address, "port": port}

    def _trainer(self) -> tuple[int, dict[str, Any]]:
        found = self.attempt.plan()
        interface, _ = self._interface(found["master_address"])
        env = self._environment(interface)
        # a step-wide SIGTERM (preemption) means save: torchrun would end the ranks
        env |= {"PET_SIGNALS_TO_HANDLE": "SIGQUIT", "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT"}
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        env["QUADS_ROLLOUT_SERVERS"] = str(self.config.rollout.servers)
        resume = (self.attempt.run / "run.json").exists()
        command = plan.torchrun_command(
            self.config, self.task, found["master_address"], int(found["master_port"]), resume=resume
        )
        return self._watch(command, env)

    def _rollout(self) -> tuple[int, dict[str, Any]]:
        """Wait for the trainer's export, serve it, publish the address once the server says that it is ours."""
        offer: dict[str, Any] | None = None
        while offer is None:
            if order := self._order():
                return 0, {"reason": order}
            offer = self.attempt.serving()
            time.sleep(POLL_S)
        interface, address = self._interface(self.attempt.plan()["master_address"])
        # each server and each restart starts at another candidate (7 divides no block): two servers of a node do not
        # meet, and an old address never answers with a new server
        offset = 1 + (self.index + 7 * self.incarnation) % (network.PORTS_PER_JOB - 1)
        port = network.free_port(network.port_candidates(self.attempt.job, offset))
        kept = {"url": f"http://{address}:{port}", "incarnation": self.incarnation}
        env = self._environment(interface)
        if "rollout" in self.config.roles:
            command = [*self.config.roles["rollout"], address, str(port)]
        else:
            command, env = _server(offer, address, port, self.config, env)
        return self._watch(command, env, **kept)

    def _publish(self, kept: dict[str, Any]) -> bool:
        """True once the server answered as ours and its address is written; QuadsError when another's answers."""
        try:
            info = ask(kept["url"], timeout_s=2.0)
        except NoAnswer:
            if time.time() - self.started > self.config.rollout.start_timeout_s:
                raise QuadsError(
                    f"the server did not answer within {self.config.rollout.start_timeout_s} s",
                    where=kept["url"],
                    do="read the rollout's log; raise rollout.start_timeout_s for a large model",
                ) from None
            time.sleep(1.0)
            return False
        require_ours(info, job=self.attempt.job, attempt=self.attempt.number, where=kept["url"])
        self.attempt.publish(self.index, **kept, node=self.node)
        return True


def _server(
    offer: dict[str, Any], host: str, port: int, config: LaunchConfig, env: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """vLLM's OpenAI server on the trainer's offer: command and environment."""
    from ..rollout.http import server_command, server_environment

    command = server_command(
        offer["checkpoint"],
        host=host,
        port=port,
        dtype=offer["dtype"],
        max_model_len=int(offer["max_model_len"]),
        max_num_seqs=config.rollout.max_num_seqs or int(offer["max_num_seqs"]),
        seed=int(offer["seed"]),
    )
    return command + plan.flags(config.rollout.options), {**server_environment(), **env, "VLLM_SERVER_DEV_MODE": "1"}


def main() -> None:
    """See the module."""
    role, index, file = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    attempt = Attempt.from_environment()
    if attempt is None:
        sys.exit("quads: error: not inside a launch; start it with `quads submit`")
    adopt_orphans()
    try:
        me = Role(role, index, check(yaml.safe_load(file.read_text()), where=str(file)), attempt)
        me.open_log()
        me.run()
    except QuadsError as e:  # there is no status file to say it in
        sys.exit(refuse(e))


if __name__ == "__main__":
    main()
