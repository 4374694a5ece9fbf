"""Which experts the trainer's routers chose."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from .experts import moe_layers


@dataclass
class Routes:
    """Chosen experts per layer, filled while the context is open. ``by_layer[layer]`` has one entry per micro-batch."""

    by_layer: dict[int, list[Tensor]] = field(default_factory=dict)

    def layer(self, index: int) -> Tensor:
        """Expert ids, ascending per token: int64 [b, s, topk]."""
        return torch.cat(self.by_layer[index])


@contextlib.contextmanager
def record_routes(chunks: Sequence[nn.Module]) -> Iterator[Routes]:
    """Record this rank's layers for the sequences that it runs inside (forward passes of one sequence length)."""
    routes = Routes()

    def recorder(layer: int) -> Any:
        def record(router: Any, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
            _, rows, _ = args[0].shape  # [s / tp, b, h]: tokens of one position are neighbours in the routing map
            chosen = output[1].detach()
            if router.config.sequence_parallel:
                chosen = gather_from_sequence_parallel_region(chosen.to(torch.int32))
            topk = router.config.moe_router_topk
            ids = chosen.nonzero()[:, 1].view(-1, rows, topk)
            routes.by_layer.setdefault(layer, []).append(ids.transpose(0, 1))

        return record

    handles = [moe.router.register_forward_hook(recorder(layer)) for layer, moe in moe_layers(chunks)]
    try:
        yield routes
    finally:
        for handle in handles:
            handle.remove()
