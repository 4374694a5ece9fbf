"""The logs of a reproduction, read and checked: each run's steps, evaluations and audit, the warm-up, the study."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MismatchError, QuadsError
from ..proof.compare import GAP_MAX, GAP_MEAN, require_sound_audit
from ..rl.metrics import read_rows
from .config import Arm, Config
from .folder import Root
from .warm import SOLVED

Array = NDArray[np.float64]
REQUIRED = (GAP_MEAN, GAP_MAX, "reward", "tokens", "tokens_per_s")
QUANTISED_TRAINER = frozenset({"qat", "quads", "symmetric", "symmetric-rac"})


@dataclass(frozen=True)
class RunLog:
    """One arm and seed, as far as it went."""

    arm: str
    seed: int
    state: str
    """not run | running | stopped | failed | done; ``running`` also stands after a kill."""
    rows: list[dict[str, Any]]
    """metrics.jsonl: steps 1, 2, ... without a gap."""
    evals: dict[int, Array]
    """Step -> reward of each held-out problem [problems]."""
    audit: list[dict[str, Any]]
    machine: dict[str, str]
    path: Path

    @property
    def steps(self) -> int:
        """Steps that are logged."""
        return len(self.rows)

    @property
    def done(self) -> bool:
        """Whether it went to its end."""
        return self.state == "done"

    def column(self, name: str) -> Array:
        """Values of a metric [steps]; NaN where a row lacks it."""
        return np.array([row.get(name, math.nan) for row in self.rows], dtype=np.float64)

    def solved(self, step: int) -> Array:
        """1.0 for each held-out problem with the full mark after ``step`` steps [problems]."""
        return (self.evals[step] >= SOLVED).astype(np.float64)

    @property
    def bits(self) -> int:
        """Weight bits that differed, summed over all refits."""
        return sum(int(row["bits_mismatched"]) for row in self.audit)

    def audit_fault(self, arm: Arm) -> str | None:
        """What the audit proves against the run, None when it is sound. Of an unfinished run the last refit may lack."""
        last = self.steps if self.done else self.steps - 1
        try:
            require_sound_audit(self.audit, last, self.path / "audit.jsonl", may_differ=arm.recipe == "naive")
        except MismatchError as e:
            return e.what
        return None


@dataclass(frozen=True)
class Logs:
    """All that tables are made of."""

    config: Config
    runs: dict[tuple[str, int], RunLog]
    warm: dict[str, Any] | None
    study: dict[str, Any] | None

    def of(self, arm: str) -> list[RunLog]:
        """The arm's runs that have at least one step, by seed."""
        return [run for (name, _), run in self.runs.items() if name == arm and run.steps]

    @cached_property
    def arms(self) -> list[str]:
        """Arms that can be run, in the configuration's order."""
        return [name for name, arm in self.config.arms.items() if arm.unavailable is None]

    @cached_property
    def roles(self) -> dict[str, str]:
        """The paper's arms by what they are: role -> name of the first arm that is it."""
        found: dict[str, str] = {}
        for name in self.arms:
            found.setdefault(role(self.config.arms[name]), name)
        return found


def role(arm: Arm) -> str:
    """What an arm is in the paper's terms: its recipe, and for QUADS paper-R (unsorted, uniform) or ours-R, R % of all.

    ``other`` when it has settings besides those.
    """
    more = arm.model_dump(exclude={"title", "recipe", "ratio", "policy", "sort", "seeds", "unavailable"})
    if any(value != Arm.model_fields[name].default for name, value in more.items()):
        return "other"
    if arm.recipe != "quads":
        return arm.recipe
    if arm.ratio == 1:
        return "quads-100"
    kind = {("uniform", False): "paper", ("adaptive", True): "ours"}.get((arm.policy, arm.sort))
    return f"{kind}-{100 * arm.ratio:g}" if kind else "other"


def read_logs(root: Root) -> Logs:
    """Read every run, warm.json and study.json.

    Raises QuadsError when a file is broken, belongs to another configuration, or two runs to different warm checkpoints.
    """
    runs = {(arm, seed): read_run(root, arm, seed) for arm, seed in root.runs()}
    warm = _read(root.path / "warm.json")
    study = _read(root.study)
    # the study rests on the warm checkpoint; what RL adds to the configuration does not concern it
    if study is not None and study.get("config") not in (root.config.shared_hash, root.config.warm_hash):
        raise QuadsError(
            f"study of configuration {study.get('config')}, this one is {root.config.shared_hash}",
            where=str(root.study),
            do="move it away and run `quads reproduce study`",
        )
    if study is not None:
        _require(study, ("warm", "tokens", "ratios", "drift", "split"), root.study)
    bound = {str(f): d["warm"] for f in (r.path / "arm.json" for r in runs.values()) if (d := _read(f)) is not None}
    if warm is not None:
        bound[str(root.path / "warm.json")] = warm["weights"]
    if study is not None:
        bound[str(root.study)] = study["warm"]
    first = next(iter(bound.values()), None)
    for file, digest in bound.items():
        if digest != first:
            raise QuadsError(
                f"warm checkpoint {digest}, others rest on {first}", where=file, do="keep such runs in their own folder"
            )
    sizes = {len(rewards): str(run.path) for run in runs.values() for rewards in run.evals.values()}
    if len(sizes) > 1:
        raise QuadsError(
            f"runs with {sorted(sizes)} held-out problems", where=max(sizes.values()), do="keep them apart"
        )
    return Logs(root.config, runs, warm, study)


def read_run(root: Root, arm: str, seed: int) -> RunLog:
    """One run's logs; state ``not run`` when there are none. A line torn by a kill is left out.

    QuadsError when the folder is another run's, a step is missing, or a value is not a finite number.
    """
    path = root.run(arm, seed)
    bound = _read(path / "arm.json")
    metrics = path / "metrics.jsonl"
    if bound is None:
        if metrics.exists():
            raise QuadsError("logs without arm.json", where=str(path), do="bring arm.json along, or move them away")
        return RunLog(arm, seed, "not run", [], {}, [], {}, path)
    wanted = {"arm": arm, "seed": seed, "config": root.config.arm_hash(arm)}
    for key, value in wanted.items():
        if bound.get(key) != value:
            raise QuadsError(
                f"logs of another run: {key} is {bound.get(key)!r}, wanted {value!r}",
                where=str(path / "arm.json"),
                do="move the run away, or use the configuration it was made with",
            )
    rows = read_rows(metrics) if metrics.exists() else []
    for expected, row in enumerate(rows, 1):
        _check_row(row, expected, metrics)
    evals = {}
    for row in read_rows(path / "evals.jsonl") if (path / "evals.jsonl").exists() else []:
        _require(row, ("step", "rewards"), path / "evals.jsonl")
        evals[int(row["step"])] = np.array(row["rewards"], dtype=np.float64)  # the last row of a step counts
    audit = read_rows(path / "audit.jsonl") if (path / "audit.jsonl").exists() else []
    for row in audit:
        _require(row, ("step", "tensors_differing", "bits_mismatched", "trainer", "rollout"), path / "audit.jsonl")
    state = root.state(arm, seed)
    if state["state"] == "done" and len(rows) != state["step"]:
        raise QuadsError(
            f"{len(rows)} steps logged, status.json says {state['step']}", where=str(metrics), do="restore the file"
        )
    return RunLog(arm, seed, state["state"], rows, evals, audit, bound["machine"], path)


def _check_row(row: dict[str, Any], expected: int, where: Path) -> None:
    if row.get("step") != expected:
        raise QuadsError(f"step {expected} is missing", where=str(where), do="restore the file")
    for name in REQUIRED:
        value = row.get(name)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise QuadsError(f"step {expected}: {name} is {value}", where=str(where), do="restore the file")


def _require(row: dict[str, Any], names: Sequence[str], where: Path) -> None:
    if lacking := [name for name in names if name not in row]:
        raise QuadsError(f"{lacking[0]} is missing", where=str(where), do="restore the file")


def _read(file: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise QuadsError(f"cannot read: {e}", where=str(file), do="restore the file") from e
    if not isinstance(value, dict):
        raise QuadsError("not a JSON object", where=str(file), do="restore the file")
    return value
