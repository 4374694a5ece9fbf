"""Experts packed many at a time: the same bytes as one at a time, faults by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import make_tiny_hf
from torch import Tensor

from megatron_quads.checkpoint import input_scale
from megatron_quads.checkpoint.hf import HFModel, read_model_config
from megatron_quads.checkpoint.mapping import Unit, units
from megatron_quads.checkpoint.packing import encoded
from megatron_quads.errors import QuadsError
from megatron_quads.kernels import nvfp4

LAYERS = [1]  # of two: layer 0 stays as it is


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> HFModel:
    return read_model_config(make_tiny_hf(tmp_path_factory.mktemp("hf")))


def _stream(hf: HFModel, change: dict[str, float] | None = None) -> Iterator[tuple[Unit, list[Tensor]]]:
    generator = torch.Generator().manual_seed(5)
    for unit in units(hf):
        tensors = [torch.randn(shape, generator=generator) * 0.05 for shape in unit.shapes]
        for name, tensor in zip(unit.names, tensors, strict=True):
            if change and name in change:
                tensor.view(-1)[7] = change[name]
        yield unit, tensors


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_any_size_give_the_bytes_of_one_expert_at_a_time(hf: HFModel, dtype: torch.dtype) -> None:
    found = dict(encoded(_stream(hf), LAYERS, None, dtype))
    small = list(encoded(_stream(hf), LAYERS, None, dtype, group_bytes=1))
    assert list(found) == [name for name, _ in small]
    assert all(_bytes(found[name]) == _bytes(tensor) for name, tensor in small)
    gamma = torch.ones(0)
    packed = 0
    for unit, tensors in _stream(hf):
        cast = [t.to(dtype) for t in tensors]
        if unit.key == f"{unit.layer}.pre_mlp_layernorm":
            gamma = cast[0]
        if unit.expert is None or unit.layer not in LAYERS:
            assert all(torch.equal(found[n], t) for n, t in zip(unit.names, cast, strict=True))
            continue
        scale = nvfp4.tensor_scale(nvfp4.amax(*cast))
        for name, tensor in zip(unit.names, cast, strict=True):
            stem = name.removesuffix(".weight")
            codes, s8 = nvfp4.quantize(tensor, scale)
            assert torch.equal(found[name], codes) and _bytes(found[f"{stem}.weight_scale"]) == _bytes(s8)
            assert torch.equal(found[f"{stem}.weight_scale_2"], scale)
            packed += 1
        if unit.layout == "glu":
            into, inner = input_scale.input_amax(gamma, [(cast[0], cast[1])])
            stem = unit.names[0].removesuffix(".gate_proj.weight")
            for projection, amax in (("gate_proj", into), ("up_proj", into), ("down_proj", inner[0])):
                assert torch.equal(found[f"{stem}.{projection}.input_scale"], input_scale.to_scale(amax))
    assert packed == 3 * hf.num_experts


def test_a_refit_leaves_out_the_input_scales_only(hf: HFModel) -> None:
    whole = [n for n, _ in encoded(_stream(hf), LAYERS, None, torch.bfloat16)]
    sent = [n for n, _ in encoded(_stream(hf), LAYERS, None, torch.bfloat16, input_scales=False)]
    assert sent == [n for n in whole if not n.endswith(".input_scale")] and len(sent) < len(whole)


@pytest.mark.parametrize(
    ("name", "value", "dtype"),
    [
        ("model.layers.1.mlp.experts.2.up_proj.weight", float("nan"), torch.bfloat16),
        ("model.layers.1.mlp.experts.1.down_proj.weight", float("-inf"), torch.float32),
        ("model.layers.1.mlp.experts.3.gate_proj.weight", 1e6, torch.float16),  # finite before the cast
        ("model.layers.0.mlp.experts.0.down_proj.weight", float("inf"), torch.bfloat16),
        ("model.norm.weight", float("nan"), torch.bfloat16),
    ],
)
def test_a_value_that_is_not_finite_is_named(hf: HFModel, name: str, value: float, dtype: torch.dtype) -> None:
    given: list[str] = []
    with pytest.raises(QuadsError, match="NaN or Inf") as error:
        for found, _ in encoded(_stream(hf, {name: value}), LAYERS, None, dtype):
            given.append(found)
    assert name in str(error.value) and name not in given


def test_experts_are_not_held_beyond_the_limit(hf: HFModel, tmp_path: Path) -> None:
    """What is taken from the stream before something is given is a whole expert, and no more than that."""
    taken: list[Unit] = []

    def watched() -> Iterator[tuple[Unit, list[Tensor]]]:
        for unit, tensors in _stream(hf):
            taken.append(unit)
            yield unit, tensors

    for name, _ in encoded(watched(), LAYERS, None, torch.bfloat16, group_bytes=1):
        if name.startswith("model.layers.1.mlp.experts.") and name.endswith(".weight"):
            expert = int(name.split(".")[5])
            ahead = [u for u in taken if u.layer == 1 and u.expert is not None and u.expert > expert]
            assert len(ahead) <= 1
