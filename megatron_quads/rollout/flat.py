"""A refit in few flat chunks: one buffer a layer of packed experts, instead of 12 tensors an expert.

The trainer fills one reusable buffer a layer at a time and hands its CUDA IPC handle (same GPU) or a file (any device)
to the rollout, which copies into the tensors it serves from: no second copy of the model anywhere. Each chunk carries a
checksum of its bytes; the hash over all chunks is what every worker acknowledges.
"""

from __future__ import annotations

import base64
import hashlib
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import QuadsError

ALIGN = 256
EXPERT_KEYS = ("w13", "w13_scale", "w13_scale_2", "w2", "w2_scale", "w2_scale_2")


@dataclass(frozen=True)
class Chunk:
    """Named tensors that travel together. ``layer`` None: dense tensors by HF name; else ``EXPERT_KEYS``.

    ``first_expert``: global id of row 0 of the expert tensors (shapes: ``backends.PackedExperts``).
    """

    layer: int | None
    tensors: dict[str, Tensor]
    first_expert: int = 0


@dataclass
class Sent:
    """What a refit cost."""

    bytes: int = 0
    chunks: int = 0
    hash: str = ""


def checksum(flat: Tensor) -> str:
    """sha256 of the column and row sums of a buffer's int32 words [., 1024]: one host sync, position-sensitive."""
    words = flat[: flat.numel() // 4096 * 4096].view(torch.int32).view(-1, 1024)
    tail = flat[words.numel() * 4 :].long()
    weights = torch.arange(1, tail.numel() + 1, device=flat.device)
    sums = torch.cat([words.sum(0), words.sum(1), (tail * weights).sum().view(1)])
    return hashlib.sha256(sums.cpu().numpy().tobytes()).hexdigest()


def layout(tensors: dict[str, Tensor]) -> tuple[list[list[Any]], int]:
    """([name, offset, shape, dtype] of each tensor in a flat buffer, bytes in all)."""
    entries: list[list[Any]] = []
    offset = 0
    for name, t in tensors.items():
        entries.append([name, offset, list(t.shape), str(t.dtype).removeprefix("torch.")])
        offset += -(-t.nbytes // ALIGN) * ALIGN
    return entries, offset


def unflatten(flat: Tensor, entries: list[list[Any]]) -> dict[str, Tensor]:
    """Views into a buffer, by name."""
    out = {}
    for name, offset, shape, dtype in entries:
        kind = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        out[name] = flat[offset : offset + size].view(kind).view(shape)
    return out


def send(
    call: Any,
    chunks: Iterable[Chunk],
    version: int,
    *,
    rac_hash: str | None,
    rac: dict[str, Any] | None = None,
    file: Path | None = None,
) -> Sent:
    """Send all chunks of a version; ``call``: LocalRollout's ``update_flat``. ``file``: shared file instead of IPC.

    ``rac``: the block of the RAC metadata of ``rac_hash``, where the rollout may have to switch to it.
    The buffer is as large as the largest chunk yet. QuadsError from the rollout: it serves nothing any more.
    """
    sent, digest = Sent(), hashlib.sha256()
    buffer: Tensor | None = None
    for chunk, first, last in _marked(chunks):
        entries, size = layout(chunk.tensors)
        device = next(iter(chunk.tensors.values())).device
        if buffer is None or buffer.numel() < size:
            buffer = torch.zeros(max(size, 4096), dtype=torch.uint8, device=device)
        flat = buffer[:size]
        for name, view in unflatten(flat, entries).items():
            view.copy_(chunk.tensors[name])
        found = checksum(flat)
        digest.update(found.encode())
        message = {
            "layer": chunk.layer, "first_expert": chunk.first_expert, "entries": entries, "bytes": size,
            "checksum": found, "rac_hash": rac_hash, "rac": rac if first else None, **_pointer(buffer, flat, file),
        }  # fmt: skip
        call(chunk=message, version=version, first=first, last=last)
        sent.bytes, sent.chunks = sent.bytes + sum(t.nbytes for t in chunk.tensors.values()), sent.chunks + 1
    if not sent.chunks:
        raise QuadsError("a refit without weights", where="flat refit", do="send all layers")
    sent.hash = digest.hexdigest()
    return sent


def _pointer(buffer: Tensor, flat: Tensor, file: Path | None) -> dict[str, Any]:
    if file is not None:
        flat.cpu().numpy().tofile(file)
        return {"file": str(file)}
    if buffer.device.type != "cuda":
        raise QuadsError("CUDA IPC needs weights on a GPU", where="flat refit", do="give a file")
    from torch.multiprocessing.reductions import reduce_tensor

    torch.cuda.current_stream().synchronize()
    handle = pickle.dumps(reduce_tensor(buffer)[1])
    return {"ipc": base64.b64encode(handle).decode(), "uuid": str(torch.cuda.get_device_properties(buffer.device).uuid)}


def _marked(chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, bool, bool]]:
    """Each chunk with whether it is the first and the last."""
    held: Chunk | None = None
    first = True
    for chunk in chunks:
        if held is not None:
            yield held, first, False
            first = False
        held = chunk
    if held is not None:
        yield held, first, True


def chunks_of(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Chunk]:
    """From a stream of HF names in which a layer's experts lie together (as the exporter yields them).

    Layers whose experts are unquantised, and all else, travel as dense tensors, last.
    """
    dense: dict[str, Tensor] = {}
    layer: int | None = None
    held: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if ".mlp.experts." not in name:
            dense[name] = tensor
            continue
        index = int(name.split(".layers.")[1].split(".")[0])
        if layer is not None and index != layer:
            yield from _experts(layer, held, dense)
            held = {}
        layer = index
        held[name] = tensor
    if layer is not None:
        yield from _experts(layer, held, dense)
    yield Chunk(None, dense)


def _experts(layer: int, held: dict[str, Tensor], dense: dict[str, Tensor]) -> Iterator[Chunk]:
    if not any(name.endswith(".weight_scale") for name in held):
        dense.update(held)
        return
    prefix = f"model.layers.{layer}.mlp.experts"
    ids = sorted({int(n.removeprefix(prefix + ".").split(".")[0]) for n in held})
    if ids != list(range(ids[0], ids[-1] + 1)):
        raise QuadsError(f"experts {ids} of layer {layer} are not consecutive", where=prefix, do="send a whole range")

    def stack(projection: str, kind: str) -> Tensor:
        try:
            return torch.stack([held[f"{prefix}.{e}.{projection}.{kind}"] for e in ids])
        except KeyError as e:
            raise QuadsError(f"tensor {e} is missing", where="flat refit", do="send every expert") from e

    tensors = {}
    for key, parts in (("w13", ("gate_proj", "up_proj")), ("w2", ("down_proj",))):
        tensors[key] = torch.cat([stack(p, "weight") for p in parts], 1)
        tensors[f"{key}_scale"] = torch.cat([stack(p, "weight_scale").view(torch.uint8) for p in parts], 1)
        tensors[f"{key}_scale_2"] = stack(parts[0], "weight_scale_2").reshape(-1).float()
    yield Chunk(layer, tensors, ids[0])
