"""The trainer: a sharded model, Megatron's DDP, optimizer and schedules, and one training step."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor, nn

from ..checkpoint.hf import HFModel
from ..checkpoint.load import load_hf
from ..config import QuadsConfig
from ..errors import QuadsError
from ..rac.metadata import required_rac
from . import state
from .activations import emulate_activations
from .experts import require_match
from .logprobs import device, gather_logprobs, run_schedule, split, token_logprobs
from .model import build
from .routes import Routes, record_routes

log = logging.getLogger(__name__)
LossFn = Callable[[Tensor, Tensor, dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]
_FOREVER = 1 << 40  # a constant schedule needs an end that is never reached


class Trainer:
    """A model that is trained. Batches are global: every rank passes the same one and works on its slice.

    ``chunks``: the rank's model chunks, wrapped in Megatron's DDP. ``optimizer``: Megatron's, distributed unless
    ``--no-distributed-optimizer``. ``dtype``: what the GEMMs multiply in. ``iteration``: optimizer steps made.
    Weights come from ``hf.path`` unless ``load_weights`` is False. Under the symmetric recipes the experts' activations
    are fake-quantised for good (symmetric-rac: with RAC, by the checkpoint's selection).
    """

    def __init__(self, args: argparse.Namespace, hf: HFModel, quads: QuadsConfig, *, load_weights: bool = True) -> None:
        self.args, self.hf, self.quads = args, hf, quads
        self.dtype: torch.dtype = args.params_dtype
        self.iteration = 0
        model = build(args, hf, quads)
        require_match(model, quads)
        if load_weights:
            load_hf(model, hf)
        self.chunks: list[nn.Module] = _wrap(model, args)
        self.optimizer = _build_optimizer(self.chunks, args)
        self.scheduler = _build_scheduler(self.optimizer, args)
        for chunk in self.chunks:
            config = get_model_config(chunk)
            config.finalize_model_grads_func = finalize_model_grads
            config.grad_scale_func = self.optimizer.scale_loss
        self._permanent = contextlib.ExitStack()
        if quads.quantized_trainer_activations:
            rac = required_rac(quads, hf)
            self._permanent.enter_context(
                emulate_activations(self.chunks, rac, activation_scale=quads.activation_scale)  # type: ignore[arg-type]
            )

    def dp_slice(self, n: int) -> slice:
        """This rank's rows of a global batch of ``n``; QuadsError unless data parallelism divides it."""
        size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        if n % size or not n:
            raise QuadsError(
                f"{n} sequences cannot be divided over {size} data parallel ranks", where="batch", do="use a multiple"
            )
        return slice(rank * n // size, (rank + 1) * n // size)

    def logprobs(self, tokens: Tensor, *, chunks: list[nn.Module] | None = None) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies) of global tokens int64 [b, s]: fp32 [b, s - 1], no gradient, whole on every rank.

        ``chunks``: another model of the same layout, such as a frozen reference.
        """
        mine = torch.stack(
            token_logprobs(self.chunks if chunks is None else chunks, tokens[self.dp_slice(tokens.shape[0])], self.args)
        )
        group = parallel_state.get_data_parallel_group()
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(parts, mine.contiguous(), group=group)
        whole = torch.cat(parts, 1).to(tokens.device)
        return whole[0], whole[1]

    def record_routes(self) -> contextlib.AbstractContextManager[Routes]:
        """Record this rank's routers' choices for its slice of what runs inside."""
        return record_routes(self.chunks)

    def step(self, batch: dict[str, Tensor], loss_fn: LossFn, *, entropy_grad: bool = False) -> dict[str, float]:
        """One optimizer step on a global batch: ``tokens`` int64 [b, s] and whatever ``loss_fn`` reads, rows first.

        ``loss_fn(logprobs [m, s - 1], entropy [m, s - 1], rows of the batch)`` returns a scalar sum and sums to report,
        among them ``tokens``, the count the sum ran over. The gradient is that of (sum over all rows) / (all tokens);
        entropy carries gradient only with ``entropy_grad``. Returns, the same on every rank: ``tokens``, ``loss`` and
        each reported sum per token, values named ``*_max`` as the largest, ``grad_norm`` and ``lr``.
        """
        rows = self.dp_slice(batch["tokens"].shape[0])
        parts = split({name: value[rows] for name, value in batch.items()}, self.args)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()

        def last_stage(logits: Tensor, part: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            picked, entropy = gather_logprobs(logits, part["tokens"], self.hf.vocab_size, entropy_grad=entropy_grad)
            loss, sums = loss_fn(picked, entropy, part)
            if "tokens" not in sums:
                raise ValueError("loss_fn must report 'tokens', the number of tokens its sum ran over")
            return loss, sums["tokens"].detach().round().to(torch.int), {**sums, "loss": loss.detach()}

        found = run_schedule(self.chunks, parts, last_stage, self.args, forward_only=False)
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        updated, grad_norm, _ = self.optimizer.step()
        if not updated:
            raise QuadsError(
                "the optimizer refused its step: a gradient is not finite",
                where=f"iteration {self.iteration}",
                do="lower the learning rate and resume",
            )
        self.scheduler.step(1)
        self.iteration += 1
        return {**_reduce(found), "grad_norm": float(grad_norm), "lr": lr}

    def _sharded_state(self, *, loading: bool) -> dict[str, Any]:
        state.materialize_optimizer(self.optimizer)
        model = {f"model{i}": m.sharded_state_dict() for i, m in enumerate(unwrap_model(self.chunks))}
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=state.OPTIMIZER_METADATA)
        return {**model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def save(self, folder: str | Path, extra: dict[str, Any]) -> None:
        """Collective: write everything a resumed run needs, and ``extra`` (JSON values); all or nothing."""
        rng = state.rng_state()

        def content() -> dict[str, Any]:
            return {**self._sharded_state(loading=False), "rng": rng, "iteration": self.iteration}

        marker = {"kind": "trainer-checkpoint", "iteration": self.iteration}
        state.save(Path(folder), content, extra, marker=marker)

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Collective: restore model, optimizer, schedule, generators and iteration; returns ``extra``.

        Another parallel layout may load it; with another number of ranks the generators start from the seed.
        """
        loaded, extra = state.load(Path(folder), lambda: self._sharded_state(loading=True))
        for i, model in enumerate(unwrap_model(self.chunks)):
            model.load_state_dict(loaded[f"model{i}"])
        self.optimizer.load_state_dict(state.match_chain(loaded["optimizer"], self.optimizer))
        state.separate_steps(self.optimizer)
        self.scheduler.load_state_dict(loaded["scheduler"])
        self.iteration = loaded["iteration"]
        if not state.restore_rng(loaded["rng"]):
            log.warning("%s was written by %d ranks: generators start from the seed", folder, len(loaded["rng"]))
        return extra


def load_weights(chunks: list[nn.Module], folder: str | Path) -> None:
    """Collective: the weights alone of what ``Trainer.save`` wrote, into an unwrapped model of any layout."""
    loaded, _ = state.load(
        Path(folder), lambda: {f"model{i}": m.sharded_state_dict() for i, m in enumerate(unwrap_model(chunks))}
    )
    for i, model in enumerate(unwrap_model(chunks)):
        model.load_state_dict(loaded[f"model{i}"])


def _wrap(model: list[nn.Module], args: argparse.Namespace) -> list[nn.Module]:
    from megatron.training.training import get_megatron_ddp_config, wrap_model_chunks_with_ddp

    config = get_megatron_ddp_config(args)
    wrapped: list[nn.Module] = wrap_model_chunks_with_ddp(model, get_model_config(model[0]), config)
    for chunk in wrapped:
        chunk.broadcast_params()  # type: ignore[operator]
    return wrapped


def _build_optimizer(chunks: list[nn.Module], args: argparse.Namespace) -> Any:
    from megatron.training.training import get_megatron_optimizer_config

    config, overrides = get_megatron_optimizer_config(args)
    # through the module: on a CPU the function there is a registered patch's
    return megatron_optimizer.get_megatron_optimizer(config, chunks, config_overrides=overrides)


def _build_scheduler(optimizer: Any, args: argparse.Namespace) -> OptimizerParamScheduler:
    end = args.lr_decay_iters or args.train_iters
    if end is None and args.lr_decay_style != "constant":
        raise QuadsError(
            f"a {args.lr_decay_style} learning rate needs an end", where="--lr-decay-style", do="give --lr-decay-iters"
        )
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters,
        lr_decay_steps=end or _FOREVER,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=end or _FOREVER,
        wd_incr_style="constant",
    )


def _reduce(found: list[dict[str, Tensor]]) -> dict[str, float]:
    """Micro-batches' values -> global ones on every rank (the last pipeline stage has them, the others get them)."""
    box: list[Any] = [None]
    if found:
        names = sorted(found[0])
        values = torch.stack([torch.stack([f[n].detach().double().to(device()) for n in names]) for f in found])
        total, top = values.sum(0), values.amax(0)
        group = parallel_state.get_data_parallel_group()
        dist.all_reduce(total, group=group)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        sums, tops = dict(zip(names, total.tolist(), strict=True)), dict(zip(names, top.tolist(), strict=True))
        tokens = max(sums["tokens"], 1.0)
        box = [{n: tops[n] if n.endswith("_max") else sums[n] / tokens for n in names} | {"tokens": sums["tokens"]}]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(box, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return box[0]
