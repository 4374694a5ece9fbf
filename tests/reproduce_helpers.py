"""A reproduction's logs with known contents, written as the driver leaves them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_quads.reproduce.config import Config, check
from megatron_quads.reproduce.folder import Root

STEPS, HELDOUT = 60, 64
ARMS: dict[str, dict[str, Any]] = {
    "bf16": {"title": "BF16", "recipe": "bf16"},
    "naive": {"title": "naive | NVFP4", "recipe": "naive"},
    "qat": {"title": "QAT", "recipe": "qat"},
    "uniform": {"title": "QUADS as in the paper", "recipe": "quads", "ratio": 0.5},
    "ours": {"title": "QUADS, ours", "recipe": "quads", "ratio": 0.5, "policy": "adaptive", "sort": True},
    "all": {"title": "QUADS 100 %", "recipe": "quads", "ratio": 1.0},
    "fp8": {"title": "FP8", "recipe": "fp8", "unavailable": "no such rollout"},
}
GAPS = {"bf16": 0.004, "naive": 0.03, "qat": 0.02, "uniform": 0.014, "ours": 0.01, "all": 0.006}
WARM = "0123456789abcdef"
GAP = "train_rollout_logprob_abs_diff"


def config(**over: Any) -> Config:
    """Settings of the logs."""
    values: dict[str, Any] = {
        "scale": "synthetic",
        "task": "spell_backward",
        "warm": {"steps": 10, "lr": 1e-3, "noise": 0.1},
        "rl": {
            "steps": STEPS,
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "max_new_tokens": 8,
            "lr": 1e-4,
            "heldout": HELDOUT,
            "eval_every": 20,
        },
        "arms": copy.deepcopy(ARMS),
    }
    return check({**values, **over}, where="test")


def make_root(
    path: Path,
    gaps: Mapping[str, float] = GAPS,
    *,
    seeds: int = 2,
    noise: float = 0.1,
    study: bool = True,
    **over: Any,
) -> Root:
    """Every arm of ``gaps`` done, its gap around that mean; ``noise``: of a step, as a share of it."""
    root = Root.open(path, config(**over))
    (path / "warm.json").write_text(json.dumps({"weights": WARM, "steps": 10, "pass@1": 0.4}))
    for arm, gap in gaps.items():
        for seed in range(seeds):
            write_run(root, arm, seed, gap, noise=noise)
    if study:
        (path / "study").mkdir(exist_ok=True)
        root.study.write_text(json.dumps(study_values(root.config)))
    return root


def write_run(root: Root, arm: str, seed: int, gap: float, *, noise: float = 0.1, steps: int = STEPS) -> Path:
    """One run up to ``steps``."""
    run = root.run(arm, seed)
    run.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng([seed, *arm.encode()])
    bound = {"arm": arm, "seed": seed, "config": root.config.arm_hash(arm), "warm": WARM, "rac": None}
    (run / "arm.json").write_text(json.dumps({**bound, "machine": {"device": "a CPU", "torch": "2.13.0"}}))
    state = "done" if steps == STEPS else "running"
    (run / "status.json").write_text(json.dumps({"state": state, "step": steps}))
    rows = []
    for step, z in enumerate(generator.standard_normal(steps), 1):
        row = {"step": step, f"{GAP}/mean": gap * (1 + noise * z), f"{GAP}/max": 50 * gap, "reward": 0.8 + 0.01 * z}
        row |= {"tokens": 100.0 + step % 3, "tokens_per_s": 5000.0, "step_s": 0.5, "entropy": 0.3}
        rows.append({**row, "train_rollout_kl": gap**2, "ess_ratio": 1 - gap, "weight_bits_mismatched": 0.0})
    write_rows(run / "metrics.jsonl", rows)
    at = [step for step in range(0, steps + 1, 20)]
    write_rows(run / "evals.jsonl", [{"step": s, "rewards": rewards(24 + s // 5)} for s in at])
    bits = 7 if arm == "naive" else 0
    write_rows(run / "audit.jsonl", [refit(step, bits) for step in range(steps + 1)])
    return run


def rewards(solved: int) -> list[float]:
    """Of the held-out problems, with so many full marks."""
    return [1.0] * solved + [0.875] * (HELDOUT - solved)


def refit(step: int, bits: int = 0) -> dict[str, Any]:
    """A row of audit.jsonl."""
    counts = {"step": step, "tensors": 4, "tensors_differing": int(bits > 0), "bits_mismatched": bits}
    return {**counts, "trainer": f"t{step}", "rollout": f"r{step}" if bits else f"t{step}"}


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    """As JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rewrite(file: Path, change: Any) -> None:
    """Apply ``change(row)`` to every row of a JSON lines file."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        change(row)
    write_rows(file, rows)


def study_values(given: Config) -> dict[str, Any]:
    """study.json: the gap falls with the ratio, symmetric is the worse in both layers."""
    ratios = [
        (r, p, s, 0.01 * (2 - r - 0.2 * s))
        for r in (0.25, 0.5, 1.0)
        for p, s in (("uniform", False), ("adaptive", True))
    ]
    rows = [
        {"recipe": "qat", "ratio": 0.0, "policy": "uniform", "sorted": False, "mean": 0.02, "max": 1.0, "p99.9": 0.5}
    ]
    rows += [
        {
            "recipe": "quads",
            "ratio": r,
            "policy": p,
            "sorted": s,
            "mean": g,
            "max": 50 * g,
            "p99.9": 20 * g,
            "flop_share": r,
        }
        for r, p, s, g in ratios
    ]
    drift = [
        {"layer": layer, "drift": d, "engines alone": d, "symmetric": 2 * d + 0.1, "asymmetric": d + 0.1}
        for d in (0.0, 0.01)
        for layer in (0, 1)
    ]
    split = {
        "tokens": 500,
        "rows": [{"part": "weight error", "models": "raw | W4A16", "mean": 0.02, "max": 1.0, "p999": 0.5, "bias": 0.0}],
        "layers": [{"layer": i, "weight": 0.1, "activation": 0.09, "activation_rac": 0.05} for i in (0, 1)],
    }
    return {"warm": WARM, "config": given.shared_hash, "tokens": 500, "ratios": rows, "drift": drift, "split": split}
