"""DQ(Q(W)) of a group of expert weights, computed once per optimizer step.

A group is what one launch serves: the weights of all local experts of one GEMM of one layer. Its value is a function of
the weights, and the weights change when

* an optimizer steps: counted by torch's own hook for every ``torch.optim.Optimizer`` (Transformer Engine's and apex's
  FusedAdam are ones). The distributed optimizer writes parameters through views that leave no mark on them, and under
  ``--overlap-param-gather`` the values arrive even later: so a step only marks the value as old, and the next forward
  of the module, which waits for its own parameters first, computes it;
* somebody writes to a parameter in place, a checkpoint that is loaded for one: torch counts that (``Tensor._version``);
* its storage is replaced (``param.data = ...``): seen by its address.

What no counter sees is a write through ``param.data`` or a raw pointer: call ``invalidate`` after it. With ``debug`` each
use is compared with a fresh computation, and a stale one is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..errors import QuadsError
from ..kernels import nvfp4

Mode = Literal["copy", "transient"]
_FIX = "resume from an earlier checkpoint"


class Clock:
    """Optimizer steps of this process, and the amax values that nobody has looked at yet."""

    def __init__(self) -> None:
        self.steps = 0
        self.unchecked: list[tuple[weakref.ref[WeightGroup], Tensor]] = []
        self._hooks: list[Any] = []

    def start(self) -> None:
        """Count from now on; again is the same as once."""
        if not self._hooks:
            self._hooks = [
                register_optimizer_step_pre_hook(lambda *_: self.check_finite()),
                register_optimizer_step_post_hook(lambda *_: self.tick()),
            ]

    def tick(self) -> None:
        """The weights have changed, or are about to."""
        self.steps += 1

    def check_finite(self) -> None:
        """QuadsError naming the first weight whose amax was NaN or Inf. One host synchronisation for all groups."""
        pending, self.unchecked = self.unchecked, []
        if pending and not torch.isfinite(torch.cat([amax for _, amax in pending])).all():
            for found, amax in pending:
                if (group := found()) is not None:
                    group.require_finite(amax)


clock = Clock()


class WeightGroup:
    """The weights of one launch and their DQ(Q(.)).

    ``params``: bf16, fp16 or fp32 [N, K], K a multiple of 16, each with its own FP32 scale (an expert's fc1 is
    [gate; up], so the two share one). ``names``: what to call each in an error. ``tp_group``: ranks that hold the other
    shards of the same weights; the amax is the largest of all of them, in one collective. ``mode``: "copy" keeps the
    value (one copy of the weights); "transient" keeps only the amax and computes the value at every use.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        names: Sequence[str],
        *,
        tp_group: dist.ProcessGroup | None = None,
        mode: Mode = "copy",
        debug: bool = False,
    ) -> None:
        for p, name in zip(params, names, strict=True):
            if p.dim() != 2 or p.shape[1] % nvfp4.BLOCK:
                raise QuadsError(
                    f"weight {list(p.shape)} has a K that is not a multiple of {nvfp4.BLOCK}",
                    where=name,
                    do="NVFP4 needs whole blocks of 16 on each rank: choose another model or a smaller expert TP",
                )
        self.params, self.names = list(params), list(names)
        self.tp_group = tp_group if tp_group is not None and tp_group.size() > 1 else None
        self.mode, self.debug = mode, debug
        self.quantized = 0  # how often an amax and, in copy mode, a value was computed
        self._amax: Tensor | None = None
        self._values: list[Tensor] | None = None
        self._key: tuple[int, ...] = ()
        clock.start()

    def values(self) -> list[Tensor]:
        """What the GEMMs multiply with now: one tensor for each parameter, of its shape and dtype, without gradient.

        Collective over ``tp_group`` when the value is old. Raises QuadsError on a NaN or Inf in a weight (after an
        optimizer step: at the next one) and, with ``debug``, when the kept value is stale.
        """
        key = (clock.steps, *(v for p in self.params for v in (p._version, p.data_ptr())))
        if key != self._key or self._amax is None:
            stepped = bool(self._key) and key[0] != self._key[0]
            self._refresh(stepped)
            self._key = key
        elif self.debug:
            self._require_fresh()
        if self._values is not None:
            return self._values
        return self._quantize(self._amax, None)

    def invalidate(self) -> None:
        """Compute again at the next use."""
        self._amax = None

    def refresh_only(self) -> None:
        """Compute now, as after an optimizer step: without looking at the amax on the host."""
        self._refresh(stepped=True)

    @property
    def nbytes(self) -> int:
        """Memory that the kept value takes."""
        return sum(v.numel() * v.element_size() for v in self._values or ())

    @torch.no_grad()
    def _refresh(self, stepped: bool) -> None:
        self._amax = self._reduce(nvfp4.grouped_amax([p.detach() for p in self.params]))
        if stepped:
            clock.unchecked.append((weakref.ref(self), self._amax))
        else:
            self.require_finite(self._amax)
        self.quantized += 1
        if self.mode == "copy":
            self._values = self._quantize(self._amax, self._fitting())
            torch.autograd.graph.increment_version(self._values)  # a graph that still holds them must not use them

    def _fitting(self) -> list[Tensor] | None:
        """The kept buffers, if the parameters still have their shapes, dtypes and devices."""
        pairs = zip(self._values or (), self.params, strict=self._values is not None)
        fit = all(v.shape == p.shape and v.dtype == p.dtype and v.device == p.device for v, p in pairs)
        return self._values if fit else None

    def _reduce(self, amax: Tensor) -> Tensor:
        if self.tp_group is not None:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.tp_group)
        return amax

    @torch.no_grad()
    def _quantize(self, amax: Tensor | None, out: list[Tensor] | None) -> list[Tensor]:
        assert amax is not None
        return nvfp4.grouped_qdq([p.detach() for p in self.params], amax, out=out)

    def require_finite(self, amax: Tensor) -> None:
        """QuadsError naming the first weight whose ``amax`` (fp32 [number of weights]) is not finite."""
        bad = (~torch.isfinite(amax)).nonzero()
        if len(bad):
            raise QuadsError("expert weight holds NaN or Inf", where=self.names[int(bad[0, 0])], do=_FIX)

    @torch.no_grad()
    def _require_fresh(self) -> None:
        now = self._reduce(nvfp4.grouped_amax([p.detach() for p in self.params]))
        assert self._amax is not None
        stale = now != self._amax
        if self._values is not None:
            kept = self._values
            fresh = self._quantize(now, None)
            stale = stale | torch.stack([(a != b).any() for a, b in zip(fresh, kept, strict=True)])
        if bad := stale.nonzero().flatten().tolist():
            raise QuadsError(
                "a stale quantised weight would be used: the weight was changed behind torch's back",
                where=self.names[bad[0]],
                do="call megatron_quads.recipe.invalidate(model) after writing weights through .data",
            )
