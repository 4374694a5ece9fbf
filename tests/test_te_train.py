"""``python -m megatron_quads.train`` before anything starts: what it refuses, in one line with the flag and the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

from megatron_quads.bench_train import covered
from megatron_quads.checkpoint.hf import read_model_config
from megatron_quads.checkpoint.mapping import unit_key
from megatron_quads.config import QuadsConfig
from megatron_quads.errors import QuadsError
from megatron_quads.patches import megatron_te, registry
from megatron_quads.te import arguments
from megatron_quads.train import parse

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --lr 1e-3 --train-iters 2 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 100 --bf16 --swiglu --disable-bias-linear --transformer-impl local "
    "--no-gradient-accumulation-fusion"
)
REFUSED = [
    ("--fp8-format hybrid", "[--fp8-format]; leave it out"),
    ("--fp4-format e2m1", "[--fp4-format]; leave it out"),
    ("--fp4-format e2m1 --fp4-param-gather --quads-recipe qat", "[--fp4-format]; leave it out"),
    ("--fp8-param-gather", "[--fp8-param-gather]; leave it out"),
    ("--moe-single-grouped-weight", "[--moe-single-grouped-weight]; leave it out"),
    ("--delay-wgrad-compute", "[--delay-wgrad-compute]; leave it out"),
    ("--use-transformer-engine-op-fuser", "[--use-transformer-engine-op-fuser]; leave it out"),
    ("--use-megatron-fsdp", "[--use-megatron-fsdp]; use the distributed optimizer"),
    ("--cuda-graph-impl local", "[--cuda-graph-impl]; add --cuda-graph-modules attn"),
    ("--tensor-model-parallel-size 2", "Megatron sets it to the tensor parallel size, 2"),
    ("--tensor-model-parallel-size 2 --expert-tensor-parallel-size 4", "32 over 4 expert tensor parallel ranks is not"),
    ("--hidden-size 72", "72 is not a multiple of 16 [--hidden-size]"),
    ("--moe-ffn-hidden-size 40", "40 is not a multiple of 16 [--moe-ffn-hidden-size]"),
    ("--quads-recipe fp8", "use bf16 with Megatron's --fp8-format"),
    ("--quads-weight-cache packed --quads-weight-hook recipe", "[--quads-weight-hook recipe]; use substitute"),
    ("--quads-recipe symmetric --quads-activation-scale tensor", "[--quads-activation-scale]; use token"),
    ("--quads-module-pattern nothing.*", "matches no layer of 4"),
    ("--quads-keep-first-layers 2 --quads-keep-last-layers 2", "matches no layer of 4"),
    ("--transformer-impl transformer_engine", "transformer-engine"),
    ("--quads-weight-hook recipe", "transformer-engine"),
    ("--sft", "[--sft]; add the recipe's two lines"),
    ("--gradient-accumulation-fusion-is-no-flag", "unrecognized arguments"),
    ("--quads-weight-cache none", "invalid choice: 'none'"),
]


@pytest.fixture(autouse=True)
def no_te(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "te_version", lambda: None)


@pytest.mark.parametrize(("flags", "said"), REFUSED, ids=[f for f, _ in REFUSED])
def test_refused_in_one_line(flags: str, said: str) -> None:
    with pytest.raises(QuadsError) as error:
        parse([*BASE.split(), *flags.split()])
    assert said in str(error.value) and "\n" not in str(error.value) and error.value.exit_code == 2


def test_dense_models_and_missing_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = BASE.replace("--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32", "")
    with pytest.raises(QuadsError, match="this model is dense"):
        parse(dense.split())
    fused = BASE.replace("--no-gradient-accumulation-fusion", "")
    if not megatron_te.has_apex_fusion():
        with pytest.raises(QuadsError, match=r"NVIDIA apex .*--no-gradient-accumulation-fusion"):
            parse(fused.split())
    monkeypatch.setattr(megatron_te, "has_apex_fusion", lambda: True)
    if not torch.cuda.is_available():
        with pytest.raises(QuadsError, match="needs a GPU"):  # and nothing else
            parse(fused.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="says that a GPU is needed")
@pytest.mark.parametrize(
    "flags",
    [
        "--quads-weight-cache transient",
        "--quads-weight-cache packed --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--cuda-graph-impl local --cuda-graph-modules attn",
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 2",
        "--quads-recipe bf16 --fp8-format hybrid",
    ],
)
def test_accepted_up_to_the_gpu(flags: str) -> None:
    with pytest.raises(QuadsError, match=r"needs a GPU .*quads rl"):
        parse([*BASE.split(), *flags.split()])


@pytest.mark.parametrize(
    ("version", "hook", "said"),
    [
        (None, "substitute", "is not installed"),
        (
            "2.13.0",
            "substitute",
            r"2\.13\.0 is too old: 2\.14 is needed .*install transformer-engine\[pytorch\]>=2\.14",
        ),
        ("2.18.0", "recipe", r"2\.18\.0 is too old: 2\.19 is needed .*or use --quads-weight-hook substitute"),
        ("2.18.0", "substitute", ""),
        ("2.19.0", "recipe", ""),
    ],
)
def test_transformer_engine_versions(
    monkeypatch: pytest.MonkeyPatch, version: str | None, hook: str, said: str
) -> None:
    monkeypatch.setattr(arguments, "te_version", lambda: Version(version) if version else None)
    if not said:
        assert str(arguments.require_te(hook)) == version
        return
    with pytest.raises(QuadsError, match=said):
        arguments.require_te(hook)


def test_each_upstream_symbol_is_recorded() -> None:
    every = (
        megatron_te.DATASET_HELPERS,
        megatron_te.GROUPED,
        megatron_te.LINEAR,
        megatron_te.EXTRA_STATE,
        megatron_te.OUTPUT_LAYER,
        *megatron_te.LOCAL,
    )
    for patch in (*every, *megatron_te.USES):
        assert (
            patch.why
            and patch.remove_when
            and patch.upstream.startswith("https://")
            and patch.versions.startswith(">=")
        )
    assert len({p.name for p in every}) == 7
    assert megatron_te.required("substitute", {"grouped"}) == (megatron_te.GROUPED,)
    assert megatron_te.required("substitute", {"te", "local"}) == (megatron_te.LINEAR, *megatron_te.LOCAL)


@pytest.mark.parametrize(
    "patch", [megatron_te.OUTPUT_LAYER, megatron_te.DATASET_HELPERS, *megatron_te.LOCAL], ids=lambda p: p.target
)
def test_megatron_patches_fit_the_installed_package(patch: registry.Patch) -> None:
    registry.check(patch)


def test_substituted_weights_under_an_autocast_are_refused() -> None:
    """A Transformer Engine layer notes in ``fp8`` whether it runs under an autocast before it asks for its weights."""

    class Layer:
        fp8 = False

    layer, weights = Layer(), SimpleNamespace(substituted=True, given=lambda: ["quantised"])
    ask = megatron_te.GROUPED.make(lambda self: ["own"])
    assert ask(layer) == ["own"]
    layer.quads_weights = weights  # type: ignore[attr-defined]
    assert ask(layer) == ["quantised"]
    layer.fp8 = True
    with pytest.raises(QuadsError, match=r"a second way \[expert Layer\]; leave the experts out of te\.autocast"):
        ask(layer)
    weights.substituted = False  # the recipe hook works under one
    assert ask(layer) == ["own"]


def test_the_recipe_needs_transformer_engine() -> None:
    from megatron_quads import recipe

    with pytest.raises(QuadsError, match="transformer-engine is not installed"):
        recipe.weight_recipe()
    with pytest.raises(QuadsError, match="not installed"):
        recipe.factory(None)
    assert QuadsConfig(recipe="qat").quantized_trainer


@pytest.mark.skipif(torch.cuda.is_available(), reason="says that a GPU is needed")
def test_the_benchmark_needs_a_gpu(tmp_path: Path) -> None:
    from megatron_quads.bench_train import train

    with pytest.raises(QuadsError, match=r"no CUDA GPU .*quads bench train"):
        train(tmp_path / "train.json")
    assert not list(tmp_path.iterdir())


def test_gpu_time_counts_work_on_several_streams_once() -> None:
    assert covered([(5, 6), (0, 2), (1, 3), (5.5, 5.75), (6, 7)]) == 5 and covered([]) == 0


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("decoder.layers.0.mlp.experts.linear_fc1.weight3", "5.11.fc1"),
        ("decoder.layers.1.mlp.experts.linear_fc2.weight0", "6.8.fc2"),
        ("decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", "6.input_layernorm"),
        ("decoder.layers.1.self_attention.linear_qkv.weight", "6.self_attention.linear_qkv"),
    ],
)
def test_names_of_transformer_engines_layers(tiny_hf: Path, name: str, key: str) -> None:
    """In a stage whose first layer is 5 and on a rank whose first expert is 8."""
    hf = read_model_config(tiny_hf)
    assert unit_key(name, layer_of=[5, 6], first_expert=8, hf=hf) == key
    with pytest.raises(QuadsError, match="no counterpart"):
        unit_key(name.replace("linear", "adapter"), layer_of=[5, 6], first_expert=8, hf=hf)


@pytest.mark.slow
def test_one_line_from_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megatron_quads.train", *BASE.split(), "--moe-single-grouped-weight"],
        capture_output=True, text=True, timeout=200, env={**os.environ, "RANK": "0", "WORLD_SIZE": "1"},
    )  # fmt: skip
    assert done.returncode == 2
    assert (
        done.stderr.strip().splitlines()[-1].startswith("quads: error: experts' weights must be separate [--moe-single")
    )
    assert "Traceback" not in done.stderr
