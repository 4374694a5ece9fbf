"""Timing, rows and the report of ``quads bench kernels``.

Every time is the median over replays of a CUDA graph of many launches. ``bytes`` counts each input and output once. A row's
floor is the time that no kernel can beat: its bytes at the bandwidth of a copy or of a pure read measured in the same run,
or, for a few tokens, an empty launch.
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import atomic

Launch = Callable[[], object]


@dataclass
class Row:
    """One line of the table; ``vs`` holds other ways' times divided by ours (above 1: ours is faster)."""

    kernel: str
    shape: str
    dtype: str
    us: float
    bytes: int
    gbps: float
    of_copy: float
    floor: str  # what the floor is made of
    floor_us: float
    of_floor: float  # floor / time
    target: float | None  # of of_floor
    vs: dict[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        return f">= {self.target:.2f} " + ("met" if self.of_floor >= self.target else "MISSED")


def event_us(work: Launch) -> float:
    """Time of one call of ``work`` on the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def graph_us(launches: list[Launch], replays: int = 20) -> float:
    """Median time of one launch, from a graph that holds all of them once."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = [event_us(graph.replay) for _ in range(replays + 3)][3:]
    return statistics.median(times) / len(launches)


def stream_us(work: Launch, repeats: int = 20) -> float:
    """Median time of ``work`` launched from Python: for what cannot be captured, and with the launch cost of small ones."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    return statistics.median(event_us(work) for _ in range(repeats))


def host_us(work: Launch, calls: int = 100) -> float:
    """Time that the host spends in one call of ``work``: the least of five means, queued launches run meanwhile."""
    means = []
    for _ in range(6):  # the first warms up
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        means.append((time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return min(means[1:]) * 1e6


class Bench:
    """Measures the two bandwidths first, then collects rows."""

    def __init__(self) -> None:
        import triton

        from .kernels.probes import read_kernel

        self.rows: list[Row] = []
        shape = "8 x [4096, 6144]"
        source = torch.randn(8 * 4096 * 6144, device="cuda").bfloat16()
        target, size, words = torch.empty_like(source), source.numel() * 2, source.view(torch.int32)
        copy = graph_us([lambda: target.copy_(source)] * 4)
        self.copy_gbps = 2 * size / copy / 1e3

        def read(tile: int, warps: int) -> Launch:
            grid = (triton.cdiv(words.numel(), tile),)
            return lambda: read_kernel[grid](
                words, target.view(torch.int32), words.numel(), WORDS=tile, num_warps=warps
            )

        shapes = ((2048, 4), (4096, 4), (8192, 8), (16384, 16))
        reads = min(graph_us([read(*shape)] * 4) for shape in shapes)
        self.read_gbps = size / reads / 1e3
        self.add("copy", shape, "bfloat16", copy, 2 * size)
        self.add("pure read", shape, "bfloat16", reads, size, floor="read")

    def add(
        self,
        kernel: str,
        shape: str,
        dtype: str,
        us: float,
        size: int,
        target: float | None = None,
        *,
        floor: str = "copy",
        floor_us: float | None = None,
        vs: dict[str, float] | None = None,
    ) -> None:
        """Record a time; ``floor_us`` by default is ``size`` at the bandwidth that ``floor`` names (copy or read)."""
        gbps = size / us / 1e3
        if floor_us is None:
            floor_us = size / (self.read_gbps if floor == "read" else self.copy_gbps) / 1e3
        ratios = {k: round(v / us, 2) for k, v in (vs or {}).items()}
        self.rows.append(
            Row(kernel, shape, dtype, round(us, 2), size, round(gbps, 1), round(gbps / self.copy_gbps, 4), floor,
                round(floor_us, 2), round(floor_us / us, 4), target, ratios)
        )  # fmt: skip


def report(bench: Bench, out: Path) -> None:
    """Write JSON to ``out`` and the PNG beside it, print the table."""
    from rich.console import Console
    from rich.table import Table

    value: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_gbps": round(bench.copy_gbps, 1),
        "read_gbps": round(bench.read_gbps, 1),
        "method": __doc__.split("\n\n", 1)[1].replace("\n", " ").strip(),
        "rows": [asdict(r) for r in bench.rows],
    }
    atomic.make_folder(out.parent)
    atomic.write_json(out, value)
    title = f"{value['device']}, copy {bench.copy_gbps:.0f} GB/s, pure read {bench.read_gbps:.0f} GB/s"
    table = Table(title=title)
    left = ("kernel", "shape", "floor", "others' time / ours")
    for name in ("kernel", "shape", "us", "MB", "GB/s", "of copy", "floor", "floor us", "of floor", "target", left[-1]):
        table.add_column(name, justify="left" if name in left else "right")
    for r in bench.rows:
        table.add_row(r.kernel, r.shape, f"{r.us:.1f}", f"{r.bytes / 1e6:.1f}", f"{r.gbps:.0f}", f"{r.of_copy:.3f}",
                      r.floor, f"{r.floor_us:.1f}", f"{r.of_floor:.3f}", r.verdict,
                      ", ".join(f"{k} {v:g}" for k, v in r.vs.items()))  # fmt: skip
    Console(width=220).print(table)
    _plot(bench, title, out.with_suffix(".png"))


def _plot(bench: Bench, title: str, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [r for r in bench.rows if r.target is not None]
    figure, axis = pyplot.subplots(figsize=(10, 0.26 * len(shown) + 1.2))
    colors = ["#4c78a8" if r.of_floor >= (r.target or 0) else "#e45756" for r in shown]
    places = list(range(len(shown)))
    axis.barh(places, [r.of_floor for r in shown], color=colors)
    axis.scatter([r.target or 0.0 for r in shown], places, marker="|", s=90, color="black", zorder=3, label="target")
    axis.set_yticks(places, [f"{r.kernel}  {r.shape}" for r in shown])
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.invert_yaxis()
    axis.set_xlabel("floor / time (the floor: bytes at copy or read bandwidth, or an empty launch); red: target missed")
    axis.set_title(title, fontsize=9)
    axis.legend(fontsize=7, loc="lower right")
    axis.tick_params(labelsize=7)
    figure.tight_layout()
    image = io.BytesIO()
    figure.savefig(image, dpi=130, format="png")
    pyplot.close(figure)
    atomic.write_bytes(out, image.getvalue())
