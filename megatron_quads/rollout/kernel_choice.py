"""Which realisation of W4A4 + RAC the rollout's expert GEMMs use. Imports no vLLM."""

from __future__ import annotations

import os

from ..errors import QuadsError

VARIABLE = "QUADS_KERNEL"
KERNELS = ("auto", "emulation", "marlin")
MIN_MARLIN = (8, 0)


def choose(dtype: str, capability: tuple[int, int] | None, requested: str | None = None) -> str:
    """``emulation`` (PyTorch, any device, eager) or ``marlin`` (quantised activations on vLLM's weight-only GEMMs).

    ``dtype``: the engine's, as ``bfloat16``; ``capability``: of the CUDA GPU, None without one. ``requested``, or else
    the variable QUADS_KERNEL, forces one; QuadsError when it cannot run. No native FP4 GEMM is wired in: on Blackwell,
    too, activations are quantised and dequantised exactly, and Marlin multiplies.
    """
    wanted = requested or os.environ.get(VARIABLE) or "auto"
    if wanted not in KERNELS:
        raise QuadsError(f"unknown kernel {wanted!r}", where=VARIABLE, do=f"one of {', '.join(KERNELS)}")
    fits = capability is not None and capability >= MIN_MARLIN and dtype in ("bfloat16", "float16")
    if wanted == "marlin" and not fits:
        raise QuadsError(
            f"the marlin kernel needs a CUDA GPU from sm_80 on and bfloat16 or float16, not {dtype} on {capability}",
            where=VARIABLE,
            do="use auto or emulation",
        )
    return "marlin" if fits and wanted != "emulation" else "emulation"


def describe(kernel: str, mode: str) -> str:
    """One line for the log: which numerics, and what multiplies."""
    numerics = {
        "w4a16": "W4A16: activations unquantised",
        "w4a4": "W4A4: DQ(Q(x)), no residual",
        "rac": "W4A4 + RAC: DQ(Q(x)) + DQ(Q(r_S)), summed in fp32 and rounded once to the engine's dtype",
    }[mode]
    how = {
        "emulation": "PyTorch GEMMs on dequantised weights",
        "marlin": "vLLM's Marlin GEMMs on packed weights (block scales exact, FP32 scale in the epilogue)",
    }[kernel]
    return f"quads: emulates {numerics}; {how}"
