"""Memory for expert weights in use, shared by all layers, and how autograd comes to use it a second time.

A layer's values are written before its forward GEMM and again before its backward pass: what autograd would have kept is
replaced by a note of which weights they were. Values that another layer has overwritten meanwhile are written anew, and a
use without a note is an error, since each writing raises the memory's version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_ALIGNED = 256  # bytes


class Scratch:
    """One flat tensor for each device, stream and dtype, as large as the largest use so far."""

    _all: ClassVar[dict[tuple[torch.device, int, torch.dtype], Scratch]] = {}

    def __init__(self, like: Tensor) -> None:
        self._flat = like.new_empty(0)
        self.low = self.high = 0  # addresses of its first byte and behind its last
        self._views: dict[tuple[torch.Size, ...], list[Tensor]] = {}
        self.owner: tuple[int, ...] = ()  # whose values it holds, and they
        self.values: list[Tensor] = []

    @classmethod
    def of(cls, tensor: Tensor) -> Scratch:
        """The memory for values beside ``tensor`` on the current stream."""
        stream = torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0
        key = (tensor.device, stream, tensor.dtype)
        if key not in cls._all:
            cls._all[key] = cls(tensor.detach())
        return cls._all[key]

    @classmethod
    def nbytes(cls) -> int:
        """Memory that all of them take."""
        return sum(s._flat.numel() * s._flat.element_size() for s in cls._all.values())

    @classmethod
    def release(cls) -> None:
        """Give the memory back; the next use takes it anew."""
        cls._all.clear()

    def views(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of these shapes in the memory, the same ones for the same shapes."""
        key = tuple([t.shape for t in like])
        if key not in self._views:
            unit = _ALIGNED // self._flat.element_size()
            sizes = [-(-t.numel() // unit) * unit for t in like]
            if sum(sizes) > self._flat.numel():
                self._flat = self._flat.new_empty(sum(sizes))
                self.low = self._flat.data_ptr()
                self.high = self.low + self._flat.nbytes
                self._views.clear()
                self.owner, self.values = (), []
            parts = self._flat[: sum(sizes)].split(sizes)
            self._views[key] = [p[: t.numel()].view(t.shape) for p, t in zip(parts, like, strict=True)]
        return self._views[key]

    def written(self, owner: tuple[int, ...], values: list[Tensor]) -> None:
        """It now holds the ``values`` of ``owner``; graphs that hold older ones may not use them."""
        self.owner, self.values = owner, values
        torch.autograd.graph.increment_version(self._flat)


class _Note(NamedTuple):
    """In the place of a value that autograd keeps for the backward pass."""

    scratch: Scratch
    place: int
    made: int
    size: torch.Size
    stride: tuple[int, ...]


def write_again(module: nn.Module, weights: Any) -> None:
    """Have autograd keep notes of ``weights`` (a ``ModuleWeights``) in the forward pass of ``module``, not the values.

    A layer of many experts saves hundreds of tensors: what is asked for each of them is an address and a comparison.
    """
    group, first, end = weights.group, weights.first, weights.first + weights.count
    scratch = Scratch(group.params[first])
    places = _Places()
    found: dict[int, int] = {}
    checked: tuple[int, ...] = ()  # the owner that was seen to be this layer, and where its values are

    def pack(tensor: Tensor) -> Tensor | _Note:
        nonlocal checked, found
        address = tensor.data_ptr()
        if not scratch.low <= address < scratch.high:
            return tensor.detach() if tensor.requires_grad else tensor
        if scratch.owner is not checked:
            checked = scratch.owner
            found = places(scratch.values) if checked == group.owner(first, end) else {}
        index = found.get(address)
        if index is None or tensor.numel() != scratch.values[index].numel():
            raise RuntimeError(
                f"autograd keeps a part {tuple(tensor.shape)} of an expert weight that is written at each use"
            )
        return _Note(scratch, index, group.quantized, tensor.shape, tensor.stride())

    def unpack(kept: Tensor | _Note) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if kept.made != group.quantized:
            raise RuntimeError("a weight was changed inplace between the forward and the backward pass")
        values = kept.scratch.values
        if kept.scratch.owner != group.owner(first, end):
            with torch.no_grad():
                values = group.write(first, end)
        value = values[kept.place]
        if value.shape == kept.size and value.stride() == kept.stride:
            return value
        return value.as_strided(kept.size, kept.stride)  # as autograd saw it, transposed for one

    open_hooks: list[saved_tensors_hooks | None] = []

    def enter(*_: Any) -> None:
        nonlocal scratch
        scratch = Scratch.of(group.params[first])
        hooks = saved_tensors_hooks(pack, unpack) if weights.substituted else None
        if hooks is not None:
            hooks.__enter__()
        open_hooks.append(hooks)

    def leave(*_: Any) -> None:
        if (hooks := open_hooks.pop()) is not None:
            hooks.__exit__()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


class _Places:
    """Address -> index for a list of tensors, kept while the list is the same."""

    def __init__(self) -> None:
        self._list: list[Tensor] | None = None
        self._found: dict[int, int] = {}

    def __call__(self, tensors: list[Tensor]) -> dict[int, int]:
        if tensors is not self._list:
            self._list, self._found = tensors, {t.data_ptr(): i for i, t in enumerate(tensors)}
        return self._found
