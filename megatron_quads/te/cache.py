"""DQ(Q(W)) of a group of expert weights, computed once per optimizer step.

A group is what one launch serves: the weights of all local experts of fc1, or of fc2, in all layers or in one. Its value
is a function of the weights, and the weights change when

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

import itertools
import operator
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..errors import QuadsError
from ..kernels import nvfp4
from ..kernels.nvfp4.plan import Decoder, Plan
from .scratch import Scratch

Mode = Literal["copy", "packed", "transient"]
_version = operator.attrgetter("_version")
_numbers = itertools.count()
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
    shards of the same weights; the amax is the largest of all of them, in one collective. ``mode``, what is kept: "copy"
    the value; "packed" codes and block scales, 4.5 bits a weight; "transient" the amax alone. In the last two the value
    is written at each use, into memory that all groups share.
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
        self._number = next(_numbers)
        self.quantized = 0  # how often an amax and what is kept were computed
        self._amax: Tensor | None = None
        self._step = -1  # of the clock, and the parameters' versions and addresses, that the amax belongs to
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._plan: Plan | None = None
        self._kept: list[Tensor] = []  # values, or codes and then block scales
        self._writers: dict[tuple[int, ...], Plan | Decoder] = {}
        clock.start()

    def values(self, first: int = 0, count: int | None = None) -> list[Tensor]:
        """What the GEMMs multiply with now, for ``count`` weights from ``first`` on (all): shape and dtype of each, no gradient.

        But in copy mode they are good until values are asked for again, of any group on this stream. Collective over
        ``tp_group`` when the value is old. Raises QuadsError on a NaN or Inf in a weight (after an optimizer step: at the
        next one) and, with ``debug``, when what is kept is stale.
        """
        end = len(self.params) if count is None else first + count
        if self._amax is None or self._step != clock.steps:
            self._refresh(stepped=self._step not in (-1, clock.steps))
        elif self._changed(first, end):
            self._refresh(stepped=False)
        elif self.debug:
            self._require_fresh(first, end)
        return self._kept[first:end] if self.mode == "copy" else self.write(first, end)

    def write(self, first: int, end: int) -> list[Tensor]:
        """The values of weights ``first`` to ``end`` under the amax that is known, in the shared memory."""
        scratch, owner = Scratch.of(self.params[first]), self.owner(first, end)
        if scratch.owner == owner:
            return scratch.values
        assert self._amax is not None
        views = scratch.views(self.params[first:end])
        key = (first, end, views[0].data_ptr())
        writer = self._writers.get(key)
        if writer is None:
            writer = self._writers[key] = self._writer(first, end, views)
        if isinstance(writer, Plan):
            writer.write(self._amax[first:end])
        else:
            writer.run(self._amax)
        scratch.written(owner, views)
        return views

    def owner(self, first: int, end: int) -> tuple[int, ...]:
        """Names the values of these weights as they are now."""
        return (self._number, first, end, self.quantized)

    def _writer(self, first: int, end: int, views: list[Tensor]) -> Plan | Decoder:
        if self.mode == "packed":
            n = len(self.params)
            return Decoder(self._kept[first:end], self._kept[n + first : n + end], views, first)
        return Plan([p.detach() for p in self.params[first:end]], out=views)

    def invalidate(self) -> None:
        """Compute again at the next use."""
        self._amax = None

    def refresh_only(self) -> None:
        """Compute now, as after an optimizer step: without looking at the amax on the host."""
        self._refresh(stepped=True)

    @property
    def nbytes(self) -> int:
        """Memory that what is kept takes, without the shared one."""
        return sum(t.numel() * t.element_size() for t in self._kept)

    def _changed(self, first: int, end: int) -> bool:
        mine = self.params[first:end]
        if [*map(_version, mine)] != self._versions[first:end]:
            return True
        return [*map(Tensor.data_ptr, mine)] != self._addresses[first:end]

    @torch.no_grad()
    def _refresh(self, stepped: bool) -> None:
        versions, addresses = [*map(_version, self.params)], [*map(Tensor.data_ptr, self.params)]
        if self._plan is None or addresses != self._addresses:
            self._plan = self._make_plan()
        self._amax = self._reduce(self._plan.amax())
        if stepped:
            clock.unchecked.append((weakref.ref(self), self._amax))
        else:
            self.require_finite(self._amax)
        self._step, self._versions, self._addresses = clock.steps, versions, addresses
        self.quantized += 1
        if self.mode == "transient":
            return
        self._plan.write(self._amax)
        if self.mode == "copy":
            torch.autograd.graph.increment_version(self._kept)  # a graph that still holds them must not use them

    def _make_plan(self) -> Plan:
        """For the parameters where they are now, and memory for what is kept if it is missing or does not fit."""
        plain = [p.detach() for p in self.params]
        self._writers.clear()
        if self.mode == "transient":
            return Plan(plain)
        if self.mode == "copy":
            pairs = list(zip(self._kept, plain, strict=bool(self._kept)))
            if not pairs or any((a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device) for a, b in pairs):
                self._kept = [torch.empty_like(p) for p in plain]
            return Plan(plain, out=self._kept)
        codes = [p.new_empty((p.shape[0], p.shape[1] // 2), dtype=torch.uint8) for p in plain]
        s8 = [p.new_empty((p.shape[0], p.shape[1] // nvfp4.BLOCK), dtype=torch.float8_e4m3fn) for p in plain]
        self._kept = [*codes, *s8]
        return Plan(plain, codes=codes, s8=s8)

    def _reduce(self, amax: Tensor) -> Tensor:
        if self.tp_group is not None:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.tp_group)
        return amax

    def require_finite(self, amax: Tensor) -> None:
        """QuadsError naming the first weight whose ``amax`` (fp32 [number of weights]) is not finite."""
        bad = (~torch.isfinite(amax)).nonzero()
        if len(bad):
            raise QuadsError("expert weight holds NaN or Inf", where=self.names[int(bad[0, 0])], do=_FIX)

    @torch.no_grad()
    def _require_fresh(self, first: int, end: int) -> None:
        """One at a time, so that no second copy of the values is needed."""
        plain = [p.detach() for p in self.params[first:end]]
        assert self._amax is not None
        now = self._reduce(nvfp4.grouped_amax(plain))
        stale = now != self._amax[first:end]
        for i, p in enumerate(plain):
            if self.mode == "copy":
                [fresh] = nvfp4.grouped_qdq([p], now[i : i + 1])
                stale[i] |= (fresh != self._kept[first + i]).any()
            elif self.mode == "packed":
                [codes], [s8] = nvfp4.grouped_quantize([p], now[i : i + 1])
                kept = self._kept[first + i], self._kept[len(self.params) + first + i]
                stale[i] |= (codes != kept[0]).any() | (s8.view(torch.uint8) != kept[1].view(torch.uint8)).any()
        if bad := stale.nonzero().flatten().tolist():
            raise QuadsError(
                "a stale quantised weight would be used: the weight was changed behind torch's back",
                where=self.names[first + bad[0]],
                do="call megatron_quads.recipe.invalidate(model) after writing weights through .data",
            )
