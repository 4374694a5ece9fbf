"""Recipe fp8: its rounding, the real vLLM on it against Transformers, refits, and the proof after each of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import make_tiny_hf
from rollout_helpers import HFReference, reference_experts, write_export
from safetensors.torch import load_file, save_file
from test_rl_loop import SMALL, TASK
from torch import Tensor

from megatron_quads.checkpoint.quantization_config import fp8_config, fp8_layers
from megatron_quads.digest import differing_bits
from megatron_quads.errors import QuadsError
from megatron_quads.kernels import fp8
from megatron_quads.rl.held import is_expert, rollout_tensors
from megatron_quads.rl.metrics import read_rows
from megatron_quads.rl.tasks import make_task
from megatron_quads.rl.tiny import TinyModel, make_tiny_checkpoint
from megatron_quads.rollout import LocalRollout

LAYERS = [0, 2]  # of three; the middle one stays unquantised


def _bits(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


def _values() -> Tensor:
    """Every finite E4M3 value, by code 0 to 126."""
    return torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_scales_are_those_of_ieee_division_and_torchs_cast(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64, 96, generator=draw) * torch.logspace(-6, 3, 64).unsqueeze(-1)
    x[:, 7], x[3], x[4] = 0.0, 0.0, -0.0
    x = x.to(dtype)
    codes, scale = fp8.quantize(x)
    values = x.float().numpy()
    want = np.maximum(np.abs(values).max(-1) / np.float32(448), np.float32(1 / (448 * 512)))
    assert scale.dtype == torch.float32 and np.array_equal(scale.numpy(), want)
    cast = torch.from_numpy(np.clip(values / want[:, None], -448, 448)).to(torch.float8_e4m3fn)
    assert codes.dtype == torch.float8_e4m3fn and torch.equal(_bits(codes), _bits(cast))
    assert not _bits(codes[3]).any() and scale[3] == fp8.MIN_SCALE and not fp8.dequantize(codes, scale)[3:5].any()
    # a row's codes are its own: whole or in parts, the same
    parts = [fp8.quantize(p)[0] for p in x.chunk(4)]
    assert torch.equal(_bits(torch.cat(parts)), _bits(codes))


def test_ties_go_to_even_codes() -> None:
    """At scale 1: all E4M3 values stay, all midpoints round to the even neighbour, and a hair off them to the nearest."""
    values = _values()
    middle = (values[1:] + values[:-1]) / 2
    low = torch.arange(126, dtype=torch.uint8)
    up = torch.nextafter(middle, torch.tensor(1e9))
    down = torch.nextafter(middle, torch.tensor(-1.0))
    for x, want in ((values, torch.arange(127)), (middle, low + low % 2), (up, low + 1), (down, low)):
        for sign in (1, -1):
            codes, scale = fp8.quantize(sign * torch.cat([x, torch.tensor([448.0])]))
            assert scale == 1.0 and torch.equal(_bits(codes[:-1]) & 0x7F, want.to(torch.uint8))


def test_equal_to_vllms_own_online_fp8_with_channel_scales() -> None:
    online = pytest.importorskip("vllm.model_executor.layers.quantization.online.fp8")
    x = torch.randn(200, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[5], x[6] = 0.0, 1e-4
    scale = online._fp8_channel_scale(x.abs().amax(-1, keepdim=True))
    codes, mine = fp8.quantize(x)
    assert torch.equal(mine, scale.squeeze(-1))
    assert torch.equal(_bits(codes), _bits(online._fp8_quant_per_channel(x, scale)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_has_a_scale_that_is_not(value: float) -> None:
    x = torch.ones(3, 16)
    x[1, 4] = value
    assert fp8.quantize(x)[1].isfinite().tolist() == [True, False, True]


def test_experts_equal_one_token_at_a_time() -> None:
    from megatron_quads.rollout.fp8 import experts_forward

    draw = torch.Generator().manual_seed(2)
    w13, w2 = torch.randn(4, 64, 48, generator=draw) / 7, torch.randn(4, 48, 32, generator=draw) / 5
    x, probs = torch.randn(20, 48, generator=draw), torch.rand(20, 2, generator=draw)
    ids = torch.randint(-1, 4, (20, 2), generator=draw)  # -1: an expert of another rank
    held = [fp8.quantize(w) for w in (w13, w2)]
    act = lambda _, a: fp8.dequantize(*fp8.quantize(a))  # noqa: E731
    want = reference_experts(x, ids, probs, *(fp8.dequantize(*h) for h in held), act)
    got = experts_forward(x, probs, ids, *held)
    assert (
        (got - want).abs().max() < 1e-5 < (got - reference_experts(x, ids, probs, w13, w2, lambda _, a: a)).abs().max()
    )


def test_a_block_of_another_form_is_refused() -> None:
    good = fp8_config(LAYERS)
    assert fp8_layers(good, where="x") == LAYERS and fp8_layers({"quant_method": "modelopt"}, where="x") is None
    for change in ({"layers": []}, {"layers": [0.5]}, {"weights": "e5m2"}, {"activations": None}):
        with pytest.raises(QuadsError, match="cannot serve"):
            fp8_layers({**good, **change}, where="x")


class Fp8Reference(HFReference):
    """Transformers with the experts' weights and, if ``quantize``, their inputs through FP8 and back."""

    quantize = True

    def _activate(self, layer: int, gemm: str, x: Tensor) -> Tensor:
        return fp8.dequantize(*fp8.quantize(x)) if self.quantize and layer in LAYERS else x


class Setup:
    """Two sets of weights and their exports; an engine on the first."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sources = [make_tiny_hf(root / f"hf{i}", seed=i, num_hidden_layers=3) for i in range(2)]
        self.weights = [load_file(s / "model.safetensors") for s in self.sources]
        self.rollout = LocalRollout(self.export(0, 0), max_model_len=64, log=root / "rollout.log")
        self.tokens = torch.randint(3, 500, (8, 40), generator=torch.Generator().manual_seed(0))

    def export(self, i: int, version: int, poke: tuple[str, float] | None = None) -> Path:
        """``poke``: (name, value) of a tensor whose element [3, 5] is overwritten."""

        def mutate(tensors: dict[str, Tensor], config: dict) -> None:
            config["quantization_config"] = fp8_config(LAYERS)
            if poke is not None:
                tensors[poke[0]] = tensors[poke[0]].clone()
                tensors[poke[0]][3, 5] = poke[1]

        return write_export(self.sources[i], self.root / f"v{version}", quantized=False, version=version, mutate=mutate)

    def held(self, i: int) -> dict[str, Tensor]:
        """What a rollout of these weights must hold."""
        named = self.weights[i].items()
        return {k: t for n, w in named if is_expert(n) for k, t in rollout_tensors(n, w, LAYERS)}

    def scores(self) -> Tensor:
        return torch.tensor(self.rollout.score(self.tokens.tolist()))

    def bits(self, i: int) -> dict[str, int]:
        save_file(self.held(i), self.root / "held.safetensors")
        return self.rollout.count_bits(self.root / "held.safetensors")


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    made = Setup(tmp_path_factory.mktemp("fp8"))
    yield made
    made.rollout.close()


def _against_transformers(setup: Setup, i: int, got: Tensor) -> None:
    layers = tuple(f"layers.{n}.mlp.experts." for n in LAYERS)
    weights = {
        n: fp8.dequantize(*fp8.quantize(w)) if any(x in n for x in layers) else w for n, w in setup.weights[i].items()
    }
    reference = Fp8Reference(setup.sources[i], weights, None, setup.root / f"reference{i}")
    gap = (got - reference.score(setup.tokens)).abs()
    reference.quantize = False
    unquantised = (got - reference.score(setup.tokens)).abs()
    print(f"to W8A8: median {gap.median():.1e} mean {gap.mean():.1e}; to W8A16: mean {unquantised.mean():.1e}")
    assert gap.median() < 2e-6 and gap.mean() < 0.02 * unquantised.mean()


@pytest.mark.slow
def test_the_engine_computes_w8a8(setup: Setup) -> None:
    info = setup.rollout.info()
    assert (info.quant_method, info.activation, info.backend) == ("quads_fp8", "w8a8", "emulation")
    assert info.quantized_layers == LAYERS and info.version == 0 and info.rac_hash is None
    setup.rollout.assert_active()
    _against_transformers(setup, 0, setup.scores())
    assert setup.bits(0).keys() == setup.held(0).keys() and not any(setup.bits(0).values())


@pytest.mark.slow
def test_a_refit_equals_a_fresh_engine(setup: Setup) -> None:
    fresh, audit = setup.scores(), setup.rollout.audit()
    setup.rollout.update_weights(setup.export(1, 1), 1)
    other = setup.scores()
    _against_transformers(setup, 1, other)
    assert not any(setup.bits(1).values()) and not torch.equal(other, fresh)
    setup.rollout.update_weights(setup.export(0, 2), 2)
    assert torch.equal(setup.scores(), fresh) and setup.rollout.audit() == audit


@pytest.mark.slow
def test_a_weight_that_differs_is_counted_in_codes_and_scale(setup: Setup) -> None:
    name = "model.layers.2.mlp.experts.1.up_proj.weight"
    damaged = setup.weights[0][name].clone()
    damaged[3, 5] = 1.5 * damaged[3].abs().max()
    setup.rollout.update_weights(setup.export(0, 3, (name, float(damaged[3, 5]))), 3)
    mine, theirs = setup.held(0), dict(rollout_tensors(name, damaged, LAYERS))
    want = {k: differing_bits(mine[k], theirs[k]) for k in theirs}
    assert min(want.values()) > 0 and {k: n for k, n in setup.bits(0).items() if n} == want


@pytest.mark.slow
def test_other_layers_and_nan_are_refused(setup: Setup) -> None:
    """Last: the engine has no whole set of weights afterwards."""

    def fewer(tensors: dict[str, Tensor], config: dict) -> None:
        config["quantization_config"] = fp8_config([0])

    other = write_export(setup.sources[0], setup.root / "fewer", quantized=False, version=4, mutate=fewer)
    with pytest.raises(QuadsError, match=r"quantization_config\.layers \[0\] differs from the running \[0, 2\]"):
        setup.rollout.update_weights(other, 4)
    assert setup.rollout.info().version == 3
    name = "model.layers.2.mlp.experts.1.up_proj.weight"
    with pytest.raises(QuadsError, match=r"not finite"):
        setup.rollout.update_weights(setup.export(0, 5, (name, float("nan"))), 5)
    assert setup.rollout.info().version is None


@pytest.mark.slow
def test_quads_rl_and_a_damaged_third_refit(tmp_path: Path) -> None:
    """Two steps whose refits are proved; the third is damaged in the rollout: counted, noted, and the end of the run."""
    task = make_task("spell_backward", {"min_word_len": 4, "max_word_len": 6})
    model = make_tiny_checkpoint(
        tmp_path / "init", 0, task=task, model=TinyModel(hidden=64, moe_intermediate=64, experts=4)
    )
    run = tmp_path / "run"
    words = [
        "rl",
        "--model",
        model,
        "--out",
        run,
        *TASK,
        *SMALL,
        "--steps",
        "3",
        "--lr",
        "1e-3",
        "--micro-batch-size",
        "8",
    ]
    words += ["--quads-recipe", "fp8"]
    worker = Path(__file__).parent / "fp8_worker.py"
    done = subprocess.run([sys.executable, worker, "3", *map(str, words)], capture_output=True, text=True, timeout=400)
    assert [r["weight_bits_mismatched"] for r in read_rows(run / "metrics.jsonl")] == [0, 0], done.stdout + done.stderr
    audit = read_rows(run / "audit.jsonl")
    assert [(a["tensors"], a["bits_mismatched"]) for a in audit[:3]] == [(2 * 4 * 3 * 2, 0)] * 3
    assert all(a["trainer"] == a["rollout"] for a in audit[:3]) and len({a["trainer"] for a in audit[:3]}) == 3
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    held = [
        dict(rollout_tensors(name, load_file(run / f / "model.safetensors")[name], [1]))
        for f in ("refit/v000003", "bad")
    ]
    bits = sum(differing_bits(held[0][k], held[1][k]) for k in held[0])
    assert (audit[3]["tensors_differing"], audit[3]["bits_mismatched"]) == (2, bits) and bits > 0
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"quads: error: {name} differs between trainer and rollout ({bits} bits in 2 of 48 tensors)")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_vllms_triton_experts_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BF16 under CUDA graphs: codes, scales and refits as on a CPU; log-probs near those of the emulation, eager."""
    monkeypatch.delenv("QUADS_GPU_MEMORY_FRACTION", raising=False)
    monkeypatch.setenv("QUADS_KV_CACHE_GIB", "1")

    def mutate(tensors: dict[str, Tensor], config: dict) -> None:
        config["quantization_config"] = fp8_config([0, 1])
        config["dtype"] = "bfloat16"
        tensors |= {n: t.bfloat16() for n, t in tensors.items()}

    sources = [make_tiny_hf(tmp_path / f"hf{i}", seed=i, hidden_size=256, moe_intermediate_size=128) for i in range(2)]
    exports = [
        write_export(sources[i], tmp_path / f"v{v}", quantized=False, version=v, mutate=mutate)
        for v, i in enumerate((0, 1, 0))
    ]
    tokens = torch.randint(3, 500, (8, 40), generator=torch.Generator().manual_seed(0)).tolist()
    ask = {"n": 2, "max_tokens": 16, "temperature": 1.0, "seed": 3}
    prompts = [t[:8] for t in tokens]
    with LocalRollout(exports[0], dtype="bfloat16", max_model_len=64, log=tmp_path / "graphs.log") as rollout:
        assert rollout.info().backend == "triton"
        first, audit, sampled = torch.tensor(rollout.score(tokens)), rollout.audit(), rollout.generate(prompts, **ask)
        held = {
            k: t
            for n, w in load_file(sources[0] / "model.safetensors").items()
            if is_expert(n)
            for k, t in rollout_tensors(n, w.bfloat16().cuda(), [0, 1])
        }
        save_file({k: t.cpu() for k, t in held.items()}, tmp_path / "held.safetensors")
        assert not any(rollout.count_bits(tmp_path / "held.safetensors").values())
        rollout.update_weights(exports[1], 1)
        second, other = torch.tensor(rollout.score(tokens)), rollout.generate(prompts, **ask)
        assert other != sampled and rollout.audit() != audit
        rollout.update_weights(exports[2], 2)
        assert rollout.audit() == audit and rollout.generate(prompts, **ask) == sampled
        assert torch.equal(torch.tensor(rollout.score(tokens)), first)
    monkeypatch.setenv("QUADS_KERNEL", "emulation")
    with LocalRollout(exports[0], dtype="bfloat16", max_model_len=64, log=tmp_path / "eager.log") as eager:
        assert eager.info().backend == "emulation" and eager.audit() == audit
        gap = (torch.tensor(eager.score(tokens)) - first).abs()
    print(
        f"triton against emulation: mean {gap.mean():.1e} max {gap.max():.1e}; other weights {(second - first).abs().mean():.1e}"
    )
    assert gap.mean() < 0.05 * (second - first).abs().mean()
