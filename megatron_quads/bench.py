"""``quads bench kernels``: the kernels' times beside a copy measured in the same run and beside what else one could use.

Launches rotate among buffers that together are larger than the L2 cache, except for a few tokens, whose 64 buffers fit in
it as they would in a running model. ``bench_report`` says how times and floors are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from .bench_report import Bench, Launch, graph_us, host_us, report, stream_us
from .errors import QuadsError
from .kernels import nvfp4, rac
from .kernels.nvfp4 import reference

L2_BYTES = 256 << 20  # buffers of many tokens rotate over this much
WITHIN_5 = 1 / 1.05
SMALL = 1 / 1.3


@dataclass
class Case:
    """A list of BF16 weights of one shape."""

    count: int
    rows: int
    k: int
    qdq_target: float = 0.93
    full: bool = False  # with all alternatives

    @property
    def shape(self) -> str:
        return f"{self.count} x [{self.rows}, {self.k}]"


WEIGHTS = [
    Case(8, 4096, 6144, qdq_target=0.95, full=True),
    Case(128, 1536, 2048, full=True),  # Qwen3-30B-A3B fc1
    Case(128, 2048, 768),  # Qwen3-30B-A3B fc2
    Case(256, 4096, 7168),  # DeepSeek-V3-like fc1
    Case(256, 7168, 2048),  # DeepSeek-V3-like fc2
]
ACTIVATIONS = ((8192, 2048), (64, 2048), (8192, 768), (64, 768), (8192, 7168))
GEMM_TOKENS = (64, 4096, 65536)


def kernels(out: Path) -> None:
    """Run every benchmark; write ``out`` (JSON) and the PNG beside it, print one table. QuadsError without a CUDA GPU."""
    if not torch.cuda.is_available() or not nvfp4.has_kernels(torch.device("cuda", torch.cuda.current_device())):
        raise QuadsError("no CUDA GPU of sm_89 or newer with triton", where="quads bench kernels", do="run it on one")
    bench = Bench()
    for case in WEIGHTS:
        _weights(bench, case)
        torch.cuda.empty_cache()
    for tokens, k in ACTIVATIONS:
        _activations(bench, tokens, k)
    for tokens in GEMM_TOKENS:
        _gemm(bench, tokens)
    _host(bench)
    report(bench, out)


def _host(bench: Bench, count: int = 128) -> None:
    """What calls cost the host, at sizes where the GPU waits for it."""
    x, one = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16), torch.ones((), device="cuda")
    blocks = rac.Blocks.prefix(64, 2048, "cuda")
    ws = [torch.randn(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    amax, buffers = nvfp4.grouped_amax(ws), [torch.empty_like(w) for w in ws]
    floor = host_us(_empty_launch(64))
    for name, shape, work in (
        ("qdq", "[64, 2048]", lambda: nvfp4.qdq(x, one)),
        ("qdq_with_residual", "[64, 2048]", lambda: rac.qdq_with_residual(x, None, blocks)),
        ("quantize_with_residual", "[64, 2048]", lambda: rac.quantize_with_residual(x, None, blocks)),
        ("grouped_amax", f"{count} x [64, 64]", lambda: nvfp4.grouped_amax(ws)),
        ("grouped_qdq, out given", f"{count} x [64, 64]", lambda: nvfp4.grouped_qdq(ws, amax, out=buffers)),
        ("grouped_quantize", f"{count} x [64, 64]", lambda: nvfp4.grouped_quantize(ws, amax)),
    ):
        bench.add(f"host time, {name}", shape, "bfloat16", host_us(work), 0, floor="empty launch, host", floor_us=floor)


def _weights(bench: Bench, case: Case) -> None:
    ws = [torch.randn(case.rows, case.k, device="cuda", dtype=torch.bfloat16) for _ in range(case.count)]
    buffers = [torch.empty_like(w) for w in ws]
    values = case.count * case.rows * case.k
    packed = values // 2 + values // 16
    amax = nvfp4.grouped_amax(ws)
    scales = reference.tensor_scale(amax)
    repeat = 4 if values < 1 << 31 else 1

    def time(work: Launch) -> float:
        return graph_us([work] * repeat)

    amax_vs, qdq_vs, both_vs, pack_vs = _alternatives(ws, amax, scales, time) if case.full else ({}, {}, {}, {})
    add = partial(bench.add, shape=case.shape, dtype="bfloat16")
    us = time(lambda: nvfp4.grouped_amax(ws))
    add("amax", us=us, size=values * 2, target=0.90, floor="read", vs=amax_vs)
    us = time(lambda: nvfp4.grouped_qdq(ws, amax, out=buffers))
    add("qdq", us=us, size=values * 4, target=case.qdq_target, vs=qdq_vs)
    us = time(lambda: nvfp4.grouped_qdq(ws, nvfp4.grouped_amax(ws), out=buffers))
    floor_us = values * 2 / bench.read_gbps / 1e3 + values * 4 / bench.copy_gbps / 1e3
    add("amax + qdq", us=us, size=values * 6, target=WITHIN_5, floor="read + copy", floor_us=floor_us, vs=both_vs)
    us = time(lambda: nvfp4.grouped_quantize(ws, amax))
    add("pack", us=us, size=values * 2 + packed, target=0.85, vs=pack_vs)
    us = time(lambda: nvfp4.grouped(ws, amax, out=buffers, want_packed=True))
    add("qdq + pack", us=us, size=values * 4 + packed)


def _alternatives(
    ws: list[Tensor], amax: Tensor, scales: Tensor, time: Callable[[Launch], float]
) -> tuple[dict[str, float], ...]:
    """Times of what else one could use for amax, qdq, both, and pack."""
    pairs = list(zip(ws, scales, strict=True))
    torch_amax = time(lambda: [torch.linalg.vector_norm(w, float("inf")) for w in ws])
    formula, whole = torch.compile(reference.qdq), torch.compile(_qdq_with_amax)
    formula(*pairs[0]), whole(ws[0])
    qdq = {
        "a launch for each weight": time(lambda: [nvfp4.qdq(w, s) for w, s in pairs]),
        "torch.compile of the formula, a loop": time(lambda: [formula(w, s) for w, s in pairs]),
    }
    both = {"torch.compile of the formula with amax, a loop": time(lambda: [whole(w) for w in ws])}
    pack = {}
    for name, work in _modelopt_fake(ws, amax):
        qdq[name] = time(work)
        both[f"torch amax + {name}"] = torch_amax + qdq[name]
    for name, work in _modelopt_pack(pairs):
        pack[name] = stream_us(work, 3)
    return {"torch.linalg.vector_norm, a loop": torch_amax}, qdq, both, pack


def _qdq_with_amax(w: Tensor) -> Tensor:
    return reference.qdq(w, reference.tensor_scale(reference.amax(w)))


def _modelopt_fake(ws: list[Tensor], amax: Tensor) -> Iterator[tuple[str, Launch]]:
    try:
        from modelopt.torch.kernels.quantization.gemm.fp4_kernel_hopper import fp4_fake_quant_block
    except ImportError:
        print("nvidia-modelopt is not installed: its fake quantisation is not compared with")
        return
    yield "ModelOpt fake quant (Triton)", lambda: [fp4_fake_quant_block(w, a) for w, a in zip(ws, amax, strict=True)]


def _modelopt_pack(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[str, Launch]]:
    try:
        from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
    except ImportError:
        print("nvidia-modelopt is not installed: its packing is not compared with")
        return
    yield "ModelOpt NVFP4QTensor", lambda: [NVFP4QTensor.quantize(w, 16, weights_scaling_factor_2=s) for w, s in pairs]


def _activations(bench: Bench, tokens: int, k: int) -> None:
    small, half = tokens <= 1024, k // 32
    count = 64 if small else max(2, -(-L2_BYTES // (tokens * k * 2)))
    xs = [torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    hs = [
        torch.randn(tokens, 2 * k, device="cuda", dtype=torch.bfloat16)
        for _ in range(count if small else 2 + count // 2)
    ]
    empty = _empty_launch(tokens)
    add = partial(bench.add, shape=f"[{tokens}, {k}]", dtype="bfloat16", target=0.85)
    if small:
        copy_us = graph_us([_copy_launch(x) for x in xs])
        add = partial(add, target=SMALL, floor="empty launch", floor_us=graph_us([empty] * count))
        add = partial(add, vs={"a kernel that only copies the rows": copy_us})
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
        add(f"quantize_with_residual, {name}", us=us, size=tokens * k * 2 + packed)
        us = graph_us([partial(rac.qdq_with_residual, x, None, blocks) for x in xs])
        add(f"qdq_with_residual, {name}", us=us, size=tokens * k * 4)
    blocks = ways["prefix 50%"]
    packed = tokens * (k // 16 + half) * 9 + tokens * 4
    us = graph_us([partial(rac.quantize_with_residual, h, None, blocks, silu=True) for h in hs])
    add("silu_and_mul + quantize_with_residual, prefix 50%", us=us, size=tokens * k * 4 + packed)
    us = graph_us([partial(rac.qdq_with_residual, h, None, blocks, silu=True) for h in hs])
    add("silu_and_mul + qdq_with_residual, prefix 50%", us=us, size=tokens * k * 6)
    if small:  # launched from Python, both with their launch cost
        x = xs[0]
        add = partial(add, floor="empty launch from Python", floor_us=stream_us(empty, 200), target=None, vs={})
        us = stream_us(lambda: rac.quantize_with_residual(x, None, blocks), 200)
        add("quantize_with_residual, prefix 50%, from Python", us=us, size=tokens * k * 2 + packed)
        us = stream_us(lambda: rac.qdq_with_residual(x, None, blocks), 200)
        add("qdq_with_residual, prefix 50%, from Python", us=us, size=tokens * k * 4)


def _empty_launch(programs: int) -> Launch:
    from .kernels.probes import empty_kernel

    x = torch.zeros(16, device="cuda")
    return lambda: empty_kernel[(programs,)](x, num_warps=4)


def _copy_launch(x: Tensor) -> Launch:
    from .kernels.probes import copy_kernel

    out, k = torch.empty_like(x), 1 << (x.shape[1].bit_length() - 1)
    return lambda: copy_kernel[(x.shape[0],)](x, out, K=k, num_warps=4)


def _gemm(bench: Bench, tokens: int, experts: int = 128, n: int = 1536, k: int = 2048) -> None:
    """Expert fc1 of Qwen3-30B-A3B; ``tokens`` rows after top-k, spread evenly."""
    w = torch.randn(experts, n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
    amax = nvfp4.grouped_amax(list(w))
    scales = reference.tensor_scale(amax)
    parts = nvfp4.grouped_quantize(list(w), amax)
    codes, s8 = (torch.stack([t.view(torch.uint8) for t in part]) for part in parts)
    s8 = s8.view(torch.float8_e4m3fn)
    x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
    offsets = (torch.arange(experts + 1, device="cuda") * tokens // experts).to(torch.int32)
    vs: dict[str, float] = {}
    if hasattr(torch, "_grouped_mm"):
        vs["BF16 torch._grouped_mm (no quantisation)"] = graph_us(
            [lambda: torch._grouped_mm(x, w.transpose(-2, -1), offs=offsets[1:])] * 4
        )
    for name, count in (("no residual", 0), ("residual 50% listed", k // 32), ("residual 100%", k // 16)):
        blocks = rac.Blocks.of(torch.arange(count, device="cuda") * (k // 16 // max(count, 1)), k) if count else None
        q = rac.quantize_with_residual(x, None, blocks)
        us = graph_us([partial(rac.grouped_gemm, q, codes, s8, scales, offsets, blocks)] * 4)
        size = min(experts, tokens) * n * k * 9 // 16 + tokens * ((k + 16 * count) * 9 // 16 + n * 2)
        bench.add(f"grouped W4A4 GEMM, {name}", f"{tokens} x {experts} x [{n}, {k}]", "e2m1", us, size, vs=vs)


if __name__ == "__main__":
    import sys

    kernels(Path(sys.argv[1]))
