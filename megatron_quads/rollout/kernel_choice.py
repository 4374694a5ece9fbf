"""Which realisation of W4A4 + RAC the rollout's expert GEMMs use. Imports vLLM only in ``choose_here``."""

from __future__ import annotations

import os

from ..errors import QuadsError

VARIABLE = "QUADS_KERNEL"
KERNELS = ("auto", "emulation", "marlin", "native")
MIN_MARLIN = (8, 0)
NATIVE = ((10, 0), (10, 3), (12, 0))  # what the FP4 GEMM is compiled for
CHECKED = (9, 0)  # where it runs too, decoding FP4 in registers


def choose(dtype: str, capability: tuple[int, int] | None, requested: str | None = None) -> str:
    """``emulation`` (PyTorch, any device, eager), ``marlin`` (quantised activations on vLLM's weight-only GEMMs) or
    ``native`` (packed activations on FP4 GEMMs).

    ``dtype``: the engine's, as ``bfloat16``; ``capability``: of the CUDA GPU, None without one. ``requested``, or else
    the variable QUADS_KERNEL, forces one; QuadsError when it cannot run. ``auto`` takes ``native`` where FP4 tensor
    cores are (sm_100, 103, 120), ``marlin`` on other GPUs from sm_80 on. Forced, ``native`` runs on sm_90 as a check.
    """
    wanted = requested or os.environ.get(VARIABLE) or "auto"
    if wanted not in KERNELS:
        raise QuadsError(f"unknown kernel {wanted!r}", where=VARIABLE, do=f"one of {', '.join(KERNELS)}")
    half = dtype in ("bfloat16", "float16")
    found = f"{dtype} on " + (f"sm_{capability[0]}{capability[1]}" if capability else "no CUDA GPU")
    fits = half and capability is not None and capability >= MIN_MARLIN
    native = half and capability in NATIVE
    if wanted == "marlin" and not fits:
        needs = "a CUDA GPU from sm_80 on and bfloat16 or float16"
        raise QuadsError(f"the marlin kernel needs {needs}, not {found}", where=VARIABLE, do="use auto or emulation")
    if wanted == "native" and not (native or (half and capability == CHECKED)):
        needs = "sm_100, 103 or 120 (or sm_90, to check it) and bfloat16 or float16"
        raise QuadsError(f"the native kernel needs {needs}, not {found}", where=VARIABLE, do="use auto")
    if wanted != "auto":
        return wanted
    return "native" if native else "marlin" if fits else "emulation"


def choose_here(dtype: str) -> str:
    """``choose`` on the platform that vLLM runs on: the same answer in its front end and in its workers."""
    from vllm.platforms import current_platform

    found = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return choose(dtype, (found.major, found.minor) if found else None)


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
        "native": "K-augmented FP4 GEMMs on packed weights and activations, both products in one fp32 accumulator",
    }[kernel]
    if kernel == "native":
        return f"quads: {'W4A4 + RAC' if mode == 'rac' else 'W4A4'}; {how}"
    return f"quads: emulates {numerics}; {how}"
