"""A table of plain cells, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .stats import Interval

Cell = str | int | float | Interval | None


@dataclass(frozen=True)
class Table:
    """Rows of plain cells. None: there is no such value; an Interval becomes three CSV columns."""

    name: str
    """File name of its CSV."""
    title: str
    columns: Sequence[str]
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """As a Markdown table, notes below."""
        lines = [self.columns, ["---"] * len(self.columns), *([_text(cell) for cell in row] for row in self.rows)]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([table, *self.notes]) if self.rows else "No data."

    def csv(self) -> str:
        """As CSV with full precision."""
        spread = [any(isinstance(row[i], Interval) for row in self.rows) for i in range(len(self.columns))]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        names = [[c, f"{c}, low", f"{c}, high"] if s else [c] for c, s in zip(self.columns, spread, strict=True)]
        writer.writerow([name for group in names for name in group])
        for row in self.rows:
            writer.writerow([v for cell, s in zip(row, spread, strict=True) for v in _values(cell, s)])
        return out.getvalue()


def _values(cell: Cell, spread: bool) -> list[str | int | float | None]:
    if isinstance(cell, Interval):
        return [cell.mean, cell.low, cell.high]
    return [cell, None, None] if spread else [cell]


def _text(cell: Cell) -> str:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ""
    if isinstance(cell, Interval):
        return f"{cell.mean:.3g} [{cell.low:.3g}, {cell.high:.3g}]"
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) else cell.replace("|", "\\|")
