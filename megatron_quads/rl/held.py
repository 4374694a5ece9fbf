"""What a rollout must hold of the trainer's experts: the tensors that are proved equal after each refit."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor

from ..checkpoint.gather import iter_hf_tensors
from ..checkpoint.hf import HFModel
from ..config import QuadsConfig
from ..digest import Digests
from ..kernels import fp8
from ..trainer.trainer import Trainer


def is_expert(name: str) -> bool:
    """Whether a HF tensor name is a routed expert's weight."""
    return ".mlp.experts." in name and name.endswith("_proj.weight")


def rollout_tensors(name: str, weight: Tensor, fp8_layers: Collection[int]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of what the rollout multiplies with for an expert's compute weight [N, K]: that weight itself.

    In ``fp8_layers``, what ``kernels/fp8.py`` makes of it: codes e4m3 [N, K], and as ``NAME_scale`` row scales fp32 [N].
    """
    if int(name.split(".layers.")[1].split(".")[0]) not in fp8_layers:
        yield name, weight
        return
    codes, scale = fp8.quantize(weight)
    yield name, codes
    yield f"{name}_scale", scale


def gather(
    trainer: Trainer, hf: HFModel, quads: QuadsConfig, *, keep: bool
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Collective: on rank 0 the digests of all ``rollout_tensors`` and, with ``keep``, the tensors on the host."""
    layers = quads.quantized_layers(hf.num_layers) if quads.fp8_rollout else []
    digests, kept = Digests(), {}
    for name, weight in iter_hf_tensors(trainer.chunks, hf, weights="compute"):
        if not is_expert(name):
            continue
        for key, tensor in rollout_tensors(name, weight, layers):
            digests.add(key, tensor)
            if keep:
                kept[key] = tensor.detach().cpu().contiguous()
    return digests.finish(), kept
