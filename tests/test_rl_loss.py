"""The losses against hand-computed values and autograd."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_quads.errors import QuadsError
from megatron_quads.rl.loss import GRPOConfig, group_advantages, grpo_loss, k3, supervised_loss

CFG = GRPOConfig(clip_low=0.2, clip_high=0.3, tis_cap=2.0)


def one(ratio: float, advantage: float, *, rollout: float = 0.0, cfg: GRPOConfig = CFG) -> tuple[float, float, dict]:
    """Loss, gradient and metrics of one token with pi/pi_old = ratio and pi_old/pi_rollout = e^rollout."""
    old = torch.tensor([[-1.0]])
    lp = (old + math.log(ratio)).requires_grad_()
    batch = {
        "mask": torch.ones(1, 1),
        "advantages": torch.tensor([advantage]),
        "old_logprobs": old,
        "rollout_logprobs": old - rollout,
    }
    loss, metrics = grpo_loss(lp, torch.tensor([[0.7]]), batch, cfg)
    loss.backward()
    assert lp.grad is not None
    return loss.item(), lp.grad.item(), {k: v.item() for k, v in metrics.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.1, 2.0, -2.2, -2.2, 0),  # d(-r A)/d lp = -r A
        (1.5, 2.0, -2.6, 0.0, 1),  # above 1 + high with a positive advantage: no gradient
        (1.5, -2.0, 3.0, 3.0, 0),  # the pessimistic side is not clipped
        (0.5, 2.0, -1.0, -1.0, 0),
        (0.5, -2.0, 1.6, 0.0, 1),  # below 1 - low with a negative advantage: no gradient
        (1.0, 0.0, 0.0, 0.0, 0),
    ],
)
def test_clipping_by_hand(ratio: float, advantage: float, loss: float, grad: float, clipped: int) -> None:
    got_loss, got_grad, metrics = one(ratio, advantage)
    assert got_loss == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert got_grad == pytest.approx(grad, rel=1e-5, abs=1e-7)
    assert metrics["clipfrac"] == clipped
    assert metrics["ratio_max"] == pytest.approx(ratio, rel=1e-5)


def test_truncated_importance_sampling_by_hand() -> None:
    # pi_old / pi_rollout = 1.5 weighs the token; 5 is cut to the cap; the weight has no gradient of its own
    loss, grad, metrics = one(1.1, 2.0, rollout=math.log(1.5))
    assert (loss, grad) == (pytest.approx(-3.3, rel=1e-5), pytest.approx(-3.3, rel=1e-5))
    assert metrics["tis_clipfrac"] == 0 and metrics["tis_weight"] == pytest.approx(1.5, rel=1e-5)
    loss, grad, metrics = one(1.1, 2.0, rollout=math.log(5.0))
    assert (loss, grad) == (pytest.approx(-4.4, rel=1e-5), pytest.approx(-4.4, rel=1e-5))
    assert metrics["tis_clipfrac"] == 1 and metrics["tis_weight"] == pytest.approx(2.0)
    loss, _, metrics = one(1.1, 2.0, rollout=math.log(5.0), cfg=GRPOConfig(tis_cap=None))
    assert loss == pytest.approx(-2.2, rel=1e-5) and metrics["tis_weight"] == 1


def random_batch(b: int = 6, t: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    lp = -torch.rand(b, t, generator=g) * 3
    batch = {
        "mask": (torch.rand(b, t, generator=g) > 0.3).float(),
        "advantages": torch.randn(b, generator=g),
        "old_logprobs": lp + torch.randn(b, t, generator=g) * 0.3,
        "rollout_logprobs": lp + torch.randn(b, t, generator=g) * 0.5,
        "ref_logprobs": lp + torch.randn(b, t, generator=g) * 0.5,
    }
    return lp, torch.rand(b, t, generator=g), batch


def test_whole_batch_by_hand_loop() -> None:
    cfg = GRPOConfig(clip_low=0.2, clip_high=0.28, tis_cap=1.5, kl_coef=0.1)
    lp, entropy, batch = random_batch()
    total = kl_total = ratio_max = 0.0
    counts = {"tokens": 0, "clipfrac": 0, "tis_clipfrac": 0}
    for i in range(lp.shape[0]):
        for j in range(lp.shape[1]):
            if batch["mask"][i, j] == 0:
                continue
            p, o, r, f = (x[i, j].item() for x in (lp, *(batch[f"{k}_logprobs"] for k in ("old", "rollout", "ref"))))
            a, ratio, w = batch["advantages"][i].item(), math.exp(p - o), math.exp(o - r)
            clipped = min(max(ratio, 0.8), 1.28)
            kl = math.exp(f - p) - (f - p) - 1
            total += -min(w, 1.5) * min(ratio * a, clipped * a) + 0.1 * kl
            kl_total += kl
            ratio_max = max(ratio_max, ratio)
            counts["tokens"] += 1
            counts["clipfrac"] += (ratio > 1.28 and a > 0) or (ratio < 0.8 and a < 0)
            counts["tis_clipfrac"] += w > 1.5
    loss, metrics = grpo_loss(lp, entropy, batch, cfg)
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert metrics["loss"].item() == pytest.approx(total, rel=1e-5)
    assert metrics["ref_kl"].item() == pytest.approx(kl_total, rel=1e-5)
    assert metrics["ratio_max"].item() == pytest.approx(ratio_max, rel=1e-5)
    assert metrics["entropy"].item() == pytest.approx((entropy * batch["mask"]).sum().item(), rel=1e-5)
    assert {k: metrics[k].item() for k in counts} == counts and counts["clipfrac"] > 0 and counts["tis_clipfrac"] > 0


def test_gradient_agrees_with_finite_differences() -> None:
    cfg = GRPOConfig(kl_coef=0.1)
    lp, entropy, batch = random_batch(3, 4)
    batch = {k: v.double() for k, v in batch.items()}
    x = lp.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: grpo_loss(v, entropy.double(), batch, cfg)[0], (x,))


def test_without_old_logprobs_it_is_reinforce() -> None:
    lp, entropy, batch = random_batch()
    del batch["old_logprobs"]
    lp.requires_grad_()
    loss, metrics = grpo_loss(lp, entropy, batch, GRPOConfig(tis_cap=None))
    loss.backward()
    torch.testing.assert_close(lp.grad, -batch["advantages"][:, None] * batch["mask"])
    assert metrics["clipfrac"] == 0 and metrics["policy_kl"] == 0


def test_masked_tokens_never_matter() -> None:
    lp, entropy, batch = random_batch()
    off = batch["mask"] == 0
    reference, want = grpo_loss(lp, entropy, batch, CFG)
    for poison in (float("nan"), float("inf"), 1e30):
        bad = {k: torch.where(off, poison, v) if k.endswith("logprobs") else v for k, v in batch.items()}
        x = torch.where(off, poison, lp).requires_grad_()
        loss, metrics = grpo_loss(x, torch.where(off, poison, entropy), bad, CFG)
        loss.backward()
        assert loss.item() == reference.item()
        assert {k: v.item() for k, v in metrics.items()} == {k: v.item() for k, v in want.items()}
        assert x.grad is not None and (x.grad[off] == 0).all() and torch.isfinite(x.grad).all()


@pytest.mark.parametrize("sizes", [(1, 5), (2, 2, 2), (4, 2)])
def test_splitting_the_batch_changes_nothing(sizes: tuple[int, ...]) -> None:
    # ranks and micro-batches hold different token counts; sums divided by the global count are the whole's
    lp, entropy, batch = random_batch()
    whole = lp.clone().requires_grad_()
    loss, metrics = grpo_loss(whole, entropy, batch, CFG)
    (loss / metrics["tokens"]).backward()
    split = lp.clone().requires_grad_()
    parts, start, total = [], 0, 0.0
    for n in sizes:
        rows = slice(start, start + n)
        part, found = grpo_loss(split[rows], entropy[rows], {k: v[rows] for k, v in batch.items()}, CFG)
        (part / metrics["tokens"]).backward()
        parts.append(found)
        total += part.item()
        start += n
    torch.testing.assert_close(split.grad, whole.grad)
    assert total == pytest.approx(loss.item(), rel=1e-6)
    for name, value in metrics.items():
        each = torch.stack([p[name] for p in parts])
        torch.testing.assert_close(each.max() if name.endswith("_max") else each.sum(), value)


def test_kl_needs_a_reference() -> None:
    lp, entropy, batch = random_batch()
    del batch["ref_logprobs"]
    with pytest.raises(QuadsError, match="reference log-probs"):
        grpo_loss(lp, entropy, batch, GRPOConfig(kl_coef=0.1))


@pytest.mark.parametrize("bad", [{"clip_low": 1.0}, {"clip_high": -0.1}, {"tis_cap": 0.0}, {"kl_coef": -1.0}])
def test_bad_options_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(QuadsError, match="not valid"):
        GRPOConfig(**bad)


def test_advantages_by_hand() -> None:
    rewards = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.3, 0.3, 0.3, 0.3, 0.0, 0.0, 0.0, 1.0])
    got = group_advantages(rewards, 4).view(3, 4)
    s = math.sqrt(1 / 3)  # sample std of 0 1 0 1
    torch.testing.assert_close(got[0], torch.tensor([-0.5, 0.5, -0.5, 0.5]) / s)
    assert (got[1] == 0).all()  # all alike: exactly 0, in spite of 0.3's rounding
    torch.testing.assert_close(got[2], torch.tensor([-0.25, -0.25, -0.25, 0.75]) / 0.5)
    plain = group_advantages(rewards, 4, std_norm=False).view(3, 4)
    torch.testing.assert_close(plain[2], torch.tensor([-0.25, -0.25, -0.25, 0.75]))
    assert (group_advantages(rewards, 1) == 0).all()
    with pytest.raises(ValueError, match="groups of 5"):
        group_advantages(rewards, 5)


@given(st.lists(st.floats(0, 1, width=32), min_size=8, max_size=8))
@settings(max_examples=200, deadline=None)
def test_advantages_are_centred_and_scaled(values: list[float]) -> None:
    got = group_advantages(torch.tensor(values), 4).view(2, 4)
    assert torch.isfinite(got).all()
    assert got.sum(1).abs().max() < 1e-2
    for row, raw in zip(got, torch.tensor(values).view(2, 4), strict=True):
        if raw.max() - raw.min() > 1e-3:
            assert row.std() == pytest.approx(1.0, abs=1e-3)


def test_k3_is_an_unbiased_kl() -> None:
    p = torch.tensor([0.5, 0.3, 0.2])
    q = torch.tensor([0.4, 0.4, 0.2])
    values = k3(p.log(), q.log())
    assert (values >= 0).all() and k3(p.log(), p.log()).abs().max() == 0
    torch.testing.assert_close((p * values).sum(), (p * (p / q).log()).sum())


def test_supervised_loss() -> None:
    lp, entropy, batch = random_batch()
    x = torch.where(batch["mask"] == 0, float("nan"), lp).requires_grad_()
    loss, metrics = supervised_loss(x, entropy, batch)
    loss.backward()
    torch.testing.assert_close(x.grad, -batch["mask"])
    assert loss.item() == pytest.approx(-(lp * batch["mask"]).sum().item(), rel=1e-6)
    assert metrics["tokens"].item() == batch["mask"].sum().item()
