"""The native path's kernels on a GPU, its FP4 products decoded in registers where there is no FP4 hardware."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_quads.kernels import nvfp4, rac
from megatron_quads.kernels.rac import reference
from megatron_quads.rollout import native_gemm
from megatron_quads.rollout.backends import ActivationPlan, PackedExperts
from megatron_quads.rollout.prepared import PreparedPlan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
BF16 = torch.bfloat16


class Case:
    """Random experts on the GPU; every third is never hit, a tenth of the slots are other ranks'."""

    def __init__(self, experts: int, hidden: int, inter: int, k: int) -> None:
        self.k, self.hidden, self.inter, self.experts = k, hidden, inter, experts
        self.gen = torch.Generator("cuda").manual_seed(0)
        parts = [self._weights(experts, 2 * inter, hidden), self._weights(experts, hidden, inter)]
        self.packed = PackedExperts(*(t for part in parts for t in part))

    def _weights(self, experts: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
        w = torch.randn(experts, n, k, generator=self.gen, device="cuda", dtype=BF16) * 0.05
        w *= torch.logspace(-1, 1, experts, device="cuda", dtype=BF16)[:, None, None]  # other FP32 scales per expert
        scale = nvfp4.tensor_scale(w.float().abs().amax((1, 2)))
        codes, s8 = nvfp4.quantize(w, scale[:, None, None].expand(experts, n, 1))
        return codes, s8, scale

    def plan(self, mode: str, scale: str = "token") -> PreparedPlan:
        chosen = {
            "gate_up": torch.arange(1, self.hidden // 16, 2, device="cuda"),
            "down": torch.arange(self.inter // 32, device="cuda"),
        }
        made = ActivationPlan(mode, scale, chosen, {"gate_up": 5.0, "down": 5.0})
        return PreparedPlan(made, {"gate_up": self.hidden, "down": self.inter}, torch.device("cuda", 0))

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn(tokens, self.hidden, generator=self.gen, device="cuda", dtype=BF16) * 2
        hit = torch.tensor([e for e in range(self.experts) if e % 3 != 2], device="cuda")
        ids = hit[torch.rand(tokens, hit.numel(), generator=self.gen, device="cuda").argsort(1)[:, : self.k]].int()
        ids[torch.rand(ids.shape, generator=self.gen, device="cuda") < 0.1] = -1
        return x, torch.rand(ids.shape, generator=self.gen, device="cuda"), ids


def _close(got: Tensor, want: Tensor) -> None:
    """One rounding to BF16 apart, and the order of sums in fp32."""
    error = (got.cpu().float() - want.float()).abs()
    bound = want.float().abs() * 2**-7 + want.float().abs().max() * 1e-5
    assert bool((error <= bound).all()), float((error / bound).max())


@pytest.mark.parametrize("tokens", [1, 7, 130])
@pytest.mark.parametrize(("mode", "scale"), [("rac", "token"), ("w4a4", "token"), ("rac", "static")])
def test_each_stage_is_the_contract(mode: str, scale: str, tokens: int) -> None:
    case = Case(experts=12, hidden=288, inter=208, k=4)
    plan, (x, probs, ids) = case.plan(mode, scale), case.inputs(tokens)
    p, way = case.packed, native_gemm.route(ids, 12)
    cpu = PackedExperts(*(t.cpu() for t in vars(p).values()))
    blocks = {g: None if b is None else b.index.cpu() for g, b in plan.blocks.items()}
    q = plan.pack("gate_up", x)
    top = nvfp4.row_scale(x.cpu()) if scale == "token" else nvfp4.tensor_scale(torch.tensor(5.0))
    want = reference.quantize_with_residual(x.cpu(), top, blocks["gate_up"])
    for got_part, want_part in zip(q, want, strict=True):
        assert torch.equal(got_part.cpu().contiguous().view(torch.uint8), want_part.contiguous().view(torch.uint8))
    pairs = native_gemm.gather(q, way.token)
    h = rac.grouped_gemm(pairs, p.w13, p.w13_scale, p.w13_scale_2, way.offsets, plan.blocks["gate_up"])
    on_cpu = native_gemm.gather(want, way.token.cpu())
    offsets = way.offsets.cpu()
    _close(h, reference.grouped_gemm(on_cpu, cpu.w13, cpu.w13_scale, cpu.w13_scale_2, offsets, blocks["gate_up"]))
    inner = plan.pack("down", h, silu=True)
    y = rac.grouped_gemm(inner, p.w2, p.w2_scale, p.w2_scale_2, way.offsets, plan.blocks["down"])
    inner_cpu = rac.Quantized(*(t.cpu() for t in inner))
    _close(y, reference.grouped_gemm(inner_cpu, cpu.w2, cpu.w2_scale, cpu.w2_scale_2, offsets, blocks["down"]))
    weighted = torch.zeros(ids.numel(), case.hidden, device="cuda")
    weighted[way.order] = y.float() * probs.flatten()[way.order, None]
    assert torch.equal(native_gemm.forward(x, probs, ids, p, plan), weighted.view(tokens, 4, -1).sum(1).to(BF16))


def test_cuda_graph_and_no_host_sync() -> None:
    case = Case(experts=128, hidden=2048, inter=768, k=8)
    plan = case.plan("rac")
    for tokens in (1, 64):
        x, probs, ids = case.inputs(tokens)
        native_gemm.forward(x, probs, ids, case.packed, plan)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            native_gemm.forward(x, probs, ids, case.packed, plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = native_gemm.forward(x, probs, ids, case.packed, plan)
        for _ in range(3):
            fresh = case.inputs(tokens)
            for held, new in zip((x, probs, ids), fresh, strict=True):
                held.copy_(new)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, native_gemm.forward(*fresh, case.packed, plan))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(50):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        print(f"{tokens} tokens, 128 experts of [2048, 768], RAC 50 %: {start.elapsed_time(end) * 20:.1f} us a layer")
    x, probs, ids = case.inputs(0)
    assert native_gemm.forward(x, probs, ids, case.packed, plan).shape == (0, 2048)
    x, probs, ids = case.inputs(5)
    assert not native_gemm.forward(x, probs, torch.full_like(ids, -1), case.packed, plan).any()


@pytest.mark.parametrize("silu", [False, True])
def test_qdq_into_a_given_tensor(silu: bool) -> None:
    x = torch.randn(33, 512, device="cuda", dtype=BF16)
    k = 256 if silu else 512
    blocks = rac.Blocks.prefix(5, k, x.device)
    want = rac.qdq_with_residual(x, None, blocks, silu=silu)
    out = torch.full((33, k), torch.nan, device="cuda", dtype=BF16)
    assert rac.qdq_with_residual(x, None, blocks, silu=silu, out=out) is out and torch.equal(out, want)

    @torch.compile(fullgraph=True)
    def compiled(x: Tensor, into: Tensor) -> Tensor:
        rac.qdq_with_residual(x, None, blocks, silu=silu, out=into)
        return into + 1

    into = torch.zeros_like(out)
    assert torch.equal(compiled(x, into), want + 1) and torch.equal(into, want)
