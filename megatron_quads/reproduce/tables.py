"""The reproduction's tables as data, each beside the paper's figures where it has them; and ``quads reproduce status``."""

from __future__ import annotations

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table as Screen

from ..errors import QuadsError
from ..proof.compare import GAP_MAX, GAP_MEAN
from . import paper
from .checks import PAIRS, SEEN, Pair, common, enough, last_evaluation, matrix, pair
from .folder import Root
from .logs import Logs, RunLog, read_run, role
from .markup import Cell, Table
from .stats import band, departure, problems_interval, steps_interval

PAPER = f"paper ({paper.SOURCE})"


def steps_text(logs: Logs, arm: str) -> str:
    """Steps of each seed; those of an unfinished run are marked."""
    runs = [run for (name, _), run in logs.runs.items() if name == arm]
    return ", ".join(f"{run.steps}{'' if run.done else '*'}" for run in runs)


MARK = "\\* unfinished (or not begun): shown with the steps that it has."


def gap_table(logs: Logs) -> Table:
    """Largest and mean log-prob gap of each arm over its own steps."""
    rows: list[list[Cell]] = []
    for arm in logs.arms:
        mean, largest, top, bits = None, None, None, None
        if runs := logs.of(arm):
            steps = min(run.steps for run in runs)
            tokens = matrix(runs, "tokens", steps)
            mean = steps_interval(matrix(runs, GAP_MEAN, steps), tokens)
            largest = steps_interval(matrix(runs, GAP_MAX, steps), np.ones_like(tokens))
            top = max(float(run.column(GAP_MAX).max()) for run in runs)
            bits = sum(run.bits for run in runs) if all(run.audit for run in runs) else None
        published = paper.MAX_GAP.get(role(logs.config.arms[arm]))
        rows.append([logs.config.arms[arm].title, steps_text(logs, arm), mean, largest, top, published, bits])
    columns = ["arm", "steps", "mean gap", "step's max, mean", "step's max, largest", f"max gap, {PAPER}", "bits"]
    notes = [
        "abs(log pi_train - log pi_rollout) per sampled token, nats; [95 % interval] by bootstrap over seeds and blocks "
        "of steps, over the steps that all seeds of the arm have. Arms with different steps compare in the table of "
        "pairs only. bits: weight bits in which trainer and rollout differed, over all refits.",
        MARK,
    ]
    return Table("gap", "Log-prob gap by arm", columns, rows, notes)


def pair_table(logs: Logs) -> Table:
    """Neighbours in the paper's order, and symmetric against asymmetric; over the steps that all runs of both have."""
    found = [pair(logs, upper, lower) for upper, lower in [*((p[0], p[1]) for p in PAIRS), *SEEN]]
    rows: list[list[Cell]] = [
        [p.upper, p.lower, p.steps, "{} and {}".format(*p.seeds), *p.means, p.difference, ", ".join(p.unfinished)]
        for p in found
        if isinstance(p, Pair)
    ]
    columns = [
        "upper",
        "lower",
        "common steps",
        "seeds",
        "mean gap, upper",
        "mean gap, lower",
        "difference",
        "unfinished",
    ]
    notes = ["The difference is drawn with the same seeds and blocks of steps on both sides.", *_missing(found)]
    return Table("pairs", "Pairs of arms", columns, rows, notes)


def _missing(found: list[Pair | str]) -> list[str]:
    return [f"Not compared: {p}." for p in found if isinstance(p, str)]


def ratio_table(logs: Logs) -> Table:
    """Gap against the share of blocks that get residual compensation."""
    rows: list[list[Cell]] = []
    found = (logs.study or {}).get("ratios", [])
    for row in found:
        kind = {"uniform": "uniform", "adaptive": "adaptive"}[row["policy"]] + (", sorted" if row["sorted"] else "")
        at_ratio = row["recipe"] == "quads" and row["policy"] == "uniform" and not row["sorted"]
        published = paper.MAX_GAP_AT_RATIO.get(row["ratio"]) if at_ratio else None
        recipe = f"{row['recipe']}, {kind}" if row["recipe"] == "quads" else row["recipe"]
        taken = 100.0 * row.get("flop_share", 0.0)
        rows.append([recipe, 100.0 * row["ratio"], row["mean"], row["max"], row["p99.9"], published, taken])
    columns = ["recipe", "RAC %", "mean gap", "max gap", "99.9th percentile", f"max gap, {PAPER}"]
    columns.append("% of the experts' FLOPs")
    tokens = (logs.study or {}).get("tokens", 0)
    notes = [
        f"The warm checkpoint on {tokens:,} sampled tokens; the rollout's quantisation emulated inside the trainer, so "
        "without engine drift, which the paper's figures contain. One measurement: no interval. RAC takes whole blocks: of "
        "few blocks a small share may not be had."
    ]
    return Table("ratios", "Log-prob gap by RAC ratio, before RL", columns, rows, notes)


def drift_table(logs: Logs) -> Table:
    """Symmetric against asymmetric quantisation of activations, per layer."""
    found = (logs.study or {}).get("drift", [])
    ways = [key for key in found[0] if key not in ("layer", "drift")] if found else []
    rows: list[list[Cell]] = [[row["drift"], row["layer"], *(row[way] for way in ways)] for row in found]
    notes = [
        "How far the experts' outputs of trainer and rollout are apart, relative to the output's norm, on equal weights, "
        "when the rollout's input is x (1 + drift * noise). engines alone: neither side quantises activations; "
        "symmetric: both do; asymmetric: the rollout only."
    ]
    return Table("drift", "Symmetric against asymmetric, per layer", ["drift", "layer", *ways], rows, notes)


def split_table(logs: Logs) -> Table:
    """Weights, activations, engines: the log-prob gap in parts."""
    rows: list[list[Cell]] = [
        [row["part"], row["models"], row["mean"], row["max"], row["p999"], row["bias"]]
        for row in (logs.study or {}).get("split", {}).get("rows", [])
    ]
    columns = ["part", "models", "mean", "max", "99.9th percentile", "bias"]
    return Table("split", "Split of the log-prob gap, before RL, nats", columns, rows)


def layer_table(logs: Logs) -> Table:
    """The same split inside the network."""
    study = logs.study or {}
    drifts = sorted({row["drift"] for row in study.get("drift", []) if row["drift"] > 0})
    engines = {r["layer"]: r["engines alone"] for r in study.get("drift", []) if drifts and r["drift"] == drifts[0]}
    rows: list[list[Cell]] = [
        [row["layer"], row["weight"], row["activation"], row["activation_rac"], engines.get(row["layer"])]
        for row in study.get("split", {}).get("layers", [])
    ]
    at = f", inputs {drifts[0]:.3g} apart" if drifts else ""
    columns = ["layer", "weight", "activation", "activation, RAC", f"engines{at}"]
    notes = ["Relative error of the experts' outputs on equal inputs; engines: on inputs that differ by that noise."]
    return Table("layers", "Weight, activation and engine error per layer", columns, rows, notes)


def pass_table(logs: Logs) -> Table:
    """pass@1 on the held-out problems, before and after RL."""
    rows: list[list[Cell]] = []
    for arm in logs.config.arms:
        before, after, at = None, None, None
        runs = [run for run in logs.of(arm) if run.evals]
        if runs:
            if all(0 in run.evals for run in runs):
                before = problems_interval(np.stack([run.solved(0) for run in runs]))
            if (step := last_evaluation(runs)) is not None:
                at, after = step, problems_interval(np.stack([run.solved(step) for run in runs]))
        published = paper.PASS_AT_1.get(role(logs.config.arms[arm]))
        title = logs.config.arms[arm].title
        rows.append([title, steps_text(logs, arm) if arm in logs.arms else "unavailable", before, at, after, published])
    columns = ["arm", "steps", "before", "evaluated after", "after", f"mean of four benchmarks, %, {PAPER}"]
    notes = ["Share of held-out problems solved, one sample each; bootstrap over seeds and problems.", MARK]
    return Table("pass", "pass@1 on held-out problems", columns, rows, notes)


def departure_table(logs: Logs) -> Table:
    """Where each run leaves the BF16 arm's band for good, and what changes over its steps."""
    rows: list[list[Cell]] = []
    reference = enough(logs.of(logs.roles.get("bf16", "")))
    for arm in logs.arms:
        for run in enough(logs.of(arm)):
            found: list[Cell] = [None, None]
            if reference and arm != logs.roles["bf16"]:
                steps = common([*reference, run])
                found = [
                    departure(run.column(name)[:steps], band(matrix(reference, name, steps)), above=above) or "no"
                    for name, above in (("reward", False), (GAP_MEAN, True))
                ]
            changes = [_change(run, name) for name in (GAP_MEAN, "train_rollout_kl", "ess_ratio", "entropy", "reward")]
            rows.append(
                [logs.config.arms[arm].title, run.seed, f"{run.steps}{'' if run.done else '*'}", *found, *changes]
            )
    columns = ["arm", "seed", "steps", "reward below from", "gap above from"]
    columns += [f"{name}, first -> last tenth" for name in ("mean gap", "KL (k3)", "ESS", "entropy", "reward")]
    notes = [
        "below/above from: first step from which the running mean stays outside the BF16 arm's band (its mean, 3 standard "
        f"deviations to each side) for good. {PAPER}: naive collapses after about {paper.NAIVE_COLLAPSE_STEP} of 260 steps.",
        MARK,
    ]
    return Table("departure", "Departure from BF16, and what changes", columns, rows, notes)


def _change(run: RunLog, name: str) -> str:
    values = run.column(name)
    tenth = max(1, len(values) // 10)
    return f"{values[:tenth].mean():.3g} -> {values[-tenth:].mean():.3g}"


def speed_table(logs: Logs) -> Table:
    """Tokens a second in the rollout, seconds a step, and on what."""
    rows: list[list[Cell]] = []
    for (arm, seed), run in logs.runs.items():
        if not run.steps:
            continue
        tokens = run.column("tokens")
        rate = float(tokens.sum() / (tokens / run.column("tokens_per_s")).sum())
        seconds = float(np.nanmedian(run.column("step_s"))) if np.isfinite(run.column("step_s")).any() else None
        versions = ", ".join(f"{k} {v}" for k, v in run.machine.items() if k != "device")
        rows.append([logs.config.arms[arm].title, seed, round(rate), seconds, run.machine.get("device", ""), versions])
    columns = ["arm", "seed", "rollout, tokens/s", "step, median s", "machine", "versions"]
    notes = [
        f"{PAPER}: about {paper.THROUGHPUT_OVER_FP8:.0%} above FP8 rollout with native FP4, which this does not measure. "
        "At this size the times are the host's; runs that shared a machine are not told apart."
    ]
    return Table("speed", "Tokens per second", columns, rows, notes)


def all_tables(logs: Logs) -> list[Table]:
    """In the report's order."""
    makers = (
        gap_table,
        pair_table,
        ratio_table,
        drift_table,
        split_table,
        layer_table,
        pass_table,
        departure_table,
        speed_table,
    )
    return [make(logs) for make in makers]


def _seen(root: Root, arm: str, seed: int, state: str) -> str:
    """The state as it is: a killed process could not write that it ended."""
    if state != "running":
        return state
    with root.run_lock(arm, seed) as free:
        return "killed; goes on with `run`" if free else state


def show_status(root: Root) -> None:
    """Print what is done and what is not; a run whose logs cannot be used shows why."""
    table = Screen(box=box.SIMPLE, pad_edge=False)
    for name in ("arm", "seed", "state", "step", "gap mean", "reward", "bits"):
        table.add_column(name, justify="left" if name in ("arm", "state") else "right")
    wanted = root.config.rl.steps
    for arm, seed in root.runs():
        try:
            run = read_run(root, arm, seed)
        except QuadsError as e:
            table.add_row(arm, str(seed), f"unusable: {e.what}")
            continue
        last = run.rows[-1] if run.rows else None
        gap, reward = (f"{last[GAP_MEAN]:.2e}", f"{last['reward']:.3f}") if last else ("", "")
        table.add_row(
            arm,
            str(seed),
            _seen(root, arm, seed, run.state),
            f"{run.steps}/{wanted}",
            gap,
            reward,
            f"{run.bits:,}" if last else "",
        )
    for name, given in root.config.arms.items():
        if given.unavailable:
            table.add_row(name, "", "unavailable")
    console = Console()
    for what, file in (("warm checkpoint", root.path / "warm.json"), ("study", root.study)):
        console.print(f"{what}: {'there' if file.exists() else 'not made'}")
    console.print(table)
