"""Calibration's statistics as files, and their sum over the workers that each saw some experts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..errors import QuadsError
from .select import Gemm, Unit
from .statistics import Moments, ResidualEnergy

MOMENTS, RESIDUAL = "moments.safetensors", "residual.safetensors"


def unit_of(name: str) -> Unit:
    """``layer.gemm`` -> unit."""
    layer, gemm = name.split(".")
    return int(layer), cast(Gemm, gemm)


def add_files(statistic: Moments | ResidualEnergy, files: Sequence[str | Path]) -> None:
    """Add what ``files`` hold (``tables()`` of the same kind) to ``statistic``: sums add up, amax is the largest."""
    mine = statistic.tables()
    for file in files:
        try:
            found = load_file(str(file))
        except (OSError, SafetensorError) as e:
            raise QuadsError(f"cannot read: {e}", where=str(file), do="collect the statistics again") from e
        if {n: (t.shape, t.dtype) for n, t in found.items()} != {n: (t.shape, t.dtype) for n, t in mine.items()}:
            raise QuadsError("statistics of another model or kind", where=str(file), do="collect them again")
        for name, table in mine.items():
            if name.startswith("amax"):
                torch.maximum(table, found[name], out=table)
            else:
                table += found[name]


def write(statistic: Moments | ResidualEnergy, file: Path) -> None:
    """Write ``tables()``."""
    save_file(statistic.tables(), str(file))
