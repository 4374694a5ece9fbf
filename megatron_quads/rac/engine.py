"""``quads calibrate --statistics vllm``: calibration's statistics from vLLM's workers, with the engine's own routing.

The engine serves the W4A16 model that calibration is about: the packed checkpoint for the moments, then the packed sorted
one for the residual energies, into the same engine. Both are written beside the result and removed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import atomic, jobs
from ..checkpoint.hf import HFModel, read_model_config
from ..config import QuadsConfig, flag, from_flags
from ..errors import QuadsError
from ..rollout.client import LocalRollout
from . import sort
from .batches import check_sequences
from .statistics import Moments, ResidualEnergy
from .store import MOMENTS, RESIDUAL, write

WHERE = "--statistics vllm"


def collect(
    model: Path,
    sequences: Sequence[Sequence[int]],
    argv: Sequence[str],
    out: Path,
    *,
    beside: Path,
    nproc: int,
    logs: Path,
) -> None:
    """Write ``moments.safetensors`` and ``residual.safetensors`` of ``sequences`` (token ids) into the folder ``out``.

    ``argv``: Megatron-side flags of the calibration. ``beside``: large scratch goes into this path's parent. QuadsError
    on what calibration refuses, a per-tensor activation scale, and an engine that did not run every token once.
    """
    quads, hf = from_flags(argv), read_model_config(model)
    if quads.recipe != "quads":
        raise QuadsError(f"recipe {quads.recipe} is not calibrated here", where=WHERE, do="use recipe quads")
    if quads.activation_scale == "tensor":
        raise QuadsError("a per-tensor scale depends on what shares a batch", where=flag("activation_scale"),
                         do="calibrate in the trainer")  # fmt: skip
    check_sequences(sequences, context=hf.max_position - 1, vocab_size=hf.vocab_size, what="prompt")
    sort.refuse_quantized(model)
    atomic.make_folder(beside.parent)
    with tempfile.TemporaryDirectory(prefix=f".{beside.name}.", dir=beside.parent) as name:
        _observe(model, hf, quads, sequences, list(argv), out, Path(name), nproc=nproc, logs=logs)


def _observe(
    model: Path,
    hf: HFModel,
    quads: QuadsConfig,
    sequences: Sequence[Sequence[int]],
    argv: list[str],
    out: Path,
    scratch: Path,
    *,
    nproc: int,
    logs: Path,
) -> None:
    def packed(source: Path, name: str) -> Path:
        # the last value of a flag counts; qat is the same weights without RAC metadata
        settings = {"model": str(source), "out": str(scratch / name), "trainer_checkpoint": None}
        jobs.launch("export", settings, [*argv, flag("recipe"), "qat"], nproc=nproc, logs=logs)
        return scratch / name

    layers = quads.quantized_layers(hf.num_layers)
    tokens, longest = sum(map(len, sequences)), max(map(len, sequences))
    moments = Moments(hf.shape)
    with LocalRollout(
        packed(model, "packed"),
        dtype="bfloat16" if "--bf16" in argv else "float16" if "--fp16" in argv else "float32",
        max_model_len=longest,
        max_num_seqs=64,
        log=logs / "rollout.log",
        engine_args={"enforce_eager": True},
    ) as rollout:
        rollout.set_activation("w4a16")
        pairs = tokens * int(hf.config["num_experts_per_tok"])
        _require_counted(rollout.statistics(moments, sequences, scratch), layers, pairs)
        order = sort.order_of(moments, layers, quads)
        if order:
            sort.sort_checkpoint(model, order, scratch / "sorted")
            rollout.update_weights(packed(scratch / "sorted", "packed_sorted"), 1)
        static = {unit: top * quads.static_headroom for unit, top in moments.unit_amax(layers).items()}
        residual = ResidualEnergy(hf.shape, "static" if quads.activation_scale == "static" else "token", static)
        _require_counted(rollout.statistics(residual, sequences, scratch, static_amax=static), layers, pairs)
    write(moments, out / MOMENTS)
    write(residual, out / RESIDUAL)


def _require_counted(seen: Mapping[int, int], layers: Sequence[int], pairs: int) -> None:
    """Every (token, expert) pair once in each layer: no padding, nothing computed twice, no worker's share missing."""
    for layer in layers:
        if seen.get(layer, 0) != pairs:
            raise QuadsError(
                f"the engine computed {seen.get(layer, 0)} token-expert pairs in layer {layer}, not {pairs}",
                where=WHERE,
                do="calibrate in the trainer",
            )
