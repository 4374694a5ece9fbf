"""HF -> Megatron -> HF, scores and exports under every parallel layout, and what other readers make of an export."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_tiny_hf, run_ranks, tiny_config
from torch import Tensor

from megatron_quads import atomic
from megatron_quads.checkpoint.hf import SafetensorsFolder, read_model_config
from megatron_quads.kernels import nvfp4
from megatron_quads.rac.metadata import RacMetadata, load_sidecar

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("checkpoint_worker.py")
LAYOUTS = {
    "ep1": (1, ""),
    "ep2": (2, "--expert-model-parallel-size 2"),
    "tp2": (2, "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"),
    "etp2": (2, "--expert-tensor-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    # every kind at once: attention TP 2, experts EP 2, two stages
    "tp2ep2pp2": (
        4,
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --expert-model-parallel-size 2 "
        "--pipeline-model-parallel-size 2",
    ),
}
# 2 layers, 8 experts, 3 projections
PROJECTIONS = 2 * 8 * 3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with and one without tied embeddings, in several shards, and tokens to score."""
    root = tmp_path_factory.mktemp("checkpoints")
    make_tiny_hf(root / "tiny", shards=3)
    make_tiny_hf(root / "tied", seed=1, tie_word_embeddings=True)
    generator = torch.Generator().manual_seed(7)
    torch.save(torch.randint(4, 500, (8, 48), generator=generator), root / "tokens.pt")
    return root


@pytest.fixture(scope="module")
def runs(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Layout name -> the folder its worker wrote; each layout runs once."""
    done: dict[str, Path | AssertionError] = {}

    def run(name: str) -> Path:
        if name not in done:
            done[name] = out = tmp_path_factory.mktemp(name)
            ranks, flags = LAYOUTS[name]
            try:
                run_ranks(ranks, WORKER, ["layout", str(root), str(out), *flags.split()], timeout=600)
            except AssertionError as e:
                done[name] = e
        found = done[name]
        if isinstance(found, AssertionError):
            raise found
        return found

    return run


@pytest.fixture(scope="module")
def references(root: Path) -> dict[str, Tensor]:
    """Log-probabilities by transformers."""
    from transformers import AutoModelForCausalLM

    tokens = torch.load(root / "tokens.pt")
    out = {}
    for name in ("tiny", "tied"):
        model = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32).eval()
        with torch.no_grad():
            logits = model(tokens).logits[:, :-1].log_softmax(-1)
        out[name] = logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return out


def models(layout: str) -> tuple[str, ...]:
    """Megatron moves a tied head of a later pipeline stage to CUDA while it builds it: not on the CPU."""
    return ("tiny",) if "pp2" in layout and not torch.cuda.is_available() else ("tiny", "tied")


def result(out: Path) -> dict[str, Any]:
    """What rank 0 found."""
    return json.loads((out / "result-0.json").read_text())


def digest(folder: Path) -> dict[str, str]:
    """sha256 of every file."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("name", LAYOUTS)
def test_round_trip_is_exact_and_scores_equal_transformers(
    name: str, root: Path, runs: Callable[[str], Path], references: dict[str, Tensor]
) -> None:
    out = runs(name)
    found = result(out)
    assert found["differ"] == []
    assert sorted(found["order"]) == sorted(n for m in models(name) for n in SafetensorsFolder(root / m).names())
    for model in models(name):
        reference = references[model]
        scores = torch.load(out / f"{model}.pt")
        assert scores.shape == reference.shape
        assert (scores - reference).abs().max() <= 1e-4
        assert reference.std() > 0.5  # the scores say something


@pytest.mark.parametrize("name", [n for n in LAYOUTS if n != "ep1"])
def test_exports_are_byte_identical_in_every_layout(name: str, runs: Callable[[str], Path]) -> None:
    one, other = runs("ep1"), runs(name)
    for export in ("packed", *(f"{m}-bf16" for m in models(name))):
        expected = digest(one / export)
        assert digest(other / export) == expected
        assert sum(f.endswith(".safetensors") for f in expected) > 1
        assert {"config.json", "tokenizer.json", atomic.MARKER} <= expected.keys()


@pytest.mark.parametrize("name", LAYOUTS)
def test_export_dequantises_to_what_the_trainer_multiplies_with(name: str, runs: Callable[[str], Path]) -> None:
    found = result(runs(name))
    assert found["compute_differ"] == []
    assert found["compared"] == found["packed"] == PROJECTIONS


def projections(folder: Path) -> list[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
    """(stem, codes, block scales, scale, input scale) of every packed projection of an export."""
    reader = SafetensorsFolder(folder)
    out = []
    for name in reader.names():
        if name.endswith(".weight_scale_2"):
            stem = name.removesuffix(".weight_scale_2")
            tensors = [reader.get(f"{stem}.{k}") for k in ("weight", "weight_scale", "weight_scale_2", "input_scale")]
            out.append((stem, *tensors))
    assert len(out) == PROJECTIONS
    return out  # type: ignore[return-value]


def test_packed_tensors_are_those_of_the_source(root: Path, runs: Callable[[str], Path]) -> None:
    source = SafetensorsFolder(root / "tiny")
    packed = SafetensorsFolder(runs("ep1") / "packed")
    experts = {n for n in source.names() if ".experts." in n}
    for name in source.names():
        if name not in experts:
            assert torch.equal(packed.get(name), source.get(name))
    for stem, codes, scales, scale, input_scale in projections(runs("ep1") / "packed"):
        weight = source.get(f"{stem}.weight")
        pair = [weight]
        if "down" not in stem:
            pair = [source.get(f"{stem.rpartition('.')[0]}.{x}_proj.weight") for x in ("gate", "up")]
        assert scale.shape == input_scale.shape == ()
        assert torch.equal(scale, nvfp4.tensor_scale(nvfp4.amax(*pair)))
        assert torch.equal(nvfp4.dequantize(codes, scales, scale), nvfp4.qdq(weight, scale))
        # the metadata's calibrated amax
        assert input_scale.item() == pytest.approx((2.25 if "down" in stem else 7.5) / 2688)


def test_modelopt_vllm_and_compressed_tensors_read_the_same_values(runs: Callable[[str], Path]) -> None:
    from compressed_tensors.compressors import unpack_fp4_from_uint8
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

    for stem, codes, scales, scale, _ in projections(runs("ep1") / "packed"):
        rows, k = codes.shape[0], codes.shape[1] * 2
        ours = nvfp4.dequantize(codes, scales, scale)
        q = NVFP4QTensor(torch.Size((rows, k)), torch.float32, codes)
        theirs = q.dequantize(torch.float32, scale=scales, double_scale=scale, block_sizes={-1: 16})
        assert torch.equal(theirs, ours), stem  # not by bits: its code 8 is +0, ours and vLLM's is -0
        theirs = dequantize_to_dtype(codes, scales, scale, torch.float32, 16, swizzle=False)
        assert torch.equal(theirs.view(torch.int32), ours.view(torch.int32)), stem
        values = unpack_fp4_from_uint8(codes, rows, k, torch.float32).unflatten(-1, (-1, 16))
        theirs = (values * (scales.float() * scale).unsqueeze(-1)).flatten(-2)
        assert torch.equal(theirs, ours), stem


def test_configuration_says_what_modelopt_would(runs: Callable[[str], Path]) -> None:
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

    folder = runs("ep1") / "packed"
    config = json.loads((folder / "config.json").read_text())
    block = config.pop("quantization_config")
    assert config == tiny_config()
    legacy = json.loads((folder / "hf_quant_config.json").read_text())
    for key, value in convert_hf_quant_config_format(legacy).items():
        assert block[key] == value, key
    hf = read_model_config(folder)
    rac = RacMetadata.from_block(block["rac"], where="config.json")
    rac.require_model(hf.shape, where="config.json")
    assert load_sidecar(folder) == rac
    assert "quads" not in block
    assert json.loads((folder / atomic.MARKER).read_text()) == {"recipe": "quads", "dtype": "float32", "version": 3}
    assert json.loads((runs("ep1") / "tiny-bf16" / "config.json").read_text()) == tiny_config(dtype="bfloat16")


def test_vllm_quantises_the_experts_and_nothing_else(runs: Callable[[str], Path]) -> None:
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    folder = runs("ep1") / "packed"
    for block in (
        json.loads((folder / "config.json").read_text())["quantization_config"],
        json.loads((folder / "hf_quant_config.json").read_text()),
    ):
        config = ModelOptNvFp4Config.from_config(block)
        config.packed_modules_mapping = {
            "qkv_proj": ["q_proj", "k_proj", "v_proj"],
            "gate_up_proj": ["gate_proj", "up_proj"],
        }
        for layer in range(2):
            p = f"model.layers.{layer}"
            for inner in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate"):
                assert config.is_layer_excluded(f"{p}.{inner}"), inner
            for inner in ("", ".gate_up_proj", ".7.gate_proj", ".7.up_proj", ".7.down_proj"):
                assert not config.is_layer_excluded(f"{p}.mlp.experts{inner}"), inner
        assert config.is_layer_excluded("lm_head")
