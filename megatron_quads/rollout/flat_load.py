"""The worker's side of a flat refit (``flat.py``): chunks into the tensors in use."""

from __future__ import annotations

import base64
import hashlib
import pickle
from collections.abc import Iterable
from typing import Any

import numpy
import torch
from torch import Tensor

from ..errors import QuadsError
from ..rac.metadata import RacMetadata
from . import checks
from .backends import PackedExperts
from .flat import EXPERT_KEYS, checksum, unflatten

AGAIN = "restart the rollout, then resume"


def _methods(model: Any) -> dict[int, tuple[Any, Any]]:
    from .state import expert_layers, quantized_methods

    layers = expert_layers(model)
    return {i: (layers[i], m) for i, m in quantized_methods(model).items()}


def require_flat(model: Any, quantization: dict[str, Any], rac_hash: str | None) -> None:
    """Raise QuadsError unless this worker can take a flat refit with this RAC metadata."""
    running = quantization.get("rac", {}).get("hash")
    if rac_hash != running:
        raise QuadsError(
            "RAC metadata of the refit is not the running one", where="flat refit", do="restart the rollout"
        )
    if not _methods(model):
        raise QuadsError("no layer is NVFP4", where="flat refit", do="update from an export folder")
    if "rac" not in quantization and quantization.get(checks.MARKER_KEY, {}).get("activation_scale") == "static":
        # those scales are the export's input_scale, which follows the weights and does not travel here
        raise QuadsError("static activation scales without RAC need a whole export", where="flat refit",
                         do="update from an export folder")  # fmt: skip


def selection_of(chunk: dict[str, Any]) -> RacMetadata | None:
    """The RAC metadata that a refit brings (``rac`` of its first chunk), checked; None: the running one stays."""
    if chunk.get("rac") is None:
        return None
    rac = RacMetadata.from_block(chunk["rac"], where="flat refit")
    if rac.content_hash != chunk["rac_hash"]:
        raise QuadsError("the refit brings other RAC metadata than it announces", where="flat refit", do=AGAIN)
    return rac


class FlatUpdate:
    """One update under way. Raising in the middle leaves the worker without a version."""

    def __init__(self, model: Any, vllm_config: Any, names: Iterable[str]) -> None:
        self.model, self.vllm_config, self.methods = model, vllm_config, _methods(model)
        self.device = next(model.parameters()).device
        # a layer is complete when each of its local experts arrived
        self.missing = {i: set(self._experts(layer)) for i, (layer, _) in self.methods.items()}
        quantised = tuple(f"{checks.experts_prefix(i)}." for i in self.methods)
        self.dense = {n for n in names if not n.startswith(quantised)}
        self.digest = hashlib.sha256()

    @staticmethod
    def _experts(layer: Any) -> list[int]:
        from .moe import global_experts

        return global_experts(layer)

    def take(self, chunk: dict[str, Any]) -> None:
        """Check one chunk's bytes and copy it in; QuadsError when they are not what was sent."""
        flat = self._open(chunk)
        found = checksum(flat)
        if found != chunk["checksum"]:
            raise QuadsError(f"chunk of layer {chunk['layer']} arrived damaged", where="flat refit", do=AGAIN)
        self.digest.update(found.encode())
        tensors = unflatten(flat, chunk["entries"])
        if chunk["layer"] is None:
            self._take_dense(tensors)
        else:
            self._take_experts(chunk["layer"], chunk["first_expert"], tensors)
        if flat.device.type == "cuda":
            torch.cuda.synchronize()  # the sender uses its buffer again

    def _open(self, chunk: dict[str, Any]) -> Tensor:
        size = chunk["bytes"]
        if "file" in chunk:
            flat = torch.from_numpy(numpy.fromfile(chunk["file"], dtype=numpy.uint8))
            if flat.numel() != size:
                raise QuadsError(f"{flat.numel()} bytes, not {size}", where=chunk["file"], do=AGAIN)
            return flat.to(self.device)
        mine = str(torch.cuda.get_device_properties(self.device).uuid)
        if chunk["uuid"] != mine:
            raise QuadsError(f"weights lie on GPU {chunk['uuid']}, the worker's is {mine}", where="flat refit",
                             do="colocate them, or refit through a file")  # fmt: skip
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        arguments = list(pickle.loads(base64.b64decode(chunk["ipc"])))
        arguments[6] = self.device.index or 0
        return rebuild_cuda_tensor(*arguments)[:size]

    def _take_dense(self, tensors: dict[str, Tensor]) -> None:
        for name in sorted(tensors):
            if name not in self.dense:
                raise QuadsError(f"tensor {name} is not in the running model", where="flat refit", do=AGAIN)
        if not torch.stack([t.isfinite().all() for t in tensors.values()]).all():
            raise QuadsError("a weight is not finite", where="flat refit", do="do not send a diverged model")
        if self.device.type == "cuda":
            self.model.load_weights(iter(tensors.items()))  # unquantised layers on a GPU hold what was loaded
        else:
            self._reload_dense(tensors)
        self.dense -= tensors.keys()

    def _reload_dense(self, tensors: dict[str, Tensor]) -> None:
        """On a CPU vLLM repacks weights as it loads them, so they take the way of a reload, around the experts."""
        from vllm.model_executor.model_loader.reload.layerwise import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        part: Any = _Without(self.model, [layer for layer, _ in self.methods.values()])
        initialize_layerwise_reload(part)
        self.model.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(part, self.vllm_config.model_config)

    def _take_experts(self, index: int, first: int, tensors: dict[str, Tensor]) -> None:
        if index not in self.methods or set(tensors) != set(EXPERT_KEYS):
            raise QuadsError(f"layer {index} is not quantised here", where="flat refit", do=AGAIN)
        layer, method = self.methods[index]
        mine = self._experts(layer)
        place = [e - first for e in mine]
        sent = tensors["w13"].shape[0]
        if place != list(range(place[0], place[0] + len(mine))) or place[0] < 0 or place[-1] >= sent:
            raise QuadsError(f"experts {first} to {first + sent - 1} do not cover this worker's", where=f"layer {index}",
                             do="send all of a layer's experts in one chunk")  # fmt: skip
        own = {key: t[place[0] : place[-1] + 1] for key, t in tensors.items()}
        packed = PackedExperts(
            **{k: v.view(torch.float8_e4m3fn) if k.endswith("_scale") else v for k, v in own.items()}
        )
        _require_scales(index, packed)
        method.refit(layer, packed)
        self.missing.pop(index, None)

    def finish(self) -> str:
        """The hash of all chunks; QuadsError unless every layer and tensor arrived."""
        if self.missing or self.dense:
            lacks = f"layer {min(self.missing)}" if self.missing else f"tensor {min(self.dense)}"
            raise QuadsError(f"the refit left out {lacks}", where="flat refit", do=AGAIN)
        return self.digest.hexdigest()


class _Without:
    """A model as vLLM's reload walks it, without some of its modules."""

    def __init__(self, model: Any, left_out: list[Any]) -> None:
        inside = {id(m) for layer in left_out for m in layer.modules()}
        self._modules_left = [m for m in model.modules() if id(m) not in inside]

    def modules(self) -> list[Any]:
        return self._modules_left


def _require_scales(index: int, packed: PackedExperts) -> None:
    """NaN and negative values of E4M3 have codes from 0x7f up; one host sync for all checks."""
    bad = [
        ((s.view(torch.uint8) > 0x7E) | (s.view(torch.uint8) == 0)).any() for s in (packed.w13_scale, packed.w2_scale)
    ]
    bad += [(~g.isfinite() | (g < 0)).any() for g in (packed.w13_scale_2, packed.w2_scale_2)]
    if bool(torch.stack(bad).any()):
        raise QuadsError(f"scales of layer {index} are not finite and positive", where="flat refit", do=checks.REEXPORT)
