"""Start and end the distributed runtime: process groups, Megatron's parallel state, seeds, CPU patches."""

from __future__ import annotations

import argparse
import logging
import os
import random
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from ..errors import QuadsError
from ..patches import megatron_checkpoint, megatron_cpu, registry

log = logging.getLogger(__name__)
_DEFAULT_ENV = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


# one line per parameter and set-up step at INFO; the named ones warn of what is meant to be so
_LOG_LEVELS = {
    "megatron": logging.WARNING,
    "megatron.core.models.gpt.gpt_model": logging.ERROR,
    "megatron.core.rerun_state_machine": logging.ERROR,
    "megatron.core.dist_checkpointing.strategies.torch": logging.ERROR,
}


def required_patches() -> tuple[registry.Patch, ...]:
    """The registered patches that this machine needs."""
    from megatron.core.optimizer import distrib_optimizer

    patches = megatron_checkpoint.SYNCHRONOUS_SAVE
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        patches += megatron_checkpoint.TORCH_ADAM
    if not torch.cuda.is_available():
        patches += megatron_cpu.PATCHES
    return patches


def apply_patches() -> None:
    """Apply them, once; QuadsError when one does not fit the installed Megatron or torch."""
    registry.apply(required_patches())
    registry.require_applied(required_patches())


def initialize(args: argparse.Namespace) -> None:
    """Join the job described by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT (one process without them).

    gloo and the registered CPU patches without a GPU, NCCL with one. Seeds every generator with ``args.seed``. On a
    running job a call with the same layout does nothing; another layout raises QuadsError.
    """
    from megatron.core import parallel_state, tensor_parallel

    on_gpu = torch.cuda.is_available()
    for name, level in _LOG_LEVELS.items():
        logging.getLogger(name).setLevel(level)
    apply_patches()
    log.debug("patches: %s", registry.status(required_patches()))
    if parallel_state.model_parallel_is_initialized():
        _require_same_layout(args)
        return
    if not dist.is_initialized():
        _init_process_group(args, on_gpu)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        create_gloo_process_groups=True,
    )
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    # without dropout (the checkpoints' architecture has none) no per-region generator is ever drawn from, so on the CPU
    # Megatron's own inert tracker serves; the real one needs CUDA generators
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed, inference_rng_tracker=not on_gpu)


def _init_process_group(args: argparse.Namespace, on_gpu: bool) -> None:
    for key, value in _DEFAULT_ENV.items():
        os.environ.setdefault(key, value)
    if "MASTER_PORT" not in os.environ:
        if int(os.environ["WORLD_SIZE"]) > 1:
            raise QuadsError("MASTER_PORT is not set", where="environment", do="start the ranks with the launcher")
        os.environ["MASTER_PORT"] = "0"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    if os.environ["MASTER_PORT"] == "0":
        # one process: let the OS choose the port
        store = dist.TCPStore(os.environ["MASTER_ADDR"], 0, world_size=1, is_master=True, timeout=timeout)
        dist.init_process_group(args.distributed_backend, store=store, rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(args.distributed_backend, timeout=timeout)
    if dist.get_world_size() != args.world_size:
        raise QuadsError(
            f"{dist.get_world_size()} processes joined, the arguments are for {args.world_size}",
            where="WORLD_SIZE",
            do="parse the arguments in the started process",
        )


def _require_same_layout(args: argparse.Namespace) -> None:
    from megatron.core import parallel_state as ps

    running = (
        ps.get_tensor_model_parallel_world_size(),
        ps.get_pipeline_model_parallel_world_size(),
        ps.get_expert_model_parallel_world_size(),
        ps.get_expert_tensor_parallel_world_size(),
    )
    asked = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.expert_model_parallel_size,
        args.expert_tensor_parallel_size,
    )
    if running != asked:
        raise QuadsError(
            f"this process runs TP, PP, EP, ETP = {running}, asked for {asked}",
            where="runtime.initialize",
            do="call shutdown() first",
        )


def shutdown() -> None:
    """Leave the job; ``initialize`` may be called again."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
