"""A byte and FLOP model of one decoding step: how fast could a rollout be at most, and where its time must go.

    python -m megatron_quads.byte_model docs/results/rollout_h200.json

Per GEMM: time = max(bytes / bandwidth, FLOPs / peak), summed; nothing else costs anything. So it is a lower bound on time:
no launch, routing, attention arithmetic, sampling or host time. Assumed: every token picks its experts uniformly and
independently; an expert that is hit is read once per GEMM, whole; activations stay in the caches; KV cache in BF16 is read
once a step. ``Machine`` holds the peaks, with where each is from.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from .errors import QuadsError


@dataclass(frozen=True)
class Machine:
    """Peaks of one GPU: dense, without structured sparsity. ``source`` says which are measured and which are claims."""

    name: str
    bytes_per_s: float
    flops: dict[str, float]  # by the operands' type
    source: str


H200 = Machine(
    "H200", 4.44e12, {"bf16": 989e12, "fp8": 1979e12},
    "bandwidth: pure read measured on one H200 (docs/kernels.md), the data sheet says 4.8e12; FLOPs: data sheet, dense",
)  # fmt: skip
B200 = Machine(
    "B200", 7.7e12, {"bf16": 2250e12, "fp8": 4500e12, "fp4": 9000e12},
    "all from NVIDIA's HGX B200 table (7.7 TB/s; 4.5, 9 and 18 PFLOPS with sparsity, halved); none measured by us",
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """Qwen3-30B-A3B's shapes with ``layers`` layers."""

    layers: int = 48
    hidden: int = 2048
    inter: int = 768
    experts: int = 128
    top_k: int = 8
    q_heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    vocab: int = 151936


@dataclass(frozen=True)
class Arm:
    """How the experts are stored and multiplied. Everything else is BF16."""

    weight_bytes: float  # per expert weight
    operands: str  # which peak
    ratio: float = 0.0  # RAC's share of K: that many more FLOPs
    reread: float = 0.0  # share of the weight bytes that the residual reads from memory again


NVFP4 = 0.5 + 1 / 16  # codes and E4M3 block scales
HOPPER = {
    "bf16": Arm(2, "bf16"), "fp8": Arm(1, "fp8"), "w4a16": Arm(NVFP4, "bf16"),
    # the residual is added to the activation before the GEMM: neither bytes nor FLOPs
    "quads-0": Arm(NVFP4, "bf16"), "quads-0.25": Arm(NVFP4, "bf16"), "quads-0.5": Arm(NVFP4, "bf16"), "quads-1": Arm(NVFP4, "bf16"),
}  # fmt: skip
BLACKWELL = {
    "bf16": Arm(2, "bf16"), "fp8": Arm(1, "fp8"), "w4a4": Arm(NVFP4, "fp4"),
    "quads-0.5, W_S from L2": Arm(NVFP4, "fp4", 0.5), "quads-0.5, W_S from memory": Arm(NVFP4, "fp4", 0.5, 0.5),
    "quads-1, W_S from memory": Arm(NVFP4, "fp4", 1.0, 1.0),
}  # fmt: skip


def experts_hit(model: Model, tokens: int) -> float:
    """Expected number of a layer's experts that at least one of ``tokens`` picks."""
    return model.experts * (1 - (1 - model.top_k / model.experts) ** tokens)


def step_s(machine: Machine, model: Model, arm: Arm, tokens: int, context: int, sequences: int) -> float:
    """Seconds of one forward pass over ``tokens`` tokens of ``sequences`` sequences, ``context`` cached tokens each."""

    def gemm(weights: float, per_weight: float, flops: float, operands: str) -> float:
        return max(weights * per_weight / machine.bytes_per_s, flops / machine.flops[operands])

    one = 3 * model.hidden * model.inter
    hit = experts_hit(model, tokens)
    experts = gemm(
        hit * one, arm.weight_bytes * (1 + arm.reread), 2 * tokens * model.top_k * one * (1 + arm.ratio), arm.operands
    )
    heads = (2 * model.q_heads + 2 * model.kv_heads) * model.head_dim
    dense = model.hidden * (heads + model.experts)  # q, k, v, o and the router
    attention = gemm(dense, 2, 2 * tokens * dense, "bf16")
    cache = sequences * context * 2 * model.kv_heads * model.head_dim * 2 / machine.bytes_per_s
    head = gemm(model.vocab * model.hidden, 2, 2 * sequences * model.vocab * model.hidden, "bf16")
    return model.layers * (experts + attention + cache) + head


def run_s(machine: Machine, model: Model, arm: Arm, batch: int, tokens_in: int, tokens_out: int) -> float:
    """Seconds of a benchmark round: one prefill that gives the first token, then a step for each further one."""
    prefill = step_s(machine, model, arm, batch * tokens_in, 0, batch)
    steps = (step_s(machine, model, arm, batch, tokens_in + i, batch) for i in range(1, tokens_out))
    return prefill + sum(steps)


@dataclass(frozen=True)
class Checked:
    """One measured row: milliseconds a round, the model's bound, and how much of the measured time it explains."""

    arm: str
    batch: int
    measured_ms: float
    bound_ms: float

    @property
    def explained(self) -> float:
        """bound / measured: above 1 would refute the model."""
        return self.bound_ms / self.measured_ms


def check(results: Path) -> list[Checked]:
    """The bound beside each row of ``quads bench rollout``'s JSON from an H200 that the model covers."""
    try:
        found = json.loads(results.read_text())
        rows = [(r["arm"], r["batch"], r["tok_s"]) for r in found["rows"] if r["arm"] in HOPPER]
        model, tokens_in, tokens_out = Model(layers=found["layers"]), found["tokens_in"], found["tokens_out"]
        device = found["device"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise QuadsError(f"not a rollout benchmark: {e}", where=str(results), do="run quads bench rollout") from e
    if "H200" not in device:
        raise QuadsError(f"measured on {device}", where=str(results), do="the model has the peaks of an H200 only")
    return [
        Checked(arm, batch, 1e3 * batch * tokens_out / tok_s, 1e3 * run_s(H200, model, HOPPER[arm], batch, tokens_in, tokens_out))
        for arm, batch, tok_s in rows
    ]  # fmt: skip


def saved_by_fp8(rows: list[Checked]) -> dict[int, tuple[float, float]]:
    """Per batch (measured, modelled) milliseconds a round that FP8 weights save over BF16: fixed costs cancel."""
    at = {(r.arm, r.batch): r for r in rows}
    out = {}
    for batch in sorted({r.batch for r in rows}):
        bf16, fp8 = at["bf16", batch], at["fp8", batch]
        out[batch] = (bf16.measured_ms - fp8.measured_ms, bf16.bound_ms - fp8.bound_ms)
    return out


def main(results: Path) -> None:
    """Print the check on the H200, then the bounds for a B200."""
    rows = check(results)
    print(f"{H200.name}: {H200.source}")
    for r in rows:
        print(
            f"  {r.arm:10} batch {r.batch:3}: {r.measured_ms:6.1f} ms a round, bound {r.bound_ms:6.1f} ({r.explained:.2f})"
        )
    for batch, (measured, modelled) in saved_by_fp8(rows).items():
        print(f"  FP8 saves at batch {batch}: {measured:.1f} ms measured, {modelled:.1f} modelled")
    print(
        f"{B200.name}: {B200.source}\n  ms of one step at a context of 1,024, all 48 layers; lower bounds, not predictions"
    )
    for name, arm in BLACKWELL.items():
        cells = (f"{1e3 * step_s(B200, Model(), arm, batch, 1024, batch):7.2f}" for batch in (16, 64, 256, 1024))
        print(f"  {name:28} " + " ".join(cells))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
