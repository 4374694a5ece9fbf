"""Trainer checkpoints: Megatron's dist_checkpointing in a folder that is complete or not there."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys

from .. import atomic
from ..errors import QuadsError

EXTRA = "extra.json"
# every optimizer shard is saved in the layout of the model, so another layout can read it
OPTIMIZER_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}


def agree(error: BaseException | None, what: str) -> None:
    """Collective: when any rank failed, all raise (their own error, or a QuadsError naming the first that did)."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, None if error is None else str(error) or type(error).__name__)
    if error is not None:
        raise error
    if failed := [rank for rank, message in enumerate(found) if message is not None]:
        raise QuadsError(f"{what} failed on rank {failed[0]}: {found[failed[0]]}", do="fix that rank's fault")


def save(folder: Path, state: Callable[[], dict[str, Any]], extra: dict[str, Any], *, marker: dict[str, Any]) -> None:
    """Collective: write ``state()`` (a sharded state dict) and ``extra`` (JSON values) to ``folder``.

    The folder appears, with its commit marker, when every rank has written its part; on a fault an older one stays as
    it was and every rank raises. The folder must be on a file system that all ranks share.
    """
    with contextlib.ExitStack() as staging:
        aside: Path | None = None
        error: BaseException | None = None
        text = ""
        if dist.get_rank() == 0:
            try:
                text = json.dumps(extra)
                aside = staging.enter_context(atomic.folder(folder, marker=marker))
            except (QuadsError, OSError, TypeError, ValueError) as e:
                error = e
        agree(error, f"saving {folder}")
        box: list[Any] = [aside]
        dist.broadcast_object_list(box, src=0)
        try:
            dist_checkpointing.save(state(), str(box[0]))
        except (OSError, RuntimeError, CheckpointingException) as e:
            error = QuadsError(f"cannot save the trainer: {e}", where=str(folder), do="free space and save again")
            error.__cause__ = e
        agree(error, f"saving {folder}")
        if dist.get_rank() == 0:
            assert aside is not None
            try:
                atomic.write_bytes(aside / EXTRA, text.encode())
                staging.close()
            except QuadsError as e:
                error = e
        agree(error, f"saving {folder}")


def read_extra(folder: Path) -> dict[str, Any]:
    """The ``extra`` of a complete checkpoint; QuadsError when it is none."""
    if not atomic.is_committed(folder):
        raise QuadsError(
            "no complete trainer checkpoint", where=str(folder), do="resume from a folder that save() finished"
        )
    try:
        extra: dict[str, Any] = json.loads((folder / EXTRA).read_text())
    except (OSError, ValueError) as e:
        raise QuadsError(f"cannot read: {e}", where=str(folder / EXTRA), do="take another checkpoint") from e
    return extra


def load(folder: Path, state: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Collective: (state read into the form of ``state()``, extra). QuadsError when ``folder`` is not complete."""
    if not atomic.is_committed(folder):
        raise QuadsError(
            "no complete trainer checkpoint", where=str(folder), do="resume from a folder that save() finished"
        )
    try:
        extra = json.loads((folder / EXTRA).read_text())
        loaded = dist_checkpointing.load(state(), str(folder))
    except (OSError, ValueError, KeyError, CheckpointingException) as e:
        raise QuadsError(
            f"cannot read the trainer checkpoint: {e}", where=str(folder), do="was it written for this model?"
        ) from e
    return loaded, extra


def materialize_optimizer(optimizer: Any) -> None:
    """Give every parameter its Adam state, zero where no step was made yet.

    Megatron's distributed optimizer reads ``step`` from torch's Adam before it saves or loads anything and its own
    initialiser leaves ``step`` out, so a checkpoint of an untrained model, or a load into one, would fail.
    """
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            part.init_state_fn(inner, part.config)
            for values in inner.state.values():
                values.setdefault("step", torch.zeros((), dtype=torch.float32))


def match_chain(loaded: dict[Any, Any], optimizer: Any) -> dict[Any, Any]:
    """Fit a loaded optimizer state to this layout's chain of optimizers.

    Experts have an optimizer of their own only under expert (tensor) parallelism, so a checkpoint may hold the parameter
    groups of one optimizer where this layout has two, or the other way round. The tensors were read per parameter and
    fit as they are; each group takes its progress (step, rates) from the saved group of the same settings.
    """
    parts = optimizer.chained_optimizers
    if not all(isinstance(part, DistributedOptimizer) for part in parts):
        return loaded
    saved = [loaded[i] for i in range(len(loaded)) if "optimizer" in loaded.get(i, {})] or [loaded]
    if len(saved) == len(parts):
        return loaded
    groups = [group for part in saved for group in part["optimizer"]["param_groups"]]
    fitted = {}
    for i, part in enumerate(parts):
        mine = loaded[i] if len(parts) > 1 else loaded
        inner = part.state_dict()["optimizer"]
        fitted[i] = {
            "optimizer": {**inner, "param_groups": [_with_progress(g, groups) for g in inner["param_groups"]]},
            "param_state": mine["param_state"],
            "param_state_sharding_type": OPTIMIZER_METADATA["distrib_optim_sharding_type"],
        }
    return fitted if len(parts) > 1 else fitted[0]


def _with_progress(group: dict[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any]:
    settings = [k for k in param_group_identifier_keys if k != "is_expert_parallel"]
    same = [g for g in saved if all(g.get(k) == group.get(k) for k in settings)]
    if not same:
        raise QuadsError(
            "the checkpoint has no parameter group with these optimizer settings",
            where=", ".join(f"{k}={group.get(k)}" for k in settings),
            do="resume with the settings of the saved run",
        )
    return {**group, **{k: same[0][k] for k in ("step", "lr", "weight_decay")}}


def separate_steps(optimizer: Any) -> None:
    """Give every parameter its own ``step`` after a load: Megatron hands torch's Adam one tensor for all of them, which
    each parameter's update would then increment."""
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            for values in part.optimizer.state.values():
                values["step"] = values["step"].clone()


def rng_state() -> list[dict[str, Any]]:
    """Collective: the generators of every rank, in rank order, the same list everywhere."""
    mine: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        from megatron.core import tensor_parallel

        mine["cuda"] = torch.cuda.get_rng_state()
        mine["tracker"] = tensor_parallel.get_cuda_rng_tracker().get_states()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def restore_rng(states: list[dict[str, Any]]) -> bool:
    """Set this rank's generators; False, changing nothing, when the checkpoint is of another number of ranks."""
    if len(states) != dist.get_world_size():
        return False
    mine = states[dist.get_rank()]
    random.setstate(mine["python"])
    np.random.set_state(mine["numpy"])
    torch.set_rng_state(mine["torch"])
    if torch.cuda.is_available():
        from megatron.core import tensor_parallel

        torch.cuda.set_rng_state(mine["cuda"])
        tensor_parallel.get_cuda_rng_tracker().set_states(mine["tracker"])
    return True
