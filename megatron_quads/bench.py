"""``quads bench kernels``: the kernels' times beside a copy measured in the same run and beside what else one could use.

Every time is the median over replays of a CUDA graph of many launches, which rotate among buffers larger together than
the L2 cache. ``bytes`` counts each input and output once; ``floor_us`` is these bytes at the copy's bandwidth.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import atomic
from .errors import QuadsError
from .kernels import nvfp4, rac
from .kernels.nvfp4 import reference

L2_BYTES = 256 << 20  # buffers of small cases rotate over this much
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
    floor_us: float
    target: str = ""
    vs: dict[str, float] = field(default_factory=dict)


def graph_us(launches: list[Launch], replays: int = 20) -> float:
    """Median time of one launch, from a graph that holds all of them once."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = [_event_us(graph.replay) for _ in range(replays + 3)][3:]
    return statistics.median(times) / len(launches)


def _event_us(work: Launch) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def stream_us(work: Launch, repeats: int = 20) -> float:
    """Median time of ``work`` launched from Python: for what cannot be captured, and with the launch cost of small ones."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    return statistics.median(_event_us(work) for _ in range(repeats))


@dataclass
class Case:
    """A list of weights of one shape."""

    name: str
    count: int
    rows: int
    k: int
    full: bool = False  # with all alternatives

    @property
    def shape(self) -> str:
        return f"{self.count} x [{self.rows}, {self.k}]"


WEIGHTS = [
    Case("8 large weights", 8, 4096, 6144, full=True),
    Case("Qwen3-30B-A3B fc1", 128, 1536, 2048, full=True),
    Case("Qwen3-30B-A3B fc2", 128, 2048, 768),
    Case("DeepSeek-V3-like fc1", 256, 4096, 7168),
    Case("DeepSeek-V3-like fc2", 256, 7168, 2048),
]


class Bench:
    """Holds the copy's bandwidth and collects rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        source = torch.randn(8 * 4096 * 6144, device="cuda").bfloat16()
        target = torch.empty_like(source)
        size = source.numel() * 2
        copy = graph_us([lambda: target.copy_(source)] * 4)
        self.copy_gbps = 2 * size / copy / 1e3
        self.add("copy", "8 x [4096, 6144]", "bfloat16", copy, 2 * size, "")

    def add(self, kernel: str, shape: str, dtype: str, us: float, size: int, target: str, **vs: float) -> Row:
        gbps = size / us / 1e3
        row = Row(kernel, shape, dtype, round(us, 2), size, round(gbps, 1), round(gbps / self.copy_gbps, 4),
                  round(size / self.copy_gbps / 1e3, 2), target, {k: round(v / us, 2) for k, v in vs.items()})  # fmt: skip
        self.rows.append(row)
        return row


def kernels(out: Path) -> None:
    """Run every benchmark; write ``out`` (JSON) and the PNG beside it, print one table. QuadsError without a CUDA GPU."""
    if not torch.cuda.is_available() or not nvfp4.has_kernels(torch.device("cuda", torch.cuda.current_device())):
        raise QuadsError("no CUDA GPU of sm_89 or newer with triton", where="quads bench kernels", do="run it on one")
    bench = Bench()
    for case in WEIGHTS:
        _weights(bench, case)
        torch.cuda.empty_cache()
    for tokens, k in ((8192, 2048), (64, 2048), (8192, 768), (8192, 7168)):
        _activations(bench, tokens, k)
    for tokens in (64, 4096, 65536):
        _gemm(bench, tokens)
    report(bench, out)


def _weights(bench: Bench, case: Case) -> None:
    ws = [torch.randn(case.rows, case.k, device="cuda", dtype=torch.bfloat16) for _ in range(case.count)]
    buffers = [torch.empty_like(w) for w in ws]
    values = case.count * case.rows * case.k
    amax = nvfp4.grouped_amax(ws)
    scales = reference.tensor_scale(amax)
    slow = case.full
    repeat = 4 if values < 1 << 31 else 1

    def time(work: Launch) -> float:
        return graph_us([work] * repeat)

    torch_amax = time(lambda: [torch.linalg.vector_norm(w, float("inf")) for w in ws]) if slow else 0.0
    others = {"torch.linalg.vector_norm, a loop": torch_amax} if slow else {}
    one = bench.add(
        "amax", case.shape, "bfloat16", time(lambda: nvfp4.grouped_amax(ws)), values * 2, ">= .90", **others
    )
    target = ">= .95" if case.name == "8 large weights" else ">= .93"
    others = {}
    if slow:
        others["a launch for each weight"] = time(lambda: [nvfp4.qdq(w, s) for w, s in zip(ws, scales, strict=True)])
        formula = torch.compile(reference.qdq)
        formula(ws[0], scales[0])
        others["torch.compile of the formula, a loop"] = time(
            lambda: [formula(w, s) for w, s in zip(ws, scales, strict=True)]
        )
        for name, work in _modelopt_fake(ws, amax):
            others[name] = time(work)
    us = time(lambda: nvfp4.grouped_qdq(ws, amax, out=buffers))
    qdq = bench.add("qdq", case.shape, "bfloat16", us, values * 4, target, **others)
    both = time(lambda: nvfp4.grouped_qdq(ws, nvfp4.grouped_amax(ws), out=buffers))
    bench.add("amax + qdq", case.shape, "bfloat16", both, values * 6, ">= .952 (1.05 x floor)",
              **({"ModelOpt amax + fake quant": torch_amax + others["ModelOpt fake quant (Triton)"]}
                 if "ModelOpt fake quant (Triton)" in others else {}))  # fmt: skip
    del qdq, one
    packed = values // 2 + values // 16
    others = {}
    if slow:
        others = {name: stream_us(work, 3) for name, work in _modelopt_pack(ws, scales)}
    us = time(lambda: nvfp4.grouped_quantize(ws, amax))
    bench.add("pack", case.shape, "bfloat16", us, values * 2 + packed, ">= .85", **others)
    us = time(lambda: nvfp4.grouped(ws, amax, out=buffers, want_packed=True))
    bench.add("qdq + pack", case.shape, "bfloat16", us, values * 4 + packed, "")


def _modelopt_fake(ws: list[Tensor], amax: Tensor) -> Iterator[tuple[str, Launch]]:
    try:
        from modelopt.torch.kernels.quantization.gemm.fp4_kernel_hopper import fp4_fake_quant_block
    except ImportError:
        return
    yield "ModelOpt fake quant (Triton)", lambda: [fp4_fake_quant_block(w, a) for w, a in zip(ws, amax, strict=True)]


def _modelopt_pack(ws: list[Tensor], scales: Tensor) -> Iterator[tuple[str, Launch]]:
    try:
        from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
    except ImportError:
        return
    pairs = list(zip(ws, scales, strict=True))
    yield "ModelOpt NVFP4QTensor", lambda: [NVFP4QTensor.quantize(w, 16, weights_scaling_factor_2=s) for w, s in pairs]


def _activations(bench: Bench, tokens: int, k: int) -> None:
    count = max(2, -(-L2_BYTES // (tokens * k * 2))) if tokens > 1024 else 64
    xs = [torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    hs = [torch.randn(tokens, 2 * k, device="cuda", dtype=torch.bfloat16) for _ in range(max(2, count // 2))]
    half = k // 32
    shape, small = f"[{tokens}, {k}]", tokens <= 1024
    target = "<= 1.3 x an empty launch" if small else ">= .85"
    vs = {"an empty launch": graph_us([_empty_launch()] * 64)} if small else {}
    ways = {
        "prefix 50%": rac.Blocks.prefix(half, k, "cuda"),
        "listed 50%": rac.Blocks.of(torch.randperm(k // 16, device="cuda")[:half].sort().values, k),
        "all": rac.Blocks.prefix(k // 16, k, "cuda"),
        "none": None,
    }
    for name, blocks in ways.items():
        chosen = 0 if blocks is None else blocks.index.numel()
        packed = tokens * (k // 16 + chosen) * 9 + tokens * 4
        us = graph_us([partial(rac.quantize_with_residual, x, None, blocks) for x in xs])
        bench.add(f"quantize_with_residual, {name}", shape, "bfloat16", us, tokens * k * 2 + packed, target, **vs)
        us = graph_us([partial(rac.qdq_with_residual, x, None, blocks) for x in xs])
        bench.add(f"qdq_with_residual, {name}", shape, "bfloat16", us, tokens * k * 4, target, **vs)
    blocks = ways["prefix 50%"]
    packed = tokens * (k // 16 + half) * 9 + tokens * 4
    us = graph_us([partial(rac.quantize_with_residual, h, None, blocks, silu=True) for h in hs])
    bench.add(
        "silu_and_mul + quantize_with_residual, prefix 50%", shape, "bfloat16", us, tokens * k * 4 + packed, target
    )
    us = graph_us([partial(rac.qdq_with_residual, h, None, blocks, silu=True) for h in hs])
    bench.add("silu_and_mul + qdq_with_residual, prefix 50%", shape, "bfloat16", us, tokens * k * 6, target)
    if small:  # launched from Python, both with their launch cost
        empty, x = stream_us(_empty_launch(), 200), xs[0]
        us = stream_us(lambda: rac.quantize_with_residual(x, None, blocks), 200)
        bench.add("quantize_with_residual from Python", shape, "bfloat16", us, tokens * k * 2 + packed, target,
                  **{"an empty launch": empty})  # fmt: skip


def _empty_launch() -> Launch:
    import triton

    @triton.jit
    def empty(x_ptr):  # type: ignore[no-untyped-def]
        return

    x = torch.zeros(16, device="cuda")
    return lambda: empty[(64,)](x, num_warps=4)


def _gemm(bench: Bench, tokens: int, experts: int = 128, n: int = 1536, k: int = 2048) -> None:
    """Expert fc1 of Qwen3-30B-A3B; ``tokens`` rows after top-k, spread evenly."""
    w = torch.randn(experts, n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
    scales = reference.tensor_scale(nvfp4.grouped_amax(list(w)))
    parts = [nvfp4.quantize(w[e], scales[e]) for e in range(experts)]
    codes, s8 = torch.stack([c for c, _ in parts]), torch.stack([s.view(torch.uint8) for _, s in parts])
    s8 = s8.view(torch.float8_e4m3fn)
    x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
    offsets = (torch.arange(experts + 1, device="cuda") * tokens // experts).to(torch.int32)
    vs: dict[str, float] = {}
    if hasattr(torch, "_grouped_mm"):
        vs["bf16 torch._grouped_mm (no quantisation)"] = graph_us(
            [lambda: torch._grouped_mm(x, w.transpose(-2, -1), offs=offsets[1:])] * 4
        )
    for name, count in (("no residual", 0), ("residual 50% listed", k // 32), ("residual 100%", k // 16)):
        blocks = rac.Blocks.of(torch.arange(count, device="cuda") * (k // 16 // max(count, 1)), k) if count else None
        q = rac.quantize_with_residual(x, None, blocks)
        work = lambda q=q, b=blocks: rac.grouped_gemm(q, codes, s8, scales, offsets, b)  # noqa: E731
        us = graph_us([work] * 4)
        size = min(experts, tokens) * n * k * 9 // 16 + tokens * ((k + 16 * count) * 9 // 16 + n * 2)
        bench.add(f"grouped W4A4 GEMM, {name}", f"{tokens} x {experts} x [{n}, {k}]", "e2m1", us, size, "", **vs)


def report(bench: Bench, out: Path) -> None:
    """Write JSON and PNG, print the table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from rich.console import Console
    from rich.table import Table

    value: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_gbps": round(bench.copy_gbps, 1),
        "method": "median over CUDA graph replays; bytes: each input and output once; floor: bytes at copy bandwidth",
        "rows": [asdict(r) for r in bench.rows],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_json(out, value)
    table = Table(title=f"{value['device']}, copy {bench.copy_gbps:.0f} GB/s")
    for name in ("kernel", "shape", "us", "floor us", "GB/s", "of copy", "target", "others' time / ours"):
        table.add_column(name, justify="left" if name in ("kernel", "shape", "others' time / ours") else "right")
    for r in bench.rows:
        others = ", ".join(f"{k} {v:g}" for k, v in r.vs.items())
        table.add_row(r.kernel, r.shape, f"{r.us:.1f}", f"{r.floor_us:.1f}", f"{r.gbps:.0f}", f"{r.of_copy:.3f}", r.target, others)  # fmt: skip
    Console(width=200).print(table)
    shown = [r for r in bench.rows if "GEMM" not in r.kernel and not r.shape.startswith("[64")]
    figure, axis = pyplot.subplots(figsize=(9, 0.28 * len(shown) + 1))
    axis.barh([f"{r.kernel}  {r.shape}" for r in shown], [r.of_copy for r in shown], color="#4c78a8")
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.invert_yaxis()
    axis.set_xlabel(f"share of copy bandwidth ({bench.copy_gbps:.0f} GB/s, {value['device']})")
    axis.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(out.with_suffix(".png"), dpi=130)


if __name__ == "__main__":
    import sys

    kernels(Path(sys.argv[1]))
