"""``quads compare``: runs that differ in their recipe, side by side: one table, compare.json and a PNG."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .. import atomic
from ..errors import MismatchError, QuadsError
from ..rl.metrics import read_rows
from ..rl.runfolder import RunFolder

GAP_MEAN = "train_rollout_logprob_abs_diff/mean"
GAP_MAX = "train_rollout_logprob_abs_diff/max"


def summarise(run: str | Path) -> dict[str, Any]:
    """One arm's row. The gap's mean weighs all tokens of the run alike; bits are the sum over all refits."""
    folder = RunFolder(run)
    info = folder.read_run()
    status = _read_object(folder.path / "status.json")
    if status.get("state") != "done":
        raise QuadsError(
            f"the run is {status.get('state', 'not finished')}", where=str(run), do="finish it with `quads rl --resume`"
        )
    rows = read_rows(folder.metrics)
    audit = read_rows(folder.audit)
    tokens = [r["tokens"] for r in rows]
    return {
        "arm": info["quads"]["recipe"],
        "gap_mean": sum(r[GAP_MEAN] * n for r, n in zip(rows, tokens, strict=True)) / sum(tokens),
        "gap_max": max(r[GAP_MAX] for r in rows),
        "weight_bits_mismatched": sum(r["bits_mismatched"] for r in audit),
        "reward_before": status["reward_before"],
        "reward_after": status["reward_after"],
        "tokens_per_s": sum(tokens) / sum(n / r["tokens_per_s"] for r, n in zip(rows, tokens, strict=True)),
    }


def audited_refits(rows: Sequence[dict[str, Any]]) -> tuple[int, int, int]:
    """(refits, tensors compared, bits mismatched) of a run's audit.jsonl."""
    return len(rows), sum(r["tensors"] for r in rows), sum(r["bits_mismatched"] for r in rows)


def require_sound_audit(rows: Sequence[dict[str, Any]], step: int, where: Path, *, may_differ: bool) -> None:
    """The audit must hold every refit up to ``step``, its digests must say what its counts say, and none may differ.

    MismatchError (exit code 1) names the first refit at fault; ``may_differ`` (recipe naive) allows counted differences.
    """
    for expected, row in enumerate(rows):
        equal = row["trainer"] == row["rollout"]
        if row["step"] != expected:
            what = f"refit {expected} is missing from the audit (found {row['step']})"
        elif equal != (row["tensors_differing"] == 0) or equal != (row["bits_mismatched"] == 0):
            what = f"refit {expected}: digests and counts of the audit contradict each other"
        elif not equal and not may_differ:
            what = f"refit {expected} had {row['bits_mismatched']} mismatched bits"
        else:
            continue
        raise MismatchError(what, where=str(where), do="do not trust this run: run it again")
    if len(rows) <= step:
        raise MismatchError(f"refit {len(rows)} is missing from the audit", where=str(where), do="run it again")


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object, {} when there is no such file."""
    return json.loads(path.read_text()) if path.exists() else {}


def require_same_seeds(runs: Sequence[str | Path]) -> None:
    """Arms are comparable only when task, seed, step count and sampling are equal."""
    first = RunFolder(runs[0]).read_run()["rl"]
    for run in runs[1:]:
        other = RunFolder(run).read_run()["rl"]
        for key in (
            "task",
            "task_config",
            "seed",
            "steps",
            "prompts_per_step",
            "samples_per_prompt",
            "temperature",
            "heldout",
        ):
            if first[key] != other[key]:
                raise QuadsError(
                    f"{key} is {other[key]!r}, the first run has {first[key]!r}",
                    where=str(run),
                    do="compare runs with the same settings",
                )


def compare(runs: Sequence[str | Path], out: Path) -> list[dict[str, Any]]:
    """Summarise ``runs``, print the table, write ``out/compare.json`` and ``out/compare.png``."""
    if not runs:
        raise QuadsError("no runs to compare", where="quads compare", do="give run folders")
    require_same_seeds(runs)
    rows = [summarise(r) for r in runs]
    atomic.make_folder(out)
    atomic.write_json(out / "compare.json", rows)
    plot(runs, rows, out / "compare.png")
    show(rows)
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The table on the terminal."""
    table = Table(title="log-prob gap in nats; weight bits that differ; held-out reward")
    for column in ("arm", "gap mean", "gap max", "weight bits", "reward", "tokens/s"):
        table.add_column(column, justify="left" if column == "arm" else "right", no_wrap=True)
    for r in rows:
        table.add_row(
            r["arm"],
            f"{r['gap_mean']:.2e}",
            f"{r['gap_max']:.2e}",
            f"{r['weight_bits_mismatched']:,}",
            f"{r['reward_before']:.3f} -> {r['reward_after']:.3f}",
            f"{r['tokens_per_s']:.0f}",
        )
    Console().print(table)


def plot(runs: Sequence[str | Path], rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Mean gap (log scale) and reward over steps, one line per arm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (gap, reward) = plt.subplots(1, 2, figsize=(11, 4))
    for run, row in zip(runs, rows, strict=True):
        series = read_rows(RunFolder(run).metrics)
        steps = [r["step"] for r in series]
        gap.plot(steps, [r[GAP_MEAN] for r in series], label=row["arm"])
        reward.plot(steps, [r["reward"] for r in series], label=row["arm"])
    gap.set(yscale="log", xlabel="step", ylabel="mean |log-prob gap| (nats)", title="trainer against rollout")
    reward.set(xlabel="step", ylabel="reward of the step's samples", title="training reward")
    for axis in (gap, reward):
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    aside = path.with_name("." + path.name)
    figure.savefig(aside, dpi=120, format="png")
    plt.close(figure)
    aside.replace(path)
