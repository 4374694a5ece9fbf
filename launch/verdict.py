"""What an attempt's status files mean: usable nodes, a finished trainer, or the end with its exit code and reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .attempt import describe_exit
from .process import exit_code

NODE_FAILED, NO_ATTEMPT, STOPPED = 71, 72, 75


class End(Exception):
    """The attempt is over: exit code, why, and whether the job goes back to the queue."""

    def __init__(self, code: int, why: str, *, requeue: bool = False) -> None:
        super().__init__(why)
        self.code, self.why, self.requeue = code, why, requeue


def require_usable(
    found: Mapping[str, Mapping[str, Any]], first: str, *, waited_s: int, code: int | None = None
) -> dict[str, Any]:
    """Master address, port and interfaces from the nodes' probes (``found``: node -> slot); ``first`` is the master.

    Raises End naming the node that refused or could not start its step within ``waited_s``. ``code``: with which exit
    code the probes' step ended, None when it did not.
    """
    if refused := {n: s for n, s in found.items() if s.get("code")}:
        node, slot = next(iter(refused.items()))
        raise End(int(slot["code"]), f"node {node} is not usable: {slot.get('error', '')}")
    if silent := [n for n, s in found.items() if s.get("code") is None]:
        if code == 2:
            raise End(2, f"node {', '.join(silent)} is not usable: the line above says why")
        raise End(
            NODE_FAILED,
            f"node {', '.join(silent)} could not start a step within {waited_s} s; "
            f"exclude it (--set 'slurm.extra=[--exclude={silent[0]}]') and tell the site's administrators",
        )
    addresses = {str(s["master"]) for s in found.values()}
    # a host file may name the master's own loopback on the master: the others' view counts
    outside = {a for a in addresses if not a.startswith("127.")} or addresses
    if len(outside) != 1:
        raise End(2, f"the nodes resolve {first} to different addresses: {sorted(outside)}")
    return {
        "master_address": outside.pop(),
        "master_port": found[first]["port"],
        "interfaces": {n: s["interface"] for n, s in found.items()},
    }


def require_running(code: int | None, slots: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the trainer still runs, False when it ended well. ``code``: its step's return code, None while it runs.

    ``slots``: node -> the node's status file. Raises End with the first failing rank's own exit code.
    """
    if bad := [s for s in slots.values() if s.get("code")]:
        # what ended because it was told to is not the cause
        first = min(bad, key=lambda s: (bool(s.get("reason")), s["time"]))
        who = f"trainer rank {first['rank']}" if "rank" in first else "the trainer"
        raise End(int(first["code"]), f"{who} on {first['node']} {describe_exit(first)}")
    if code:
        lost = ", ".join(n for n, s in slots.items() if s.get("code") is None)
        raise End(exit_code(code), f"the trainer's step ended with {exit_code(code)} without a word from {lost}")
    return code is None


def end_of_trainer(order: Mapping[str, Any] | None, saved: Mapping[str, Any] | None, *, requeue: bool) -> End:
    """What a trainer's good end is: finished, or saved on the ``order`` to save and exit."""
    if saved is None:
        return End(0, "finished")
    step, reason = saved["step"], (order or {}).get("reason", "asked")
    if order and order.get("code"):
        return End(int(order["code"]), f"{reason}; the trainer saved step {step}")
    return End(STOPPED, f"{reason}: saved step {step}", requeue=requeue)
