"""NVFP4 quantise / dequantise. One contract (``reference.py``) and one front end that picks the kernels by device."""

from .frontend import grouped, grouped_amax, grouped_qdq, grouped_quantize, has_kernels, qdq, quantize
from .reference import (
    BLOCK,
    amax,
    block_scale,
    decode,
    dequantize,
    encode,
    pack,
    row_scale,
    swizzle,
    tensor_scale,
    unpack,
    unswizzle,
)

__all__ = [
    "BLOCK",
    "amax",
    "block_scale",
    "decode",
    "dequantize",
    "encode",
    "grouped",
    "grouped_amax",
    "grouped_qdq",
    "grouped_quantize",
    "has_kernels",
    "pack",
    "qdq",
    "quantize",
    "row_scale",
    "swizzle",
    "tensor_scale",
    "unpack",
    "unswizzle",
]
