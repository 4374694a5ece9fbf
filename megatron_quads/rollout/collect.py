"""The client's side of ``observe.py``: calibration's statistics while an engine runs whole sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..rac.select import Unit
from ..rac.statistics import Moments, ResidualEnergy
from ..rac.store import add_files


def collect(
    workers: Callable[..., list[Any]],
    score: Callable[[Sequence[Sequence[int]]], Any],
    statistic: Moments | ResidualEnergy,
    sequences: Sequence[Sequence[int]],
    scratch: Path,
    static_amax: Mapping[Unit, float] | None,
) -> dict[int, int]:
    """Through the given transport; see ``LocalRollout.statistics``."""
    residual = isinstance(statistic, ResidualEnergy)
    workers(
        "statistics_start",
        kind="residual" if residual else "moments",
        scale=statistic.mode if isinstance(statistic, ResidualEnergy) else "token",
        static_amax={f"{layer}.{gemm}": top for (layer, gemm), top in (static_amax or {}).items()},
    )
    try:
        score(sequences)
    finally:
        found = workers("statistics_stop", folder=str(scratch))
    add_files(statistic, [part["file"] for part in found])
    pairs = Counter[int]()
    for part in found:
        pairs.update({int(layer): n for layer, n in part["pairs"].items()})
    return dict(pairs)
