"""Token sequences of any length -> micro-batches without padding, the same ones whatever the parallel layout.

Padding tokens would reach the experts and enter their statistics, so only sequences of one length share a batch.
Batches are formed before they are dealt to data-parallel ranks: shapes, and with them GEMM rounding, do not depend on
the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import QuadsError

MAX_TOKENS = 1024


@dataclass(frozen=True)
class Batch:
    """Sequences ``rows`` (indices into the input) as tokens [b, s] int64; ``weight`` 1/n when n ranks run it alike."""

    rows: tuple[int, ...]
    tokens: Tensor
    weight: float = 1.0


def check_sequences(sequences: Sequence[Sequence[int]], *, context: int, vocab_size: int, what: str) -> None:
    """Raise QuadsError when there is none, one is empty, longer than the context, or has a token id out of range."""
    if not sequences:
        raise QuadsError(f"no {what}s", do=f"give a file with at least one {what}")
    for i, tokens in enumerate(sequences):
        if len(tokens) < 2:
            size = "empty" if not tokens else "one-token"
            raise QuadsError(f"{size} {what}", where=f"{what} {i}", do="remove it")
        if len(tokens) > context:
            raise QuadsError(
                f"{what} of {len(tokens)} tokens is longer than the context of {context}",
                where=f"{what} {i}",
                do="shorten or remove it",
            )
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise QuadsError(
                f"token id outside the vocabulary of {vocab_size}",
                where=f"{what} {i}",
                do="tokenize with the checkpoint's own tokenizer",
            )


def make_batches(sequences: Sequence[Sequence[int]], *, max_tokens: int = MAX_TOKENS) -> list[Batch]:
    """All batches, shortest sequences first, at most ``max_tokens`` each (one sequence at least)."""
    lengths: dict[int, list[int]] = {}
    for i, tokens in enumerate(sequences):
        lengths.setdefault(len(tokens), []).append(i)
    batches = []
    for length, rows in sorted(lengths.items()):
        size = max(1, max_tokens // length)
        for start in range(0, len(rows), size):
            part = tuple(rows[start : start + size])
            batches.append(Batch(part, torch.tensor([list(sequences[i]) for i in part], dtype=torch.int64)))
    return batches


def deal(batches: Sequence[Batch], rank: int, size: int) -> list[Batch]:
    """This data-parallel rank's batches. Every rank gets equally many, of equal shapes in the same order.

    Batches of one shape go round robin; those left over run on every rank with weight 1/size.
    """
    shapes: dict[tuple[int, ...], list[Batch]] = {}
    for batch in batches:
        shapes.setdefault(tuple(batch.tokens.shape), []).append(batch)
    mine = []
    for group in shapes.values():
        whole = len(group) - len(group) % size
        mine += group[rank:whole:size]
        mine += [Batch(b.rows, b.tokens, b.weight / size) for b in group[whole:]]
    return mine
