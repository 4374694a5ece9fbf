"""Full tensors by unit -> the export's tensors: routed experts packed to NVFP4 many at a time, all else cast.

On a GPU a group of experts costs two launches and one or two host synchronisations, whatever their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..errors import QuadsError
from ..kernels import nvfp4
from ..rac.metadata import RacMetadata
from . import input_scale
from .load import require_finite
from .mapping import Unit

GROUP_BYTES = 512 << 20  # of weights that are packed together; what a gathered layer may need in memory
WHERE = "the trainer's weights"


def is_packed(unit: Unit, layers: list[int]) -> bool:
    """Whether a unit is a routed expert's of a quantised layer."""
    return unit.expert is not None and unit.layer in layers


def encoded(
    stream: Iterable[tuple[Unit, list[Tensor]]],
    layers: list[int],
    rac: RacMetadata | None,
    dtype: torch.dtype,
    *,
    input_scales: bool = True,
    group_bytes: int = GROUP_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Full HF tensors by unit, in canonical order -> (name, tensor) as exported.

    Of an expert's projection [N, K]: ``weight`` uint8 [N, K/2], ``weight_scale`` E4M3 [N, K/16], ``weight_scale_2`` fp32
    [], shared by gate and up, and with ``input_scales`` the static ``input_scale`` fp32 [] that other readers need.
    QuadsError naming the first tensor that holds NaN or Inf, before anything of its group is given.
    """
    packer = _Packer(rac, input_scales)
    for unit, tensors in stream:
        if is_packed(unit, layers):
            if packer.ends_before(unit, group_bytes):
                yield from packer.flush()
            packer.add(unit, [t.to(dtype).contiguous() for t in tensors])
            continue
        yield from packer.flush()
        for name, tensor in zip(unit.names, tensors, strict=True):
            require_finite(name, tensor, where=WHERE)
        cast = [t.to(dtype) for t in tensors]
        if unit.key == f"{unit.layer}.pre_mlp_layernorm":
            packer.gamma = cast[0]
        yield from zip(unit.names, cast, strict=True)
    yield from packer.flush()


class _Packer:
    """Experts of one layer, whole ones, until they are packed together."""

    def __init__(self, rac: RacMetadata | None, input_scales: bool) -> None:
        self.rac, self.input_scales = rac, input_scales
        self.gamma: Tensor | None = None  # of the norm before the experts
        self.units: list[Unit] = []
        self.tensors: list[list[Tensor]] = []
        self.bytes = 0

    def ends_before(self, unit: Unit, limit: int) -> bool:
        """Whether what is held is packed before ``unit``: another layer, or enough, and a whole expert."""
        if not self.units:
            return False
        return unit.layer != self.units[-1].layer or (self.bytes >= limit and unit.layout == "glu")

    def add(self, unit: Unit, tensors: list[Tensor]) -> None:
        """Hold a unit: gate and up, or down."""
        self.units.append(unit)
        self.tensors.append(tensors)
        self.bytes += sum(t.nbytes for t in tensors)

    def flush(self) -> Iterator[tuple[str, Tensor]]:
        """Pack what is held: gate and up share an amax."""
        units, held = self.units, self.tensors
        self.units, self.tensors, self.bytes = [], [], 0
        if not units:
            return
        flat = [t for tensors in held for t in tensors]
        groups = [i for i, tensors in enumerate(held) for _ in tensors]
        amax = nvfp4.grouped_amax(flat, groups)
        if not torch.isfinite(amax).all():
            for unit, tensors in zip(units, held, strict=True):
                for name, tensor in zip(unit.names, tensors, strict=True):
                    require_finite(name, tensor, where=WHERE)
            raise QuadsError("an expert's amax is not finite", where=units[0].names[0], do="report this")
        codes, block_scales = nvfp4.grouped_quantize(flat, amax, groups)
        scales = nvfp4.tensor_scale(amax).unbind()
        inputs = self._input_scales(units, held) if self.input_scales else None
        at = iter(zip(codes, block_scales, strict=True))
        for i, unit in enumerate(units):
            for name in unit.names:
                packed, s8 = next(at)
                stem = name.removesuffix(".weight")
                yield name, packed
                yield f"{stem}.weight_scale", s8
                yield f"{stem}.weight_scale_2", scales[i]
                if inputs is not None:
                    yield f"{stem}.input_scale", inputs[i]

    def _input_scales(self, units: list[Unit], held: list[list[Tensor]]) -> list[Tensor]:
        """One for each unit; a down unit's follows from the gate and up before it."""
        layer = units[0].layer
        assert layer is not None and self.gamma is not None
        known_in, known_down = input_scale.calibrated(self.rac, layer)
        pairs = [(t[0], t[1]) for unit, t in zip(units, held, strict=True) if unit.layout == "glu"]
        into, inner = input_scale.input_amax(self.gamma, pairs)
        downs = iter(inner)
        tops = [known_in or into if unit.layout == "glu" else known_down or next(downs) for unit in units]
        return [input_scale.to_scale(top) for top in tops]
