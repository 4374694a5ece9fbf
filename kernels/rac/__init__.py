"""Residual activation compensation. One contract (``reference.py``) and one front end that picks kernels by device."""

from .blocks import Blocks, Selection
from .frontend import grouped_gemm, qdq_with_residual, quantize_with_residual
from .reference import Quantized, block_mask, residual, silu_and_mul

__all__ = [
    "Blocks",
    "Quantized",
    "Selection",
    "block_mask",
    "grouped_gemm",
    "qdq_with_residual",
    "quantize_with_residual",
    "residual",
    "silu_and_mul",
]
