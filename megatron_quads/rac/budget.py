"""``quads calibrate --budget``: one FLOP budget for all expert GEMMs, and what calibration made of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.table import Table

from ..errors import QuadsError
from .metadata import RacMetadata, load_sidecar
from .select import GEMMS, Gemm, Unit, adaptive, block_cost, flop_share, num_blocks

REPORT = "quads_calibration_report.json"
RATIO, POLICY = "--quads-rac-ratio", "--quads-rac-policy"
BUDGETS = (0.125, 0.25, 0.375, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Point:
    """One budget: what its selection spends, and the share of the uncompensated summed KL that it leaves."""

    budget: float
    spent: float
    kl_left: float


def with_budget(argv: Sequence[str], budget: float) -> list[str]:
    """The Megatron-side flags of ``--budget``; QuadsError when it is no share or the flags say it already."""
    for flag in (RATIO, POLICY):
        if any(a == flag or a.startswith(flag + "=") for a in argv):
            raise QuadsError(f"--budget says what {flag} says", where=flag, do="give one of them")
    if not 0 < budget <= 1:
        raise QuadsError(f"budget {budget} is outside (0, 1]", where="--budget", do="give a share such as 0.5")
    return [*argv, RATIO, repr(budget), POLICY, "adaptive"]


def curve(kl: Mapping[Unit, Mapping[int, float]], rac: RacMetadata) -> list[Point]:
    """What other budgets would buy, from the sensitivities that calibration measured."""
    cost, none = block_cost(rac.model), sum(table[0] for table in kl.values())
    points = []
    for budget in BUDGETS:
        counts = adaptive(kl, cost, budget)
        left = sum(kl[unit][n] for unit, n in counts.items())
        points.append(Point(budget, flop_share(counts, rac.model), left / none if none > 0 else 0.0))
    return points


def show(folder: Path) -> None:
    """Print each GEMM's ratio and, under the adaptive policy, the curve over budgets. ``folder``: a calibrated one."""
    rac = load_sidecar(folder)
    report = json.loads((folder / REPORT).read_text())
    if rac is None or not report["kl"]:
        return
    kl = {_unit(name): {int(n): v for n, v in table.items()} for name, table in report["kl"].items()}
    blocks = num_blocks(rac.model)
    table = Table("layer", *(f"{gemm}: ratio" for gemm in GEMMS), *(f"{gemm}: KL without -> with" for gemm in GEMMS))
    for layer, selection in sorted(rac.layers.items()):
        counts = {gemm: len(getattr(selection, gemm).indices()) for gemm in GEMMS}
        ratios = [f"{counts[gemm] / blocks[gemm]:.3f}" for gemm in GEMMS]
        measured = [f"{kl[layer, gemm][0]:.2e} -> {kl[layer, gemm][counts[gemm]]:.2e}" for gemm in GEMMS]
        table.add_row(str(layer), *ratios, *measured)
    console = Console()
    console.print(table)
    console.print(f"budget {rac.ratio:g} of the expert FLOPs, spent {report['flop_share']:.3f}; other budgets:")
    for point in curve(kl, rac):
        console.print(f"  {point.budget:.3f}: spends {point.spent:.3f}, leaves {point.kl_left:.1%} of the summed KL")


def _unit(name: str) -> Unit:
    layer, gemm = name.split(".")
    return int(layer), cast(Gemm, gemm)
