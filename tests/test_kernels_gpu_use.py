"""The Triton kernels in use: one small run of each (for compute-sanitizer), capture, compilation, faults, the reciprocal."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from test_kernels_gpu import CUDA, draw, same
from torch import Tensor

from megatron_quads.kernels import nvfp4, rac
from megatron_quads.kernels.nvfp4 import device, reference
from megatron_quads.kernels.rac import reference as rac_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_every_kernel_once() -> None:
    """Small odd shapes through every kernel and both ways of dividing. No graph, no compilation, no large tensor."""
    ws = [draw("normal", (7, 48), torch.bfloat16), draw("heavy", (33, 112), torch.bfloat16, seed=1)]
    amax = nvfp4.grouped_amax(ws)
    values, codes, s8 = nvfp4.grouped(ws, amax, want_packed=True)
    only = nvfp4.grouped_quantize(ws, amax)
    for i, w in enumerate(ws):
        scale = reference.tensor_scale(reference.amax(w.cpu()))
        expected = reference.quantize(w.cpu(), scale)
        assert same(values[i].cpu(), reference.qdq(w.cpu(), scale))
        assert same(codes[i].cpu(), expected[0]) and same(only[0][i].cpu(), expected[0])
        assert same(s8[i].cpu(), expected[1]) and same(only[1][i].cpu(), expected[1])
    x, h = draw("normal", (5, 176), torch.bfloat16), draw("normal", (5, 352), torch.bfloat16)
    index = torch.tensor([7, 2, 9], device=CUDA)
    blocks, prefix = rac.Blocks.of(index, 176), rac.Blocks.prefix(5, 176, CUDA)
    for q, b, swizzled in (
        (rac.quantize_with_residual(x, None, blocks), index, False),
        (rac.quantize_with_residual(x, None, prefix, swizzled=True), prefix.index, True),
    ):
        expected_q = rac_reference.quantize_with_residual(x.cpu(), None, b.cpu(), swizzled=swizzled)
        assert all(same(a.cpu(), e) for a, e in zip(q, expected_q, strict=True))
    row = reference.row_scale(x.cpu())
    assert same(
        rac.qdq_with_residual(x, None, blocks).cpu(), rac_reference.qdq_with_residual(x.cpu(), row, index.cpu())
    )
    assert rac.qdq_with_residual(h, None, blocks, silu=True).isfinite().all()
    huge = x.float() * 1e30
    assert same(
        nvfp4.qdq(huge, reference.row_scale(huge)).cpu(), reference.qdq(huge.cpu(), reference.row_scale(huge.cpu()))
    )
    w = draw("normal", (3, 40, 176), torch.bfloat16)
    scales = reference.tensor_scale(nvfp4.grouped_amax(list(w)))
    w_codes, w_s8 = nvfp4.quantize(w, scales[:, None, None].expand(3, 40, 1))
    offsets = torch.tensor([0, 2, 2, 5], device=CUDA)
    q = rac.quantize_with_residual(x, None, blocks)
    y = rac.grouped_gemm(q, w_codes, w_s8, scales, offsets, blocks, dtype=torch.float32)
    plain = rac.Quantized(*(t.cpu() for t in q))
    expected_y = rac_reference.grouped_gemm(
        plain, w_codes.cpu(), w_s8.cpu(), scales.cpu(), offsets.cpu(), index.cpu(), dtype=torch.float32
    )
    assert ((y.cpu() - expected_y).norm() / expected_y.norm()).item() < 1e-5


@triton.jit
def _reciprocals(found_ptr, wanted_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = (at | 0x3F800000).to(tl.float32, bitcast=True)
    tl.store(found_ptr + at, device.reciprocal(b))
    tl.store(wanted_ptr + at, tl.div_rn(1.0, b))


def test_reciprocal_of_every_significand() -> None:
    """What the proof of test_kernels_division.py starts from: on this GPU all 2^23 reciprocals are correctly rounded."""
    found, wanted = torch.empty(2, 1 << 23, device=CUDA)
    _reciprocals[(1 << 13,)](found, wanted, BLOCK=1024, **device.NO_CONTRACTION)
    assert wanted[1 << 22] == torch.tensor(1 / 1.5, dtype=torch.float32)
    assert torch.equal(found, wanted)


def test_capture_compile_and_no_sync() -> None:
    x, ws = draw("normal", (64, 256), torch.bfloat16), [draw("normal", (32, 256), torch.bfloat16) for _ in range(3)]
    stored = nvfp4.grouped_quantize(ws, nvfp4.grouped_amax(ws))
    w_codes, w_s8 = torch.stack(stored[0]), torch.stack([t.view(torch.uint8) for t in stored[1]])
    w_s8, w_scales = w_s8.view(torch.float8_e4m3fn), reference.tensor_scale(nvfp4.grouped_amax(ws))
    offsets = torch.tensor([0, 10, 10, 60], device=CUDA, dtype=torch.int32)
    blocks = rac.Blocks.prefix(8, 256, CUDA)
    out = [torch.empty_like(w) for w in ws]
    scale = reference.row_scale(x)

    def step() -> list[Tensor]:
        amax = nvfp4.grouped_amax(ws)
        nvfp4.grouped_qdq(ws, amax, out=out)
        q = rac.quantize_with_residual(x, None, blocks)
        y = rac.grouped_gemm(q, w_codes, w_s8, w_scales, offsets, blocks)
        swizzled = rac.quantize_with_residual(x, None, blocks, swizzled=True)
        return [
            amax,
            *q,
            y,
            *swizzled,
            rac.qdq_with_residual(x, None, blocks),
            nvfp4.qdq(x, scale),
            *nvfp4.quantize(x, scale),
        ]

    expected = [t.clone() for t in (*step(), *out)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        nvfp4.grouped_qdq([w.clone() for w in ws], nvfp4.grouped_amax(ws))  # a list seen for the first time
    finally:
        torch.cuda.set_sync_debug_mode("default")

    fresh = [w.clone() for w in ws]  # addresses first seen during capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
        first_seen = nvfp4.grouped_qdq(fresh, captured[0])
    for t in (*captured, *out, *first_seen):
        t.view(torch.uint8).fill_(255)
    graph.replay()
    assert all(same(a, b) for a, b in zip((*captured, *out), expected, strict=True))
    assert all(same(a, b) for a, b in zip(first_seen, out, strict=True))

    for t in out:
        t.zero_()
    compiled = torch.compile(step, fullgraph=True)
    assert all(same(a, b) for a, b in zip((*compiled(), *out), expected, strict=True))


def test_a_list_is_looked_at_in_every_call() -> None:
    """Nothing is kept of the tensors of a call before; writing in place counts as writing for autograd."""
    w = torch.nn.Parameter(draw("normal", (64, 64), torch.bfloat16))
    ws = [w, draw("normal", (64, 64), torch.bfloat16, seed=1)]
    before, version = nvfp4.grouped_amax(ws), w._version
    with torch.no_grad():
        nvfp4.grouped_qdq(ws, before, out=ws)
    assert w._version > version and same(nvfp4.grouped_amax(ws), before)
    w.data = draw("heavy", (128, 32), torch.bfloat16)
    assert nvfp4.grouped_amax(ws)[0] == reference.amax(w)
    assert same(nvfp4.grouped_qdq(ws, before)[0], reference.qdq(w.detach(), reference.tensor_scale(before[0])))
    w.data = w.data.t()
    with pytest.raises(ValueError, match=r"xs\[0\].*not contiguous"):
        nvfp4.grouped_amax(ws)


def test_faults_are_named_before_any_launch() -> None:
    x = draw("normal", (8, 64), torch.bfloat16)
    one = torch.ones((), device=CUDA)
    with pytest.raises(ValueError, match=r"bfloat16, float16 or float32, got torch\.float64"):
        nvfp4.qdq(x.double(), one)
    with pytest.raises(ValueError, match="multiple of 16"):
        nvfp4.quantize(x[:, :24], one)
    with pytest.raises(ValueError, match="scale on cpu"):
        nvfp4.qdq(x, one.cpu())
    with pytest.raises(ValueError, match="scale must hold one value"):
        nvfp4.qdq(x, one.expand(3))
    with pytest.raises(ValueError, match=r"xs\[1\].*not contiguous"):
        nvfp4.grouped_amax([x, x[:, :32]])
    with pytest.raises(ValueError, match=r"xs\[1\] is torch.float32"):
        nvfp4.grouped_qdq([x, x.float()], torch.ones(2, device=CUDA))
    with pytest.raises(ValueError, match="below 1, one of amax"):
        nvfp4.grouped_qdq([x, x], torch.ones(1, device=CUDA))
    with pytest.raises(ValueError, match="contiguous along K"):
        rac.qdq_with_residual(x.t().contiguous().t(), None, None)
    with pytest.raises(ValueError, match="prepared for K = 128"):
        rac.qdq_with_residual(x, None, rac.Blocks.prefix(1, 128, CUDA))
    with pytest.raises(ValueError, match="blocks are on cpu"):
        rac.qdq_with_residual(x, None, rac.Blocks.prefix(1, 64, "cpu"))
    with pytest.raises(ValueError, match="distinct and from 0 to 3"):
        rac.Blocks.of(torch.tensor([1, 4], device=CUDA), 64)
