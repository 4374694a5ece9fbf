"""The report's figures. Each is drawn from the rows of its own CSV file and from nothing else."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..proof.compare import GAP_MAX, GAP_MEAN
from . import paper
from .logs import Logs
from .markup import Cell, Table
from .stats import problems_interval, smooth, window
from .tables import drift_table, gap_table, ratio_table

Rows = list[list[Any]]
GAPS = (GAP_MEAN, GAP_MAX)
LEARNING = ("reward", "entropy", "train_rollout_kl", "ess_ratio")


@dataclass(frozen=True)
class Plot:
    """A figure and the data that it shows."""

    data: Table
    draw: Callable[[Figure, Rows], None]
    size: tuple[float, float] = (11.0, 4.2)

    def png(self) -> bytes:
        """The picture; equal bytes for equal data and versions."""
        figure = Figure(figsize=self.size, layout="constrained")
        FigureCanvasAgg(figure)
        self.draw(figure, self.data.rows)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
        return buffer.getvalue()


def all_plots(logs: Logs) -> list[Plot]:
    """In the report's order; a figure without data has no rows."""
    drift, ratios = drift_table(logs), ratio_table(logs)
    return [
        Plot(_as("figure_order", "Mean log-prob gap by arm", gap_table(logs)), _draw_order, (8.0, 4.2)),
        Plot(Table("figure_gap", "Log-prob gap over steps", *_curves(logs, GAPS)), _draw_gap),
        Plot(
            Table("figure_learning", "Reward, entropy, KL and ESS over steps", *_curves(logs, LEARNING)),
            _draw_learning,
            (11.0, 7.6),
        ),
        Plot(_evaluations(logs), _draw_evaluations, (8.0, 4.2)),
        Plot(_as("figure_ratios", "Log-prob gap by RAC ratio, before RL", ratios), _draw_ratios),
        Plot(_as("figure_drift", "Symmetric against asymmetric, per layer", drift), _drift_drawer(drift.columns)),
    ]


def _as(name: str, title: str, table: Table) -> Table:
    return Table(name, title, table.columns, table.rows)


def _curves(logs: Logs, names: Sequence[str]) -> tuple[list[str], list[list[Cell]]]:
    rows: list[list[Cell]] = []
    for (arm, seed), run in logs.runs.items():
        columns = [run.column(name) for name in names]
        rows += [[arm, seed, step, *map(float, values)] for step, values in enumerate(zip(*columns, strict=True), 1)]
    return ["arm", "seed", "step", *names], rows


def _evaluations(logs: Logs) -> Table:
    rows: list[list[Cell]] = []
    for arm in logs.arms:
        runs = [run for run in logs.of(arm) if run.evals]
        for step in sorted(set().union(*(run.evals for run in runs))):
            solved = [run.solved(step) for run in runs if step in run.evals]
            rows.append([arm, step, len(solved), problems_interval(np.stack(solved))])
    return Table("figure_pass", "pass@1 on held-out problems", ["arm", "step", "seeds", "pass@1"], rows)


def _legend(figure: Figure, axis: Any) -> None:
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper center", ncols=5, frameon=False)


def _lines(axis: Any, rows: Rows, column: int) -> None:
    """A running mean for each run; the seeds of an arm share its colour."""
    arms = list(dict.fromkeys(row[0] for row in rows))
    for i, arm in enumerate(arms):
        label: str | None = arm
        for seed in sorted({row[1] for row in rows if row[0] == arm}):
            values = np.array([row[3 + column] for row in rows if row[:2] == [arm, seed]])
            steps = np.arange(1, len(values) + 1)
            axis.plot(steps, smooth(values, window(len(values))), color=f"C{i}", alpha=0.8, label=label)
            label = None
    axis.set_xlabel("step")
    axis.grid(alpha=0.3)


def _draw_order(figure: Figure, rows: Rows) -> None:
    axis = figure.subplots()
    shown = [(row[0], row[2]) for row in rows if row[2] is not None]
    for i, (_, at) in enumerate(shown):
        axis.plot([at.low, at.high], [i, i], color="#2f6fab", linewidth=2)
        axis.plot([at.mean], [i], "o", color="#2f6fab")
    axis.set_yticks(range(len(shown)), [name for name, _ in shown])
    axis.set_xscale("log")
    axis.invert_yaxis()
    axis.set_xlabel("mean |log-prob gap|, nats, 95 % interval")
    axis.grid(alpha=0.3)


def _draw_gap(figure: Figure, rows: Rows) -> None:
    left, right = figure.subplots(1, 2)
    for axis, column, label in ((left, 0, "mean"), (right, 1, "max")):
        _lines(axis, rows, column)
        axis.set_yscale("log")
        axis.set_ylabel(f"{label} |log-prob gap| of the step, nats")
    _legend(figure, left)


def _draw_learning(figure: Figure, rows: Rows) -> None:
    axes = figure.subplots(2, 2).ravel()
    names = ("reward", "entropy, nats", "KL (k3)", "ESS / samples")
    for axis, column, label in zip(axes, range(4), names, strict=True):
        _lines(axis, rows, column)
        axis.set_ylabel(label)
    axes[2].set_yscale("log")
    _legend(figure, axes[0])


def _draw_evaluations(figure: Figure, rows: Rows) -> None:
    axis = figure.subplots()
    for i, arm in enumerate(dict.fromkeys(row[0] for row in rows)):
        mine = [row for row in rows if row[0] == arm]
        steps = [row[1] for row in mine]
        axis.plot(steps, [row[3].mean for row in mine], "o-", markersize=3, color=f"C{i}", label=arm)
        axis.fill_between(steps, [r[3].low for r in mine], [r[3].high for r in mine], color=f"C{i}", alpha=0.1)
    axis.set_xlabel("step")
    axis.set_ylabel("pass@1")
    axis.grid(alpha=0.3)
    _legend(figure, axis)


def _draw_ratios(figure: Figure, rows: Rows) -> None:
    left, right = figure.subplots(1, 2)
    kinds = list(dict.fromkeys(row[0] for row in rows))
    for axis, column, label in ((left, 2, "mean"), (right, 3, "max")):
        for kind in kinds:
            mine = [row for row in rows if row[0] == kind]
            axis.plot([row[6] for row in mine], [row[column] for row in mine], "o-", label=kind)
        axis.set_xlabel("RAC, % of the expert FLOPs")
        axis.set_ylabel(f"{label} |log-prob gap|, nats")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    published = [(row[1], row[5]) for row in rows if row[5] is not None]
    right.plot([p[0] for p in published], [p[1] for p in published], "x:", color="0.5", label=paper.SOURCE)
    _legend(figure, right)


def _drift_drawer(columns: Sequence[str]) -> Callable[[Figure, Rows], None]:
    def draw(figure: Figure, rows: Rows) -> None:
        drifts = sorted({row[0] for row in rows})
        axes = figure.subplots(1, len(drifts), sharey=True, squeeze=False)[0]
        for axis, drift in zip(axes, drifts, strict=True):
            mine = [row for row in rows if row[0] == drift]
            for i, way in enumerate(columns[2:], 2):
                axis.plot([row[1] for row in mine], [row[i] for row in mine], "o-", markersize=3, label=way)
            axis.set_title(f"drift {drift:.3g}")
            axis.set_xticks([row[1] for row in mine])
            axis.set_xlabel("layer")
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("relative difference of expert outputs")
        _legend(figure, axes[0])

    return draw
