"""The paper's figures (arXiv 2607.15810), to set ours beside: its 25B-A2.8B MoE, 260 GRPO steps, on Blackwell.

Only what is published of it is here; by which statistic over the steps it summarises the largest gap is not known.
Keys are roles of arms (``logs.role``).
"""

from __future__ import annotations

SOURCE = "arXiv 2607.15810"

MAX_GAP = {"naive": 1.3, "paper-50": 0.86, "quads-100": 0.759, "bf16": 0.74}
"""max |log pi_infer - log pi_train|; bf16: what two engines differ by in BF16. All but quads-100 given as about."""

MAX_GAP_AT_RATIO = {0.125: 0.923, 0.25: 0.901, 0.5: 0.854, 0.75: 0.812, 1.0: 0.759}
"""The same, by share of the channels that get residual compensation."""

PASS_AT_1 = {"bf16": 73.15, "fp8": 72.88, "naive": 51.37, "qat": 71.1, "paper-50": 72.86}
"""Mean of LiveCodeBench, HMMT25, AIME24 and AIME25, %, after RL."""

NAIVE_COLLAPSE_STEP = 150
"""Naive NVFP4 RL collapses after about that many steps of 260."""

THROUGHPUT_OVER_FP8 = 0.16
"""Rollout tokens/s of QUADS above FP8's, about."""
