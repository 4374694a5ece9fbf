"""Write safetensors shards as a stream: sizes are planned first, then each tensor goes straight to its place."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from ..errors import QuadsError
from .hf import INDEX, SINGLE

_KINDS = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}


@dataclass(frozen=True)
class Entry:
    """A tensor to come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size on disk."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class StreamWriter:
    """Context manager writing ``entries`` to ``folder`` in shards of at most ``shard_bytes`` (one tensor at least).

    One shard gives ``model.safetensors``, several give ``model-00001-of-0000N.safetensors`` and the index. Files depend
    on ``entries`` and values only. Space is reserved when a shard is begun, so a full disk shows before, not after, the
    work. Tensors come in any order; leaving without an error when one never came raises QuadsError.
    """

    def __init__(self, folder: Path, entries: Sequence[Entry], shard_bytes: int) -> None:
        self.folder = folder
        self._pending = {e.name: e for e in entries}
        self._place: dict[str, tuple[str, int]] = {}
        self._headers: dict[str, tuple[bytes, int]] = {}
        self._fds: dict[str, int] = {}
        self._left: dict[str, int] = {}
        self.nbytes = sum(e.nbytes for e in entries)
        shards = _split(entries, shard_bytes)
        self.files = [
            SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            for i in range(1, len(shards) + 1)
        ]
        for file, shard in zip(self.files, shards, strict=True):
            self._plan(file, shard)

    def _plan(self, file: str, shard: list[Entry]) -> None:
        # wide dtypes first: readers view the mapped bytes as the dtype, so every offset must be aligned to it
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset, places = 0, {}
        for e in sorted(shard, key=lambda e: (-e.dtype.itemsize, e.name)):
            header[e.name] = {
                "dtype": _KINDS[e.dtype],
                "shape": list(e.shape),
                "data_offsets": [offset, offset + e.nbytes],
            }
            places[e.name] = offset
            offset += e.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        head = len(text).to_bytes(8, "little") + text
        self._headers[file] = (head, len(head) + offset)
        self._place |= {name: (file, len(head) + at) for name, at in places.items()}
        self._left[file] = len(shard)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one planned tensor; OSError from the file system, QuadsError when it was not planned like this."""
        e = self._pending.pop(name, None)
        if e is None or e.dtype != tensor.dtype or e.shape != tuple(tensor.shape):
            raise QuadsError(
                f"{name} ({tensor.dtype} {list(tensor.shape)}) does not fit the plan ({e})", where=str(self.folder)
            )
        file, at = self._place[name]
        if file not in self._fds:
            self._begin(file)
        # a 0-dimensional tensor has no byte view
        data = memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()).cast("B")
        while data:
            n = os.pwrite(self._fds[file], data, at)
            data, at = data[n:], at + n
        self._left[file] -= 1
        if not self._left[file]:
            os.close(self._fds.pop(file))

    def _begin(self, file: str) -> None:
        head, size = self._headers[file]
        fd = self._fds[file] = os.open(self.folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.posix_fallocate(fd, 0, size)
        os.pwrite(fd, head, 0)

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for fd in self._fds.values():
            os.close(fd)
        if kind is not None:
            return
        if self._pending:
            raise QuadsError(f"{next(iter(self._pending))} was never written", where=str(self.folder))
        if len(self.files) > 1:
            weight_map = {name: file for name, (file, _) in sorted(self._place.items())}
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": weight_map}
            (self.folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def _split(entries: Sequence[Entry], shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    used = 0
    for e in entries:
        if shards[-1] and used + e.nbytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(e)
        used += e.nbytes
    return shards
