"""What a rollout engine is to the rest of the project: one interface for the in-process and the HTTP engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import QuadsError

TRANSFER_BACKEND = "quads_file"
ACTIVATION_MODES = ("w4a16", "w4a4", "rac")


@dataclass(frozen=True)
class Sample:
    """One sampled continuation. ``logprobs[i]`` is the processed (temperature-scaled) log-prob of ``token_ids[i]``.

    ``finish_reason`` is ``"stop"`` (an EOS token, which is included) or ``"length"``.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


@dataclass(frozen=True)
class RolloutInfo:
    """What the workers hold. ``version`` is None while no complete set of weights is loaded."""

    version: int | None
    rac_hash: str | None
    rac_active_layers: list[int]
    quantized_layers: list[int]
    quant_method: str
    activation: str
    activation_scale: str
    backend: str
    dtype: str
    # (layer, "gate_up" or "down") as "layer.gemm" -> rows beyond a static activation scale since the engine started
    saturated_rows: dict[str, int] = field(default_factory=dict)
    # the launch that started the server, None for one started by hand
    job: str | None = None
    attempt: int | None = None


class Rollout(Protocol):
    """A rollout engine. Every method raises QuadsError when the engine is gone or refuses."""

    def generate(
        self, prompts: Sequence[Sequence[int]], *, n: int, max_tokens: int, temperature: float, seed: int
    ) -> list[list[Sample]]:
        """``n`` samples per prompt of token ids; sample j of prompt i depends on (seed, i, j) only."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (temperature 1) of tokens 1.. of each sequence: one value fewer than it has tokens."""

    def record_routes(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Per sequence the chosen experts, int64 [MoE layers, tokens, top-k]."""

    def update_weights(self, folder: Path, version: int, *, rac_hash: str | None = None) -> None:
        """Load a committed export through the engine's native weight-update flow.

        With ``rac_hash`` the folder must hold that RAC metadata, and every worker switches to it together with the
        weights; without, a folder whose metadata are not the running ones is refused.
        """

    def require_selection(self) -> None:
        """Raise QuadsError unless every worker runs RAC and takes another selection with an update."""

    def audit(self) -> dict[str, str]:
        """``digest.tensor_digest`` of the tensor the engine multiplies with, per HF expert weight name."""

    def count_bits(self, file: Path) -> dict[str, int]:
        """Bits that differ, per HF expert weight name, from the tensors of a safetensors file."""

    def info(self) -> RolloutInfo:
        """State of the workers; raises QuadsError when they disagree."""

    def set_activation(self, mode: str) -> None:
        """Switch quantised layers to ``w4a16``, ``w4a4`` or ``rac`` (for measurements)."""

    def assert_active(self) -> None:
        """Raise QuadsError unless every worker runs what the checkpoint's metadata asks for."""

    def close(self) -> None:
        """Stop what this object started."""


def stop_tokens(folder: Path) -> list[int]:
    """EOS ids of a checkpoint: generation_config.json's, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file() and (ids := json.loads(path.read_text()).get("eos_token_id")) is not None:
            return list(ids) if isinstance(ids, list) else [int(ids)]
    return []


def unwrap(results: Sequence[dict[str, Any]]) -> list[Any]:
    """Replies of ``QuadsWorkerExtension.quads_call`` -> values; raises the first refusal as QuadsError."""
    for result in results:
        if "error" in result:
            what, where, do = result["error"]
            raise QuadsError(what, where=where, do=do)
    return [r["ok"] for r in results]


def require_acknowledged(infos: Sequence[RolloutInfo], version: int, rac_hash: str | None) -> None:
    """Raise QuadsError unless every worker holds ``version`` and, where it is given, the selection of ``rac_hash``."""
    for rank, info in enumerate(infos):
        if info.version != version or rac_hash not in (None, info.rac_hash):
            raise QuadsError(
                f"worker {rank} acknowledges version {info.version} with RAC {info.rac_hash}, not {version} with {rac_hash}",
                where="rollout",
                do="restart it",
            )


def half_loaded(where: str) -> QuadsError:
    """The error of every use after an update that broke off."""
    return QuadsError("the last weight update failed half-way", where=where, do="restart the rollout, then resume")


def sample_seed(seed: int, prompt: int, sample: int) -> int:
    """Independent 63-bit seed of one sample."""
    digest = hashlib.sha256(f"{seed}/{prompt}/{sample}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def require_fit(prompts: Sequence[Sequence[int]], context: int, *, room: int) -> None:
    """Raise QuadsError naming the first prompt that is empty or leaves less than ``room`` tokens of the context."""
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise QuadsError("a prompt has no tokens", where=f"prompt {i}", do="remove it")
        if len(prompt) + room > context:
            raise QuadsError(
                f"a prompt of {len(prompt)} tokens does not fit a context of {context}",
                where=f"prompt {i}",
                do="shorten the prompt or raise max_model_len",
            )


def merge_infos(infos: Sequence[RolloutInfo]) -> RolloutInfo:
    """One info of all workers; raises QuadsError when they are not the same (saturation counts are added)."""
    first = infos[0]
    saturated: dict[str, int] = {}
    for rank, info in enumerate(infos):
        for key, value in info.saturated_rows.items():
            saturated[key] = saturated.get(key, 0) + value
        for name in RolloutInfo.__dataclass_fields__:
            if name != "saturated_rows" and getattr(info, name) != getattr(first, name):
                raise QuadsError(
                    f"rollout workers disagree on {name}: {getattr(first, name)!r} and {getattr(info, name)!r}",
                    where=f"worker {rank}",
                    do="restart the rollout",
                )
    return RolloutInfo(**{**first.__dict__, "saturated_rows": saturated})


def require_mode(mode: str) -> None:
    """Raise QuadsError for an unknown activation mode."""
    if mode not in ACTIVATION_MODES:
        raise QuadsError(f"unknown activation mode {mode!r}", where="set_activation", do=f"one of {ACTIVATION_MODES}")


def record_routes(workers: Any, score: Any, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Routes of each sequence int64 [MoE layers, tokens, k], through the given transport."""
    out = []
    for sequence in sequences:
        workers("record_start")
        try:
            score([sequence])
        finally:
            layers = workers("record_stop")[0]
        tokens = [torch.tensor([t for step in passes for t in step]) for passes in layers]
        if any(len(t) < len(sequence) for t in tokens):
            # compiled forward passes do not call the hook
            raise QuadsError(
                "the engine did not record its routes", where="rollout", do="start it with --enforce-eager"
            )
        # the extra token that scoring generates may add a decode step; padding never comes first
        out.append(torch.stack([t[: len(sequence)] for t in tokens]))
    return out
