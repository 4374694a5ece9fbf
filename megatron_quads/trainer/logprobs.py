"""Log-probabilities of given tokens through Megatron's schedules, over the true vocabulary (padded columns removed)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from ..errors import QuadsError
from .experts import frozen_weights


@lru_cache(maxsize=8)
def _causal_mask(length: int, device: torch.device) -> Tensor:
    """Bool [1, 1, s, s]; True is hidden, as Megatron's local attention reads it."""
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)


def device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def forward(model: nn.Module, tokens: Tensor, args: argparse.Namespace) -> Tensor:
    """One chunk's forward of tokens [b, s]: logits [b, s, padded vocabulary] on the last stage, else hidden states.

    The sequence is padded to a multiple of the tensor parallel size: with causal attention no position sees that.
    """
    tokens = F.pad(tokens, (0, -tokens.shape[1] % args.tensor_model_parallel_size))
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    # Transformer Engine's attention is causal by its own setting
    mask = _causal_mask(tokens.shape[1], tokens.device) if args.transformer_impl == "local" else None
    return model(tokens, positions, mask)


def log_softmax(logits: Tensor, length: int, vocab_size: int) -> Tensor:
    """Logits [b, s', padded] of any dtype -> fp32 log-probabilities [b, length - 1, vocab_size] of the next token."""
    return logits[:, : length - 1, :vocab_size].float().log_softmax(-1)


def gather_logprobs(logits: Tensor, tokens: Tensor, vocab_size: int, *, entropy_grad: bool) -> tuple[Tensor, Tensor]:
    """(log p(tokens[:, t + 1] | tokens[:, : t + 1]), entropy of that distribution), both fp32 [b, s - 1]."""
    full = log_softmax(logits, tokens.shape[1], vocab_size)
    picked = full.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = -(full.exp() * full).sum(-1)
    return picked, entropy


def split(batch: dict[str, Tensor], args: argparse.Namespace) -> list[dict[str, Tensor]]:
    """Collective over data parallel ranks: cut a batch (``tokens`` [b, s] and others, rows first) into micro-batches.

    Expert parallel ranks exchange tokens in every layer, so all get the same number of micro-batches: enough for
    ``args.micro_batch_size``, but no more than the smallest rank has rows. Pipeline stages exchange tensors of one
    shape, so there the micro-batches are equal. Raises QuadsError on a rank without rows and on sequences that do not
    fit the context.
    """
    rows, length = batch["tokens"].shape
    bounds = torch.tensor([rows, -rows, length, -length], device=device())
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
    most, least, longest, shortest = bounds.abs().tolist()
    if not least:
        raise QuadsError("a data parallel rank has no sequence", where="batch", do="give every rank at least one")
    if longest > args.max_position_embeddings or shortest < 2:
        raise QuadsError(
            f"sequences of {shortest} to {longest} tokens do not fit 2..{args.max_position_embeddings}",
            where="batch",
            do="shorten the prompts or the responses",
        )
    count = min(-(-most // args.micro_batch_size), least)
    if args.pipeline_model_parallel_size > 1:
        if most != least:
            raise QuadsError(
                f"data parallel ranks hold from {least} to {most} sequences", where="batch", do="give each as many"
            )
        count = next(n for n in range(count, rows + 1) if rows % n == 0)
    batch = {name: value.to(device()) for name, value in batch.items()}
    parts = {name: value.tensor_split(count) for name, value in batch.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(count)]


def run_schedule(
    chunks: Sequence[nn.Module],
    microbatches: Sequence[dict[str, Tensor]],
    last_stage: Callable[..., Any],
    args: argparse.Namespace,
    *,
    forward_only: bool,
) -> list[Any]:
    """Run Megatron's forward(-backward) schedule over micro-batches, each a dict with ``tokens`` [b, s].

    ``last_stage(logits, microbatch)`` runs on the last pipeline stage: forward only it returns any value, in training
    Megatron's (loss, number of tokens, values). Returns those values in order, an empty list on other stages.
    """
    length = microbatches[0]["tokens"].shape[1]
    padded = length + -length % args.tensor_model_parallel_size

    def step(iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(iterator)

        def finish(output: Tensor, non_loss_data: bool = False) -> Any:
            return last_stage(output, batch)

        return forward(model, batch["tokens"], args), finish

    with frozen_weights(chunks):
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(microbatches),
            model=list(chunks),
            num_microbatches=len(microbatches),
            seq_length=padded,
            micro_batch_size=microbatches[0]["tokens"].shape[0],
            decoder_seq_length=padded,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )


def _forward_all(
    chunks: Sequence[nn.Module], tokens: Tensor, args: argparse.Namespace, last_stage: Callable[..., Any]
) -> list[Any]:
    return run_schedule(chunks, split({"tokens": tokens}, args), last_stage, args, forward_only=True)


@torch.no_grad()
def token_logprobs(chunks: Sequence[nn.Module], tokens: Tensor, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens int64 [b, s] given their prefixes, and entropies: fp32 [b, s - 1] each, no gradient.

    Every rank of a pipeline returns them. Each data parallel rank passes its own rows; errors are those of ``split``.
    """

    def last_stage(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return gather_logprobs(logits, batch["tokens"], args.quads_vocab_size, entropy_grad=False)

    found = _forward_all(chunks, tokens, args, last_stage)
    if found:
        result = torch.stack([torch.cat(parts) for parts in zip(*found, strict=True)])
    else:
        result = torch.empty(2, tokens.shape[0], tokens.shape[1] - 1, device=device())
    if args.pipeline_model_parallel_size > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(result, last, group=parallel_state.get_pipeline_model_parallel_group())
    return result[0], result[1]


@torch.no_grad()
def log_distribution(chunks: Sequence[nn.Module], tokens: Tensor, args: argparse.Namespace) -> Tensor | None:
    """fp32 log-probabilities of every next token [b, s - 1, vocabulary] on the last pipeline stage, None elsewhere."""

    def last_stage(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return log_softmax(logits, batch["tokens"].shape[1], args.quads_vocab_size)

    found = _forward_all(chunks, tokens, args, last_stage)
    return torch.cat(found) if found else None
