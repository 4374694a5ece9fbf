"""``quads reproduce tables``: reproduction.md with its tables, figures and their data, from logs alone."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

from .. import atomic
from . import paper
from .checks import MIN_STEPS, SEEN, Check, Pair, all_checks, pair
from .folder import Root
from .logs import Logs, read_logs
from .markup import Table
from .plots import Plot, all_plots
from .tables import all_tables

NAME = "reproduction.md"
LIMITS = [
    "whether rewards would differ, or naive would collapse, on a large model, a hard task or longer answers: an error "
    "per token has few tokens and few layers to grow in here",
    "the paper's absolute gaps: another model, another vocabulary, other engines, another statistic of the maximum",
    "native FP4 speed",
    "what more than the seeds given would show: intervals over two or three seeds are too narrow",
]


def write_report(root: Root, out: Path) -> list[Check]:
    """Write ``out/reproduction.md`` with table_*.csv, figure_*.csv and figure_*.png beside it; the checks.

    The same logs give the same bytes. Nothing is written before all is computed; the page comes last. Raises QuadsError
    when the logs cannot be used (``read_logs``) or ``out`` cannot be written.
    """
    logs = read_logs(root)
    checks, tables, plots = all_checks(logs), all_tables(logs), all_plots(logs)
    shown = [plot for plot in plots if plot.data.rows]
    files = {f"table_{table.name}.csv": table.csv().encode() for table in tables}
    files |= {f"{plot.data.name}.csv": plot.data.csv().encode() for plot in shown}
    files |= {f"{plot.data.name}.png": plot.png() for plot in shown}
    files[NAME] = _page(logs, checks, tables, shown).encode()
    atomic.make_folder(out)
    for name, data in files.items():
        atomic.write_bytes(out / name, data)
    for plot in plots:  # of an earlier report
        for suffix in ("csv", "png"):
            if (stale := f"{plot.data.name}.{suffix}") not in files:
                (out / stale).unlink(missing_ok=True)
    return checks


def _page(logs: Logs, checks: list[Check], tables: list[Table], plots: list[Plot]) -> str:
    parts = [
        "# The paper's findings at small scale",
        f"Written by `quads reproduce tables` from logs. The paper ({paper.SOURCE}) has another scale: set beside its "
        "figures, ours are to be read for order and sign.",
        *_setting(logs),
        *_verdicts(checks, findings(logs, tables)),
    ]
    for table in tables:
        parts += [f"## {table.title}", table.markdown(), f"Data: [CSV](table_{table.name}.csv)"]
    parts.append("## Figures")
    for plot in plots:
        parts.append(f"![{plot.data.title}]({plot.data.name}.png)\n\n{plot.data.title}: [CSV]({plot.data.name}.csv)")
    return "\n\n".join(parts) + "\n"


def _setting(logs: Logs) -> list[str]:
    config, rl = logs.config, logs.config.rl
    started = f"from pass@1 {logs.warm['pass@1']:.3f}" if logs.warm else "from a warm checkpoint that is not recorded"
    machines = Counter(run.machine.get("device", "unknown") for run in logs.runs.values() if run.steps)
    states = Counter("done" if run.done else "unfinished" if run.steps else "not run" for run in logs.runs.values())
    unavailable = [f"{arm.title} not run: {arm.unavailable}." for arm in config.arms.values() if arm.unavailable]
    return [
        f"{config.scale}. GRPO {started}: {rl.steps} steps of {rl.prompts_per_step} x {rl.samples_per_prompt} samples, "
        f"{rl.updates_per_step} updates a step, learning rate {rl.lr:g}, importance correction "
        f"{'off' if rl.tis_cap is None else f'capped at {rl.tis_cap:g}'}. Configuration {config.shared_hash}.",
        f"Runs: {', '.join(f'{n} {state}' for state, n in sorted(states.items()))}. "
        f"Machines, with the runs begun on each: {', '.join(f'{name}: {n}' for name, n in sorted(machines.items())) or 'none'}.",
        *unavailable,
    ]


def _verdicts(checks: list[Check], found: list[str]) -> list[str]:
    parts = []
    for title, outcome in (
        ("What agrees with the paper", "holds"),
        ("What does not", "fails"),
        ("Checks that lack their runs", "not run"),
    ):
        lines = [f"* {c.statement}: {c.detail}" for c in checks if c.outcome == outcome]
        parts += [f"## {title}", "\n".join(lines) or "Nothing."]
    parts += ["## What else was seen", "\n".join(f"* {line}" for line in found) or "Nothing."]
    limits = "\n".join(f"* {line}" for line in LIMITS)
    return [
        *parts,
        "## What this scale cannot say",
        f"{limits}\n\nRuns of fewer than {MIN_STEPS} steps are not compared.",
    ]


def findings(logs: Logs, tables: list[Table]) -> list[str]:
    """Of the paper's other statements: what the logs say, in one line each."""
    return [*_symmetric(logs), *_ratios(logs), *_naive(logs, tables)]


def _symmetric(logs: Logs) -> list[str]:
    """The paper: quantising activations on both sides amplifies what the engines differ by."""
    lines = []
    for upper, lower in SEEN:
        found = pair(logs, upper, lower)
        if isinstance(found, Pair):
            low, high = found.difference.low, found.difference.high
            verdict = "the larger" if low > 0 else "the smaller" if high < 0 else "no different"
            lines.append(
                f"mean gap of {found.upper} is {verdict} (paper: the larger) beside {found.lower}: {found.detail}"
            )
    rows = (logs.study or {}).get("drift", [])
    for drift in sorted({row["drift"] for row in rows if row["drift"] > 0}):  # at 0 symmetric is 0 by construction
        mine = [row for row in rows if row["drift"] == drift]
        times = sum(row["symmetric"] / row["engines alone"] for row in mine) / len(mine)
        larger = sum(row["symmetric"] > row["asymmetric"] for row in mine)
        lines.append(
            f"experts' inputs {drift:.3g} apart: symmetric W4A4 brings the outputs {times:.3g} times as far apart as no "
            f"quantisation of activations does, and further than asymmetric in {larger} of {len(mine)} layers"
        )
    return lines


def _ratios(logs: Logs) -> list[str]:
    rows = [r for r in (logs.study or {}).get("ratios", []) if r["recipe"] == "quads"]
    lines = []
    for name, policy, is_sorted in (("uniform, unsorted", "uniform", False), ("adaptive, sorted", "adaptive", True)):
        mine = sorted((r for r in rows if (r["policy"], r["sorted"]) == (policy, is_sorted)), key=lambda r: r["ratio"])
        if len(mine) > 1:
            falls = all(a["mean"] > b["mean"] for a, b in pairwise(mine))
            series = ", ".join(f"{100 * r['ratio']:g} %: {r['mean']:.3g}" for r in mine)
            lines.append(f"mean gap {'falls' if falls else 'does not fall'} with every RAC ratio, {name}: {series}")
    return lines


def _naive(logs: Logs, tables: list[Table]) -> list[str]:
    (table,) = (t for t in tables if t.name == "departure")
    if "naive" not in logs.roles:
        return []
    title = logs.config.arms[logs.roles["naive"]].title
    lines = []
    for row in table.rows:
        if row[0] != title:
            continue
        run = f"naive, seed {row[1]} ({row[2]} steps)"
        if row[3] is None:
            lines.append(f"{run}: no BF16 run to compare with; mean gap {row[5]}, ESS {row[7]}")
        elif row[3] == "no":
            lines.append(
                f"{run}: reward does not leave the BF16 arm's band; what changes: mean gap {row[5]}, ESS {row[7]}"
            )
        else:
            lines.append(f"{run}: reward falls below the BF16 arm's band from step {row[3]} on; mean gap {row[5]}")
    return lines
