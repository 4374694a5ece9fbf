"""Digests of weights, computed where they lie: how trainer and rollout prove after each refit that they hold equal bits.

A cryptographic hash would have to move every weight to the host (54 GiB for the experts of Qwen3-30B-A3B, on both sides).
Here a tensor's bytes, as int32 words w[i, j] in rows of 1,024, give twice

    sum over i, j of r[i] * c[j] * w[i, j]   modulo 2^64

with fixed pseudo-random odd r and c. A change of one word always changes both sums; changes of several words leave both
as they are with a chance of at most 2^-66 (each sum 2^-33 at worst, when only top bits differ). It guards against faults,
not against an adversary. Integer sums do not depend on order, so every device gives the same digest.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import QuadsError

FORM = "w1"  # of a digest: others cannot be compared with it
ROW = 1024
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64's
_SUMS = 2


class Digests:
    """Collects digests by name on the devices; ``finish`` waits for them once."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sizes: list[int] = []
        self._sums: list[Tensor] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Queue the digest of a tensor's contiguous bytes; the tensor may change afterwards (on the same stream)."""
        self._names.append(name)
        self._sizes.append(tensor.nbytes)
        self._sums.append(_sums(tensor))

    def finish(self) -> dict[str, str]:
        """Name -> digest, of all that was added."""
        if not self._names:
            return {}
        device = self._sums[0].device
        values = torch.stack([s.to(device) for s in self._sums]).tolist()
        return {
            name: f"{FORM}:{size:x}:" + "".join(f"{v % 2**64:016x}" for v in found)
            for name, size, found in zip(self._names, self._sizes, values, strict=True)
        }


def tensor_digest(tensor: Tensor) -> str:
    """Digest of a tensor's contiguous bytes; equal for equal bytes on any device, whatever shape and dtype."""
    one = Digests()
    one.add("", tensor)
    return one.finish()[""]


def require_same_form(digests: Mapping[str, str], *, where: str) -> None:
    """QuadsError when another version of this package made them: then unequal does not mean different weights."""
    for digest in digests.values():
        if not digest.startswith(f"{FORM}:"):
            raise QuadsError(
                f"the rollout's digests are of another form than {FORM}",
                where=where,
                do="install the same megatron-quads where vLLM runs",
            )


def differing_bits(a: Tensor, b: Tensor) -> int:
    """Bits in which two tensors of one shape and dtype differ; ValueError when they are not. Counted on the host."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"{a.dtype}{tuple(a.shape)} and {b.dtype}{tuple(b.shape)} are not comparable")
    x, y = (t.detach().contiguous().cpu().view(-1).view(torch.uint8) for t in (a, b))
    table = torch.tensor([i.bit_count() for i in range(256)], dtype=torch.int64)
    return int(table[(x ^ y).int()].sum())


def _sums(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.numel() % 4:
        flat = F.pad(flat, (0, -flat.numel() % 4))
    if flat.storage_offset() % 4:
        flat = flat.clone()
    words = flat.view(torch.int32)
    whole = words.numel() // ROW
    rows, rest = words[: whole * ROW].view(whole, ROW), words[whole * ROW :]
    columns, places = _columns(tensor.device), _odd(torch.arange(whole + 1, device=tensor.device))
    out = []
    for c in columns:
        by_row = torch.cat([_rows(rows, c), (rest * c[: rest.numel()]).sum().view(1)])
        out.append((by_row * places).sum())
        places = _odd(places)
    return torch.stack(out)


def _rows(rows: Tensor, c: Tensor) -> Tensor:
    """int64 [R]: rows [R, ROW] int32 times c [ROW] int64, wrapping around."""
    if rows.device.type == "cpu":  # ten times as fast as torch's, which writes every product
        return torch.from_numpy(np.einsum("ij,j->i", rows.numpy(), c.numpy()))
    return (rows * c).sum(1)


@functools.cache
def _columns(device: torch.device) -> tuple[Tensor, ...]:
    """int64 [ROW] of odd weights for each sum."""
    made = _odd(torch.arange(_SUMS * ROW, device=device) + (1 << 40))
    return tuple(made.view(_SUMS, ROW).unbind())


def _odd(at: Tensor) -> Tensor:
    """Pseudo-random odd int64 of int64 positions: SplitMix64's finaliser (with arithmetic shifts)."""
    z = (at + 1) * _signed(_GOLDEN)
    z = (z ^ (z >> 30)) * _signed(_MIX1)
    z = (z ^ (z >> 27)) * _signed(_MIX2)
    return (z ^ (z >> 31)) | 1


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
