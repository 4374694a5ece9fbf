"""A fixed list of weights that is quantised, or decoded, again and again: its tables are made once.

What ``frontend.grouped_amax``, ``grouped_qdq``, ``grouped_quantize`` and ``reference.dequantize`` compute, without their
look at every tensor at every call, which for hundreds of tensors takes the host longer than the GPU needs. The caller
answers for the tensors: they must stay where they are for as long as the plan is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import frontend, reference


class Plan:
    """amax, and DQ(Q(x)) into ``out`` or the packed form into ``codes`` and ``s8``, of contiguous weights [..., K].

    ``xs``: bf16, fp16 or fp32, one dtype and device, each with its own FP32 scale. ``out``: as xs. ``codes``: uint8
    [..., K/2], ``s8``: e4m3 [..., K/16]. Lists that are not wanted are empty. ValueError as ``frontend.grouped``.
    """

    def __init__(
        self,
        xs: Sequence[Tensor],
        *,
        out: Sequence[Tensor] = (),
        codes: Sequence[Tensor] = (),
        s8: Sequence[Tensor] = (),
    ) -> None:
        frontend._check_list(xs, "xs")
        frontend._check_list(out, "out")
        self.xs, self.out, self.codes, self.s8 = list(xs), list(out), list(codes), list(s8)
        self._tables: Any = None
        starts = [t.data_ptr() for t in (*xs, *out)]
        whole = all(a % 8 == 0 for a in starts)  # values are read and written in pairs
        if frontend.has_kernels(xs[0].device) and whole and all(x.numel() for x in xs):
            kernels = frontend._kernels()
            lists = [self.out or None, self.codes or None, self.s8 or None]
            rows = [
                (x.data_ptr(), *(0 if group is None else group[i].data_ptr() for group in lists), x.numel() // 16, i)
                for i, x in enumerate(xs)
            ]
            device = xs[0].device
            amax_rows = [(row[0], 0, 0, 0, *row[4:]) for row in rows]
            self._tables = (
                kernels.amax_table(amax_rows, xs[0].dtype, device),
                kernels.grouped_table(rows, bool(out), bool(codes), device),
            )
            torch.cuda.current_stream(device).synchronize()  # any stream may use the tables from now on

    def amax(self) -> Tensor:
        """fp32 [number of weights]: the largest magnitudes. NaN and Inf come through."""
        if self._tables is None:
            return frontend.grouped_amax(self.xs)
        out = torch.zeros(len(self.xs), dtype=torch.float32, device=self.xs[0].device)
        frontend._kernels().run_amax(self._tables[0], self.xs[0].dtype, out)
        return out

    def write(self, amax: Tensor) -> None:
        """Quantise under ``amax`` fp32 [number of weights] into the plan's tensors."""
        if self._tables is not None:
            table, tiling = self._tables[1]
            dtype = self.xs[0].dtype
            to = self.out[0].dtype if self.out else dtype
            frontend._kernels().run_grouped(table, tiling, amax, dtype, to, bool(self.out), bool(self.codes))
            return
        if self.out:
            frontend.grouped_qdq(self.xs, amax, out=self.out)
        if self.codes:
            codes, s8 = frontend.grouped_quantize(self.xs, amax)
            for kept, made in zip((*self.codes, *self.s8), (*codes, *s8), strict=True):
                kept.copy_(made)


class Decoder:
    """Values into ``out`` [..., K] (bf16, fp16 or fp32) from the packed form of ``Plan``; bitwise ``reference.dequantize``.

    ``first``: of the weights' amax values the first one that belongs to this list.
    """

    def __init__(self, codes: Sequence[Tensor], s8: Sequence[Tensor], out: Sequence[Tensor], first: int) -> None:
        self.codes, self.s8, self.out, self.first = list(codes), list(s8), list(out), first
        self._table: Any = None
        if frontend.has_kernels(out[0].device) and all(t.data_ptr() % 8 == 0 for t in out) and out[0].numel():
            from . import decoding, table

            rows = [
                (0, o.data_ptr(), c.data_ptr(), s.data_ptr(), o.numel() // 16, first + i)
                for i, (c, s, o) in enumerate(zip(codes, s8, out, strict=True))
            ]
            self._table = table.build(rows, decoding.BLOCKS, out[0].device)
            torch.cuda.current_stream(out[0].device).synchronize()

    def run(self, amax: Tensor) -> None:
        """``amax``: that of all weights, fp32."""
        if self._table is not None:
            from . import decoding

            decoding.run(self._table, amax, self.out[0].dtype)
            return
        for i, (codes, s8, out) in enumerate(zip(self.codes, self.s8, self.out, strict=True)):
            scale = reference.tensor_scale(amax[self.first + i])
            out.copy_(reference.dequantize(codes, s8, scale, out.dtype))
