"""Reorder every expert's intermediate dimension so that its large channels come first; the function stays the same.

``y = down @ (silu(gate @ x) * (up @ x))`` does not change when the rows of gate and up and the columns of down are
permuted alike. Sorted by calibrated rms, down_proj's RAC blocks are simply the leading ones: a contiguous prefix. The
checkpoint stays an ordinary Hugging Face checkpoint. Sort only for RAC: without it, sorting concentrates the
quantisation error and widens the gap.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .. import atomic
from ..checkpoint.hf import INDEX, SINGLE, SafetensorsFolder, read_json
from ..config import QuadsConfig
from ..errors import QuadsError
from .metadata import SIDECAR
from .statistics import Moments

CALIBRATION = "quads_calibration.json"

Order = Mapping[tuple[int, int], Tensor]

_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
# Weights in formats that are not rewritten would contradict the sorted ones: left behind.
_OTHER_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".msgpack", ".h5"}
_OWN_FILES = {INDEX, CALIBRATION, SIDECAR, atomic.MARKER}


def rms_order(second_moment: Tensor) -> Tensor:
    """Channels [I] by calibrated second moment [I], largest first; equal channels keep their order (int64 [I])."""
    return second_moment.sort(descending=True, stable=True).indices


def order_of(moments: Moments, layers: Sequence[int], quads: QuadsConfig) -> dict[tuple[int, int], Tensor]:
    """The order of each expert's channels that calibration's moments ask for; {} where nothing is sorted."""
    order: dict[tuple[int, int], Tensor] = {}
    if quads.rac_sort and quads.rac_ratio > 0:  # sorting without compensation would widen the gap
        for layer in layers:
            order |= {(layer, e): rms_order(m) for e, m in enumerate(moments.second_moment(layer))}
    return order


def sort_checkpoint(src: str | Path, order: Order, out: str | Path, *, record: dict[str, Any] | None = None) -> None:
    """Write ``src`` with experts reordered to ``out``: shard by shard, aside, then renamed with a commit marker.

    ``order`` maps (layer, expert) to int64 [I], a permutation: new channel j is old channel ``order[j]``. Experts that
    it does not name stay as they are. ``record`` is added to ``quads_calibration.json``. Raises QuadsError when ``src``
    is quantised, lacks an expert that ``order`` names, has a damaged shard, or the disk is full (``out`` then stays).
    """
    with atomic.folder(out, marker={"kind": "sorted-checkpoint"}) as aside:
        write_sorted(src, order, aside)
        write_calibration(aside, order, record)


def write_calibration(folder: Path, order: Order, record: dict[str, Any] | None) -> None:
    """Write ``quads_calibration.json``: whether the experts are sorted, a digest of the order, and ``record``."""
    head = {"schema_version": 1, "sorted": bool(order), "order_sha256": order_digest(order)}
    atomic.write_json(folder / CALIBRATION, {**head, **(record or {})})


def read_calibration(folder: str | Path) -> dict[str, Any] | None:
    """Content of ``quads_calibration.json``; None when there is none."""
    path = Path(folder) / CALIBRATION
    return read_json(path) if path.exists() else None


def order_digest(order: Order) -> str:
    """sha256 over all permutations in (layer, expert) order."""
    digest = hashlib.sha256()
    for key in sorted(order):
        digest.update(repr(key).encode() + order[key].cpu().to(torch.int32).numpy().tobytes())
    return digest.hexdigest()


def write_sorted(src: str | Path, order: Order, out: Path) -> None:
    """Write the sorted checkpoint into the existing folder ``out``, one shard in memory (see ``sort_checkpoint``)."""
    src = Path(src)
    refuse_quantized(src)
    for key, permutation in order.items():
        if not torch.equal(permutation.sort().values.cpu(), torch.arange(permutation.numel())):
            raise QuadsError(f"order of (layer, expert) {key} is not a permutation", do="calibrate again")
    waiting = {(*key, part) for key in order for part in ("gate_proj", "up_proj", "down_proj")}
    reader = SafetensorsFolder(src)
    for shard, names in shards(reader).items():
        tensors = {name: reader.get(name) for name in names}
        for name, tensor in tensors.items():
            if (match := _EXPERT.fullmatch(name)) and (key := (int(match[1]), int(match[2]))) in order:
                tensors[name] = _reorder(
                    tensor, order[key].to(tensor.device), columns=match[3] == "down_proj", name=name
                )
                waiting.discard((*key, match[3]))
        _write_shard(tensors, out / shard)
    if waiting:
        layer, expert, part = min(waiting)
        raise QuadsError(
            f"no tensor model.layers.{layer}.mlp.experts.{expert}.{part}.weight ({len(waiting)} missing)",
            where=str(src),
            do="give a complete Qwen3-MoE checkpoint with one tensor per expert",
        )
    copy_companions(src, out)


def copy_companions(src: Path, out: Path) -> None:
    """Copy config, tokenizer and index; weights in other formats and this project's own sidecars stay behind."""
    for path in sorted(src.iterdir()):
        if path.is_file() and path.suffix not in _OTHER_WEIGHTS and path.name not in _OWN_FILES:
            shutil.copyfile(path, out / path.name)
    if (src / INDEX).exists():
        shutil.copyfile(src / INDEX, out / INDEX)


def refuse_quantized(src: Path) -> None:
    """Raise QuadsError when ``src`` is quantised: packed codes and block scales cannot be reordered losslessly."""
    config = read_json(src / "config.json")
    quantized = "quantization_config" in config or (src / "hf_quant_config.json").exists()
    if quantized:
        raise QuadsError(
            "the checkpoint is quantised; sorting works on BF16 or FP32 weights",
            where=str(src),
            do="calibrate the original checkpoint, then train and export it",
        )


def shards(reader: SafetensorsFolder) -> dict[str, list[str]]:
    """File name of each shard -> names of its tensors."""
    if not (reader.path / INDEX).exists():
        return {SINGLE: reader.names()}
    files: dict[str, list[str]] = {}
    for name, file in read_json(reader.path / INDEX)["weight_map"].items():
        files.setdefault(file, []).append(name)
    return files


def _write_shard(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as e:
        raise QuadsError(f"cannot write: {e}", where=str(path), do="free space or choose another folder") from e


def _reorder(tensor: Tensor, permutation: Tensor, *, columns: bool, name: str) -> Tensor:
    dim = 1 if columns else 0
    if tensor.dim() != 2 or tensor.shape[dim] != permutation.numel():
        raise QuadsError(
            f"{name} has shape {tuple(tensor.shape)}, the order has {permutation.numel()} channels",
            do="calibrate this checkpoint",
        )
    return tensor.index_select(dim, permutation).contiguous()
