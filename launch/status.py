"""``quads status``: where a run is, from its files alone: any login node that sees the folder can ask."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..errors import QuadsError
from . import history
from .attempt import Attempt, attempts, read_json

STALE_S = 60.0
_TAIL_BYTES = 65536


@dataclass(frozen=True)
class Row:
    """One process of the attempt."""

    role: str
    node: str
    state: str
    version: str
    restarts: int
    said: str


def snapshot(run: Path) -> dict[str, Any]:
    """Everything the table shows, as JSON values. Raises QuadsError when ``run`` was not launched."""
    made = attempts(run)
    attempt = made[-1] if made else None
    driver = (attempt.slot("driver").read() if attempt else None) or {}
    plan = attempt.plan() if attempt else {}
    owner = read_json(run / history.OWNER) or {}
    job, state, reason = plan.get("job"), str(driver.get("state", "starting")), str(driver.get("reason", ""))
    if owner and owner.get("attempt") is None:  # submitted; no attempt of this job has started
        job, state, reason, driver = owner.get("job"), "queued", "SLURM has not started the job (squeue)", {}
    elif attempt is None:
        raise QuadsError("no attempt was made at this run", where=str(run), do="give the run folder of `quads submit`")
    elif state in ("running", "starting") and (age := attempt.heartbeat_age(time.time())) > STALE_S:
        state = f"lost: no sign for {age:.0f} s"
    last = last_row(run / "metrics.jsonl") or {}
    return {
        "run": str(run),
        "job": job,
        "attempt": None if attempt is None else attempt.number,
        "state": state,
        "code": driver.get("code"),
        "reason": reason,
        "step": last.get("step", plan.get("start_step", 0)),
        "saved": history.latest_step(run),
        "gap": last.get("train_rollout_logprob_abs_diff/mean"),
        "tokens_per_s": last.get("tokens_per_s"),
        "reward": last.get("reward"),
        "step_s": last.get("step_s"),
        "rows": [] if attempt is None else [row.__dict__ for row in _rows(attempt)],
    }


def _rows(attempt: Attempt) -> list[Row]:
    out = []
    for path in sorted((attempt.path / "status").glob("*.json"), key=_order):
        slot = read_json(path)
        if slot is None or path.stem.startswith("probe-"):
            continue
        name, health = path.stem, None
        if name.startswith("rollout-"):
            health = read_json(attempt.path / "endpoints" / f"health-{name.removeprefix('rollout-')}.json")
        state = str(slot.get("state", "?"))
        if slot.get("code") is not None:
            state = f"{state}, exit {slot['code']}"
        said = str(slot.get("error") or slot.get("reason") or "")
        version = "" if health is None or health.get("version") is None else str(health["version"])
        out.append(Row(name, str(slot.get("node", "")), state, version, int((health or {}).get("restarts") or 0), said))
    return out


def _order(path: Path) -> tuple[int, int, str]:
    role, _, rest = path.stem.partition("-")
    known = ["driver", "trainer", "rank", "rollout"]
    return known.index(role) if role in known else len(known), int(rest) if rest.isdigit() else 0, rest


def last_row(path: Path) -> dict[str, Any] | None:
    """The last complete line of a JSON-lines file, read from its end."""
    try:
        with open(path, "rb") as f:
            f.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = f.read().split(b"\n")[:-1]
    except OSError:
        return None
    for line in reversed(lines):
        try:
            return dict(json.loads(line))
        except ValueError:  # the first line of the tail may be cut
            continue
    return None


def render(found: dict[str, Any]) -> Group:
    """The table."""
    head = Text.assemble(
        (f"{found['run']}\n", "bold"),
        f"job {found['job']}",
        "" if found["attempt"] is None else f"  attempt {found['attempt']}",
        f"  {found['state']}",
        "" if found["code"] is None else f" (exit code {found['code']})",
        f"\nstep {found['step']}  saved {found['saved']}",
        *(f"  {name} {found[key]:{form}}" for name, key, form in _FIGURES if found[key] is not None),
        f"\n{found['reason']}" if found["reason"] else "",
    )
    table = Table(box=None, pad_edge=False)
    for column in ("role", "node", "state", "version", "restarts", ""):
        table.add_column(column, overflow="fold")
    for row in found["rows"]:
        table.add_row(row["role"], row["node"], row["state"], row["version"], str(row["restarts"] or ""), row["said"])
    return Group(head, table)


_FIGURES = (
    ("gap", "gap", ".2e"),
    ("reward", "reward", ".3f"),
    ("tokens/s", "tokens_per_s", ".0f"),
    ("s/step", "step_s", ".1f"),
)
