"""What ``quads analyze`` finds: its records, table and figure."""

from __future__ import annotations

import dataclasses
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .. import atomic


@dataclass(frozen=True)
class Row:
    """|log-prob difference| of two models over the scored tokens, in nats."""

    part: str
    models: str
    mean: float
    max: float
    p999: float
    bias: float

    @classmethod
    def of(cls, part: str, models: str, a: Tensor, b: Tensor) -> Row:
        """From log-probs a, b [tokens]; ``bias`` is the mean of b - a."""
        gap = (a - b).abs().double()
        return cls(
            part, models, *(float(v) for v in (gap.mean(), gap.max(), gap.quantile(0.999), (b - a).double().mean()))
        )


@dataclass(frozen=True)
class LayerRow:
    """Relative error ||y' - y|| / ||y|| of one layer's expert outputs, on equal inputs (no error carried in)."""

    layer: int
    weight: float
    activation: float
    activation_rac: float | None


@dataclass(frozen=True)
class Analysis:
    """Rows of the log-prob split, rows per layer, and how many tokens they rest on."""

    tokens: int
    rows: list[Row]
    layers: list[LayerRow]

    def to_dict(self) -> dict[str, Any]:
        """What ``analyze.json`` holds."""
        return dataclasses.asdict(self)


def show(analysis: Analysis, console: Console | None = None) -> None:
    """Print both tables."""
    console = console or Console()
    table = Table(
        title=f"log-prob error by source, {analysis.tokens} tokens, nats",
        caption="W4A4, RAC: the trainer emulating the rollout's activations",
        box=box.SIMPLE,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in ("part", "models"):
        table.add_column(name, no_wrap=True)
    for name in ("mean", "max", "p99.9", "bias"):
        table.add_column(name, justify="right")
    for row in analysis.rows:
        table.add_row(row.part, row.models, *(f"{v:.1e}" for v in (row.mean, row.max, row.p999, row.bias)))
    console.print(table)
    table = Table(title="relative error of the experts' outputs, per layer", box=box.SIMPLE)
    for name in ("layer", "weight", "activation", "activation, RAC"):
        table.add_column(name, justify="right")
    for each in analysis.layers:
        rac = "-" if each.activation_rac is None else f"{each.activation_rac:.4f}"
        table.add_row(str(each.layer), f"{each.weight:.4f}", f"{each.activation:.4f}", rac)
    console.print(table)


def plot(analysis: Analysis, path: Path) -> None:
    """Bars of the split (log scale) beside lines per layer, as PNG, written atomically."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    bars, lines = figure.subplots(1, 2)
    names = [row.part for row in analysis.rows]
    bars.barh(names, [max(row.max, 1e-9) for row in analysis.rows], color="#c6d7ea", label="max")
    bars.barh(names, [max(row.mean, 1e-9) for row in analysis.rows], color="#2f6fab", height=0.5, label="mean")
    bars.set_xscale("log")
    bars.invert_yaxis()
    bars.set_xlabel("|log-prob difference|, nats")
    bars.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    at = [row.layer for row in analysis.layers]
    lines.plot(at, [row.weight for row in analysis.layers], "o-", label="weight")
    lines.plot(at, [row.activation for row in analysis.layers], "s-", label="activation (W4A4)")
    if any(row.activation_rac is not None for row in analysis.layers):
        lines.plot(at, [row.activation_rac for row in analysis.layers], "^-", label="activation with RAC")
    lines.set_xticks(at)
    lines.set_xlabel("layer")
    lines.set_ylabel("relative error of expert outputs")
    lines.set_ylim(bottom=0)
    lines.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    atomic.write_bytes(path, buffer.getvalue())
