"""The emulated experts against code written for reading; no engine."""

from __future__ import annotations

import pytest
import torch
from rollout_helpers import reference_experts

from megatron_quads.errors import QuadsError
from megatron_quads.kernels import nvfp4, rac
from megatron_quads.rollout.backends import ActivationPlan, EmulationBackend, PackedExperts
from megatron_quads.rollout.types import RolloutInfo, merge_infos, require_fit, sample_seed

E, H, INTER, TOKENS, K = 5, 64, 48, 23, 2


def _packed(gen: torch.Generator) -> PackedExperts:
    w13, w2 = torch.randn(E, 2 * INTER, H, generator=gen), torch.randn(E, H, INTER, generator=gen)
    scales = [torch.stack([nvfp4.tensor_scale(nvfp4.amax(w[e])) for e in range(E)]) for w in (w13, w2)]
    (c1, s1), (c2, s2) = (nvfp4.quantize(w, s[:, None, None]) for w, s in zip((w13, w2), scales, strict=True))
    return PackedExperts(c1, s1, scales[0], c2, s2, scales[1])


@pytest.mark.parametrize("mode", ["w4a16", "w4a4", "rac"])
@pytest.mark.parametrize("scale", ["token", "static"])
def test_emulation_equals_reference(mode: str, scale: str) -> None:
    gen = torch.Generator().manual_seed(1)
    backend, packed = EmulationBackend(), _packed(gen)
    backend.load(packed, torch.float32)
    w13, w2 = backend.weights()
    for e in range(E):
        assert torch.equal(w13[e], nvfp4.dequantize(packed.w13[e], packed.w13_scale[e], packed.w13_scale_2[e]))
    x = torch.randn(TOKENS, H, generator=gen) * torch.rand(TOKENS, 1, generator=gen) * 9
    ids = torch.stack([torch.randperm(E, generator=gen)[:K] for _ in range(TOKENS)])
    ids[3, 1] = -1  # an expert of another rank
    probs = torch.rand(TOKENS, K, generator=gen)
    blocks = {"gate_up": torch.tensor([0, 3]), "down": torch.tensor([0])}
    plan = ActivationPlan(mode, scale, blocks, {"gate_up": 4.0, "down": 4.0})

    def act(gemm: str, a: torch.Tensor) -> torch.Tensor:
        if mode == "w4a16":
            return a
        s = nvfp4.row_scale(a) if scale == "token" else nvfp4.tensor_scale(torch.tensor(4.0))
        return rac.qdq_with_residual(a, s, blocks[gemm] if mode == "rac" else None)

    got = backend.forward(x, probs, ids, plan)
    want = reference_experts(x, ids, probs, w13, w2, act)
    assert (got - want).abs().mean() < 1e-5 * want.abs().mean()
    if scale == "static" and mode != "w4a16":
        assert int(plan.saturated["gate_up"]) == int((x.abs().amax(-1) > 4).sum()) > 0


def test_reload_keeps_addresses() -> None:
    gen = torch.Generator().manual_seed(2)
    backend = EmulationBackend()
    backend.load(_packed(gen), torch.float32)
    before = [w.data_ptr() for w in backend.weights()]
    old = backend.weights()[0].clone()
    backend.load(_packed(gen), torch.float32)
    assert [w.data_ptr() for w in backend.weights()] == before
    assert not torch.equal(backend.weights()[0], old)


def test_tensor_scale_and_zero_tokens() -> None:
    plan = ActivationPlan("rac", "tensor", {"gate_up": torch.tensor([], dtype=torch.int64), "down": torch.tensor([0])})
    x = torch.zeros(4, 32)
    assert torch.equal(plan.quantize("down", x), x)
    assert plan.quantize("down", torch.empty(0, 32)).shape == (0, 32)
    y = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(plan.quantize("gate_up", y), nvfp4.qdq(y, nvfp4.tensor_scale(nvfp4.amax(y))))


def test_seeds_and_context() -> None:
    seeds = {sample_seed(s, i, j) for s in range(3) for i in range(4) for j in range(5)}
    assert len(seeds) == 60 and all(0 <= s < 2**63 for s in seeds)
    with pytest.raises(QuadsError, match=r"9 tokens does not fit a context of 8 .*prompt 1"):
        require_fit([[1], [1] * 9], 8, room=1)
    with pytest.raises(QuadsError, match="no tokens"):
        require_fit([[]], 8, room=1)


def test_workers_that_disagree_are_refused() -> None:
    one = RolloutInfo(1, "a", [0], [0], "m", "rac", "token", "emulation", "float32", {"0.down": 2})
    assert merge_infos([one, one]).saturated_rows == {"0.down": 4}
    other = RolloutInfo(2, "a", [0], [0], "m", "rac", "token", "emulation", "float32", {})
    with pytest.raises(QuadsError, match=r"disagree on version: 1 and 2.*worker 1"):
        merge_infos([one, other])
