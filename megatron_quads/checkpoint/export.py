"""Sharded Megatron model -> Hugging Face folder: ModelOpt NVFP4 routed experts, everything else in high precision.

Streamed (a few experts in memory at a time), written aside and swapped in with a commit marker, and byte-identical for
every EP x TP x ETP x PP layout of the same weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import atomic
from ..config import QuadsConfig
from ..errors import QuadsError
from ..kernels import nvfp4
from ..rac.metadata import SIDECAR, RacMetadata
from .gather import iter_units
from .hf import HFModel
from .inventory import agree, exchange, rank
from .mapping import Unit, units
from .packing import encoded, is_packed
from .quantization_config import fp8_config, hf_quant_config, quantization_config
from .stream import Entry, StreamWriter

SHARD_BYTES = 4 << 30
# what a HF folder holds besides weights and config.json; copied when present
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True)
class ExportReport:
    """What was written. ``packed``: number of NVFP4 projections; ``nbytes``: of all tensors."""

    path: Path
    files: tuple[str, ...]
    tensors: int
    packed: int
    nbytes: int


def export_hf(
    chunks: Sequence[nn.Module],
    hf: HFModel,
    quads: QuadsConfig,
    out: Path,
    *,
    rac: RacMetadata | None,
    dtype: torch.dtype,
    extra_marker: dict[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> ExportReport:
    """Collective: write the model as ``out``; every rank returns the same report or raises the same QuadsError.

    ``dtype`` is the one the trainer multiplies with: values are cast to it, then packed. Recipe bf16 gives a plain HF
    checkpoint, recipe fp8 the same with a ``quantization_config``, by which its rollout quantises. ``extra_marker``
    goes into the commit marker and must be the same for byte-identical exports. QuadsError: K not a multiple of 16, NaN/Inf weights, RAC metadata missing, of another model
    or for other layers, ``out`` holding something that is not an export, a full disk. An old ``out`` survives them all.
    """
    layers = quads.quantized_layers(hf.num_layers) if quads.quantized_rollout else []
    fp8_layers = quads.quantized_layers(hf.num_layers) if quads.fp8_rollout else []
    error: QuadsError | None = None
    try:
        _check(hf, quads, out, layers, rac)
    except QuadsError as e:
        error = e
    agree(error)
    report: ExportReport | None = None
    stream = iter_units(chunks, hf)
    try:
        if rank() == 0:
            marker = {"recipe": quads.recipe, "dtype": _name(dtype), **(extra_marker or {})}
            report = _write(stream, hf, quads, Path(out), layers, fp8_layers, rac, dtype, marker, shard_bytes)
    except QuadsError as e:
        error = e
    # rank 0: what is left after an error, so that no rank waits in a send; other ranks: all of it
    for _ in stream:
        pass
    agree(error)
    report = exchange(report)[0]
    assert report is not None
    return report


def _check(hf: HFModel, quads: QuadsConfig, out: Path, layers: list[int], rac: RacMetadata | None) -> None:
    for layer in layers[:1]:
        for stem, k in (("gate_proj", hf.hidden_size), ("down_proj", hf.moe_intermediate_size)):
            if k % nvfp4.BLOCK:
                raise QuadsError(
                    f"K = {k} is not a multiple of {nvfp4.BLOCK}",
                    where=f"model.layers.{layer}.mlp.experts.0.{stem}.weight",
                    do="NVFP4 needs whole blocks: use recipe bf16",
                )
    if quads.rac and rac is None:
        raise QuadsError("no RAC metadata", where="recipe quads", do="run `quads calibrate` first, or use recipe qat")
    if rac is not None:
        if not quads.rac:
            raise QuadsError(f"RAC metadata with recipe {quads.recipe!r}", where=SIDECAR, do="use recipe quads")
        rac.require_model(hf.shape, where=SIDECAR)
        if sorted(rac.layers) != layers:
            raise QuadsError(
                f"RAC metadata is for layers {sorted(rac.layers)}, quantised are {layers}",
                where=SIDECAR,
                do="calibrate again",
            )
    out = Path(out)
    if out.exists() and hf.path.exists() and out.resolve() == hf.path.resolve():
        raise QuadsError("would replace the source checkpoint", where=str(out), do="choose another folder")
    if out.exists() and not atomic.is_committed(out) and not (out.is_dir() and not any(out.iterdir())):
        raise QuadsError("exists and is not an export", where=str(out), do="choose another folder")


def _write(
    stream: Generator[tuple[Unit, list[Tensor]]],
    hf: HFModel,
    quads: QuadsConfig,
    out: Path,
    layers: list[int],
    fp8_layers: list[int],
    rac: RacMetadata | None,
    dtype: torch.dtype,
    marker: dict[str, Any],
    shard_bytes: int,
) -> ExportReport:
    entries = list(planned(hf, layers, dtype))
    with atomic.folder(out, marker=marker) as folder:
        with StreamWriter(folder, entries, shard_bytes) as writer:
            for name, tensor in encoded(stream, layers, rac, dtype):
                writer.write(name, tensor)
        config = dict(hf.config)
        config["dtype"] = _name(dtype)
        if "torch_dtype" in config:
            config["torch_dtype"] = _name(dtype)
        if layers:
            config["quantization_config"] = quantization_config(hf, layers, quads, rac)
            atomic.write_json(folder / "hf_quant_config.json", hf_quant_config(hf, layers))
        elif fp8_layers:
            config["quantization_config"] = fp8_config(fp8_layers)
        atomic.write_json(folder / "config.json", config)
        if rac is not None:
            atomic.write_json(folder / SIDECAR, rac.to_block())
        for name in COMPANIONS:
            if (hf.path / name).is_file():
                shutil.copyfile(hf.path / name, folder / name)
    packed = sum(e.name.endswith(".weight_scale_2") for e in entries)
    return ExportReport(out, tuple(writer.files), len(entries), packed, writer.nbytes)


def planned(hf: HFModel, layers: list[int], dtype: torch.dtype) -> Iterator[Entry]:
    """Every tensor of the export, in the order in which ``encoded`` gives them."""
    for unit in units(hf):
        if not unit.exported:
            continue
        for name, shape in zip(unit.names, unit.shapes, strict=True):
            if not is_packed(unit, layers):
                yield Entry(name, dtype, shape)
                continue
            stem, (rows, k) = name.removesuffix(".weight"), shape
            yield Entry(name, torch.uint8, (rows, k // 2))
            yield Entry(f"{stem}.weight_scale", torch.float8_e4m3fn, (rows, k // nvfp4.BLOCK))
            yield Entry(f"{stem}.weight_scale_2", torch.float32, ())
            yield Entry(f"{stem}.input_scale", torch.float32, ())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
