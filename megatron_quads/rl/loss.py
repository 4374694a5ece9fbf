"""The losses: GRPO for the RL steps, cross-entropy for the supervised warm-up.

Both return SUMS over tokens. The caller divides by the number of masked tokens of the whole step (all micro-batches,
all data-parallel ranks), so how a batch is split never changes the result. All tensors are aligned with
``tokens[:, 1:]``: column t speaks about the token at position t + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import QuadsError

MAX_SUFFIX = "_max"  # metrics with this ending are reduced with max, all others are summed


@dataclass(frozen=True)
class GRPOConfig:
    """Options of ``grpo_loss``."""

    clip_low: float = 0.2
    """Ratios below 1 - clip_low are clipped."""
    clip_high: float = 0.28
    """Ratios above 1 + clip_high are clipped (DAPO's clip-higher, arXiv 2503.14476)."""
    tis_cap: float | None = 2.0
    """Upper bound of the truncated importance weight pi_old / pi_rollout; None turns the correction off."""
    kl_coef: float = 0.0
    """Weight of the k3 estimate of KL(policy, reference); above 0 the batch must hold ``ref_logprobs``."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip_low < 1.0 or self.clip_high < 0.0:
            raise QuadsError(
                f"clip range {self.clip_low}, {self.clip_high} is not valid",
                where="--clip-low, --clip-high",
                do="give 0 <= low < 1 and high >= 0",
            )
        if (self.tis_cap is not None and self.tis_cap <= 0) or self.kl_coef < 0:
            raise QuadsError(
                f"tis cap {self.tis_cap} or KL weight {self.kl_coef} is not valid",
                where="--tis-cap, --kl-coef",
                do="give a cap above 0 and a weight of 0 or more",
            )


def group_advantages(rewards: Tensor, group: int, *, std_norm: bool = True, eps: float = 1e-6) -> Tensor:
    """Rewards fp32 [b], each ``group`` neighbours answering one prompt -> advantages fp32 [b].

    (r - mean) / std within the group (sample std; arXiv 2402.03300), or r - mean without ``std_norm``. A group whose
    rewards are all equal gets exactly 0. Raises ValueError when b is not a multiple of ``group``.
    """
    if rewards.dim() != 1 or group < 1 or rewards.numel() % group:
        raise ValueError(f"{tuple(rewards.shape)} rewards do not form groups of {group}")
    r = rewards.float().view(-1, group)
    centred = r - r.mean(1, keepdim=True)
    spread = (r.amax(1, keepdim=True) - r.amin(1, keepdim=True)) > eps
    if std_norm and group > 1:
        centred = centred / r.std(1, keepdim=True).clamp(min=eps)
    return torch.where(spread, centred, 0.0).view(-1)


def grpo_loss(
    logprobs: Tensor, entropy: Tensor, batch: dict[str, Tensor], cfg: GRPOConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy-gradient loss with truncated importance sampling, summed over response tokens.

    logprobs, entropy [b, t] fp32, of the policy being trained. ``batch`` holds, fp32:
        mask             [b, t]  1 on response tokens
        advantages       [b]     one per response
        rollout_logprobs [b, t]  what the rollout engine reported when it sampled
        old_logprobs     [b, t]  optional: the trainer's log-probs before this step's first update. Without it the
                                 update is the step's only one and the ratio is 1 (its gradient is not).
        ref_logprobs     [b, t]  only with ``kl_coef`` > 0

    Per token: -w * min(ratio * A, clip(ratio) * A) + kl_coef * k3, with ratio = pi / pi_old and
    w = min(pi_old / pi_rollout, tis_cap), which corrects for sampling from another engine and carries no gradient.

    Returns the sum (scalar fp32) and detached sums: tokens, loss, clipfrac, tis_clipfrac, tis_weight, policy_kl
    (k3 to pi_old), entropy, ref_kl (with KL), and ratio_max. Values under mask 0 never matter, NaN included.
    Raises QuadsError when ``ref_logprobs`` is needed and absent.
    """
    mask = batch["mask"].bool()
    lp = torch.where(mask, logprobs, 0.0)
    old = torch.where(mask, batch["old_logprobs"], 0.0) if "old_logprobs" in batch else lp.detach()
    advantage = batch["advantages"].unsqueeze(1)

    ratio = torch.exp(lp - old)
    clipped = ratio.clamp(1.0 - cfg.clip_low, 1.0 + cfg.clip_high)
    surrogate = torch.minimum(ratio * advantage, clipped * advantage)
    is_clipped = clipped * advantage < ratio * advantage

    weight = torch.exp(old - torch.where(mask, batch["rollout_logprobs"], 0.0))
    is_truncated = torch.zeros_like(mask)
    if cfg.tis_cap is None:
        weight = torch.ones_like(weight)
    else:
        is_truncated = weight > cfg.tis_cap
        weight = weight.clamp(max=cfg.tis_cap)
    per_token = -weight * surrogate
    metrics = {
        "tokens": mask.sum(),
        "clipfrac": (is_clipped & mask).sum(),
        "tis_clipfrac": (is_truncated & mask).sum(),
        "tis_weight": _sum(weight, mask),
        "policy_kl": _sum(k3(lp, old), mask),
        "entropy": _sum(entropy, mask),
        "ratio_max": torch.where(mask, ratio, 0.0).max(),
    }
    if cfg.kl_coef > 0:
        if "ref_logprobs" not in batch:
            raise QuadsError(
                "a KL weight needs reference log-probs", where="--kl-coef", do="set it to 0 or give a reference"
            )
        kl = k3(lp, torch.where(mask, batch["ref_logprobs"], 0.0))
        per_token = per_token + cfg.kl_coef * kl
        metrics["ref_kl"] = _sum(kl, mask)
    total = _sum(per_token, mask)
    metrics["loss"] = total
    return total, {name: value.detach().float() for name, value in metrics.items()}


def supervised_loss(logprobs: Tensor, entropy: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy summed over masked tokens; logprobs, entropy and ``batch["mask"]`` [b, t]. Metrics as sums."""
    mask = batch["mask"].bool()
    total = -_sum(logprobs, mask)
    metrics = {"tokens": mask.sum(), "loss": total, "entropy": _sum(entropy, mask)}
    return total, {name: value.detach().float() for name, value in metrics.items()}


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = other - logprobs: Schulman's unbiased, non-negative estimate of KL(policy, other)."""
    d = other - logprobs
    return torch.exp(d) - d - 1.0


def _sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum()
