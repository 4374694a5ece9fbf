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
from .kernels.nvfp4 import has_kernels

FORM = "w1"  # of a digest: others cannot be compared with it
ROW = 1024
SLAB = 4096  # digests that are read from a device together
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64's
_SUMS = 2


class Digests:
    """Collects digests by name on the devices; ``finish`` waits for them. On a GPU a tensor costs one launch."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sizes: list[int] = []
        self._slabs: list[Tensor] = []  # int64 [SLAB, _SUMS] each, filled in order
        self._used: list[int] = []  # rows of each slab

    def add(self, name: str, tensor: Tensor) -> None:
        """Queue the digest of a tensor's contiguous bytes; the tensor may change afterwards (on the same stream)."""
        if not self._slabs or self._used[-1] == SLAB or self._slabs[-1].device != tensor.device:
            self._slabs.append(torch.zeros(SLAB, _SUMS, dtype=torch.int64, device=tensor.device))
            self._used.append(0)
        _add_sums(tensor, self._slabs[-1][self._used[-1]])
        self._used[-1] += 1
        self._names.append(name)
        self._sizes.append(tensor.nbytes)

    def finish(self) -> dict[str, str]:
        """Name -> digest, of all that was added."""
        values = [row for slab, used in zip(self._slabs, self._used, strict=True) for row in slab[:used].tolist()]
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
    """Bits in which two tensors of one shape and dtype differ; ValueError when they are not."""
    return int(queued_differing_bits(a, b))


def queued_differing_bits(a: Tensor, b: Tensor) -> Tensor:
    """As ``differing_bits``, int64 [] on the device of ``a``, for which nothing has waited yet."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"{a.dtype}{tuple(a.shape)} and {b.dtype}{tuple(b.shape)} are not comparable")
    x, y = (t.detach().to(a.device).contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return _bit_counts(a.device)[(x ^ y).int()].sum()


@functools.cache
def _bit_counts(device: torch.device) -> Tensor:
    return torch.tensor([i.bit_count() for i in range(256)], dtype=torch.int64, device=device)


def _add_sums(tensor: Tensor, out: Tensor) -> None:
    """Add a tensor's sums to int64 [_SUMS] on its device."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.numel() % 4:
        flat = F.pad(flat, (0, -flat.numel() % 4))
    if flat.storage_offset() % 4:
        flat = flat.clone()
    words = flat.view(torch.int32)
    if has_kernels(tensor.device) and words.numel():
        from .kernels.digest import add_sums

        add_sums(words, _columns(tensor.device), out)
        return
    whole = words.numel() // ROW
    rows, rest = words[: whole * ROW].view(whole, ROW), words[whole * ROW :]
    places = _odd(torch.arange(whole + 1, device=tensor.device))
    for i, c in enumerate(_columns(tensor.device)):
        by_row = torch.cat([_rows(rows, c), (rest * c[: rest.numel()]).sum().view(1)])
        out[i] += (by_row * places).sum()
        places = _odd(places)


def _rows(rows: Tensor, c: Tensor) -> Tensor:
    """int64 [R]: rows [R, ROW] int32 times c [ROW] int64, wrapping around."""
    if rows.device.type == "cpu":  # ten times as fast as torch's, which writes every product
        return torch.from_numpy(np.einsum("ij,j->i", rows.numpy(), c.numpy()))
    return (rows * c).sum(1)


@functools.cache
def _columns(device: torch.device) -> Tensor:
    """int64 [_SUMS, ROW] of odd weights: a row for each sum."""
    return _odd(torch.arange(_SUMS * ROW, device=device) + (1 << 40)).view(_SUMS, ROW)


def _odd(at: Tensor) -> Tensor:
    """Pseudo-random odd int64 of int64 positions: SplitMix64's finaliser (with arithmetic shifts)."""
    z = (at + 1) * _signed(_GOLDEN)
    z = (z ^ (z >> 30)) * _signed(_MIX1)
    z = (z ^ (z >> 27)) * _signed(_MIX2)
    return (z ^ (z >> 31)) | 1


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
