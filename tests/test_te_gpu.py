"""The recipe on a GPU with Transformer Engine: every GEMM against the same GEMM on DQ(Q(W)), bit for bit."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_quads.config import QuadsConfig
from megatron_quads.kernels.nvfp4 import reference as nvfp4

HAVE = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAVE, reason="needs a CUDA GPU and Transformer Engine")]
if HAVE:
    from megatron_quads import recipe
    from megatron_quads.patches import megatron_te, registry
    from megatron_quads.te import single
    from megatron_quads.te.install import install
    from megatron_quads.trainer import state as trainer_state

STEPS = 200
SPLITS = [64, 0, 128, 32]
QAT = QuadsConfig(recipe="qat")


def qdq(w: Tensor) -> Tensor:
    return nvfp4.qdq(w.detach(), nvfp4.tensor_scale(nvfp4.amax(w)))


@pytest.fixture(scope="module", autouse=True)
def parallel() -> Iterator[None]:
    single.start()
    yield


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_grouped_linear_under_the_recipe(fused: bool, dtype: torch.dtype) -> None:
    """Against the plain layer holding the quantised weights: forward, both gradients; refreshed after an update."""
    import transformer_engine.pytorch as te

    made = [te.GroupedLinear(4, 256, 512, bias=False, params_dtype=dtype, fuse_wgrad_accumulation=fused) for _ in "ab"]
    quads, plain = made
    for m in made:
        for p in m.parameters():
            p.main_grad, p.grad_added_to_main_grad = torch.zeros(p.shape, device="cuda"), False
    for step in range(3):
        with torch.no_grad():
            for a, b in zip(quads.parameters(), plain.parameters(), strict=True):
                b.copy_(qdq(a))
        for first in (True, False):
            x = torch.randn(sum(SPLITS), 256, device="cuda", dtype=dtype)
            xs = [x.clone().requires_grad_() for _ in made]
            with te.autocast(enabled=True, recipe=recipe.weight_recipe()):
                y = quads(xs[0], SPLITS, is_first_microbatch=first)
            ref = plain(xs[1], SPLITS, is_first_microbatch=first)
            assert y.equal(ref), (step, first)
            dy = torch.randn_like(y)
            y.backward(dy)
            ref.backward(dy)
            assert xs[0].grad is not None and xs[0].grad.equal(xs[1].grad)
        total = 0.0
        for a, b in zip(quads.parameters(), plain.parameters(), strict=True):
            got, expected = (a.main_grad, b.main_grad) if fused else (a.grad, b.grad)
            assert got.equal(expected)
            total += got.abs().sum().item()
            with torch.no_grad():
                a.add_(torch.randn_like(a) * 0.01)
            a.grad = b.grad = None
        assert total > 0


def test_linear_and_the_symmetric_recipe() -> None:
    import transformer_engine.pytorch as te

    m = te.Linear(256, 512, bias=False, params_dtype=torch.bfloat16)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=recipe.weight_recipe()):
        got = m(x, is_first_microbatch=None)
    weights_only = x @ qdq(m.weight).T
    assert got.equal(weights_only) or (got - weights_only).abs().max() <= 2**-8 * weights_only.abs().max()
    with te.autocast(enabled=True, recipe=recipe.symmetric_recipe()):
        both = m(x)
    with torch.no_grad():
        m.weight.copy_(qdq(m.weight))
    assert got.equal(m(x))
    assert both.equal(m(nvfp4.qdq(x, nvfp4.row_scale(x)))) and not both.equal(got)


def test_what_is_used_of_upstream_is_there() -> None:
    for patch in (megatron_te.GROUPED, megatron_te.LINEAR, megatron_te.EXTRA_STATE, *megatron_te.USES):
        registry.check(patch)


def experts_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if re.search(r"\.experts\..*linear_fc\d", n)}


def copy_quantised(source: Any, target: Any) -> None:
    """target := source, its experts' weights quantised."""
    mine = dict(target.named_parameters())
    with torch.no_grad():
        for name, p in source.named_parameters():
            mine[name].copy_(qdq(p) if name in experts_of(source) else p)


MODELS = {
    "grouped": {},
    "sequential": {"grouped": False},
    "local": {"grouped": False, "te": False, "normalization": "LayerNorm", "masked_softmax_fusion": False},
    "fp32": {"dtype": torch.float32},
    "fused": {"gradient_accumulation_fusion": True},
    "recompute_full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "recompute_moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "shared_expert": {"moe_shared_expert_intermediate_size": 128},
    "hybrid": {"hybrid": True, "qk_layernorm": False},
}
CASES = [
    (m, h) for m in MODELS for h in ("substitute", "recipe") if h == "substitute" or m not in ("sequential", "local")
]


@pytest.mark.parametrize(("name", "hook"), CASES)
def test_model(name: str, hook: str) -> None:
    """Losses and gradients of each micro-batch against a plain model that holds the quantised weights; one QDQ a step."""
    registry.apply((megatron_te.OUTPUT_LAYER,))
    shape = single.Shape()
    model, plain = single.build(shape, **MODELS[name]), single.build(shape, **MODELS[name])
    trainings = [single.Training(m, shape) for m in (model, plain)]
    done = install([model], QAT, hook=hook)
    assert done.weights == 2 * 2 * shape.experts
    for step in range(3):
        copy_quantised(model, plain)
        for t in trainings:
            t.model.zero_grad_buffer()
        seeds = [10 * step, 10 * step + 1, 10 * step + 2]
        got, expected = (torch.stack(t.run(seeds)) for t in trainings)
        assert got.equal(expected), (step, got, expected)
        reference = dict(plain.named_parameters())
        for n, p in model.named_parameters():
            assert p.main_grad.equal(reference[n].main_grad), (step, n)
        assert all(p.main_grad.abs().sum() > 0 for p in experts_of(model).values())
        assert {g.quantized for g in done.groups} == {step + 1}
        trainings[0].optimizer.step()
    copy_quantised(model, plain)
    model.eval(), plain.eval()
    ids = trainings[0].batch(99)
    with torch.no_grad():  # straight after the update, without Megatron's schedule
        assert single.losses(model, ids).equal(single.losses(plain, ids))
        single.losses(model, ids)
    assert {g.quantized for g in done.groups} == {4}
    shared = [m for n, m in model.named_modules() if "shared_experts" in n]
    assert not any(hasattr(m, "quads_weights") for m in shared) and bool(shared) == (name == "shared_expert")


def test_overlapped_parameters_and_transient_values() -> None:
    """``--overlap-param-gather`` writes parameters late; without kept values, with and without recomputation, the result
    is the same."""
    shape = single.Shape()
    results: dict[bool, list[list[Tensor]]] = {}
    again = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    fused = {"gradient_accumulation_fusion": True}
    registry.apply((megatron_te.OUTPUT_LAYER,))
    for overlap, cache, settings in (
        (False, "copy", {}), (True, "copy", again), (False, "transient", again), (False, "transient", {}),
        (False, "packed", again), (False, "packed", {}), (True, "packed", fused), (False, "packed", fused),
        (False, "copy", fused),
    ):  # fmt: skip
        model = single.build(shape, **settings)
        training = single.Training(model, shape, overlap=overlap)
        done = install([training.model], QAT, cache=cache, debug=True)
        losses = [torch.stack(training.step([i, i + 1])) for i in range(4)]
        results.setdefault(settings is fused, []).append(losses)
        kept = sum(g.nbytes for g in done.groups)
        share = {"copy": 1.0, "packed": 9 / 32, "transient": 0.0}[cache]
        assert kept == share * sum(p.nbytes for p in experts_of(model).values())
    for first, *others in results.values():  # a fused accumulation does not round to BF16 first
        assert all(a.equal(b) for other in others for a, b in zip(first, other, strict=True))


def test_frozen_experts() -> None:
    shape = single.Shape()
    model = single.build(shape)
    for p in experts_of(model).values():
        p.requires_grad_(False)
    training = single.Training(model, shape)
    done = install([training.model], QAT)
    before = {n: p.clone() for n, p in experts_of(model).items()}
    first = training.step([1])[0]
    assert training.step([1])[0] < first
    assert all(p.equal(before[n]) for n, p in experts_of(model).items()) and done.weights


@pytest.mark.parametrize("hook", ["substitute", "recipe"])
def test_two_hundred_steps_and_checkpoints(hook: str, tmp_path: Path) -> None:
    """Both hooks give the curve of the other; a torch_dist checkpoint with the recipe on: resumed, as BF16, and back."""
    from megatron.core import dist_checkpointing as ckpt

    shape = single.Shape()

    def run(n: int, training: single.Training, first: int = 0) -> Tensor:
        return torch.stack([training.step([i % 8])[0] for i in range(first, first + n)])

    def fresh(quantised: bool) -> tuple[Any, single.Training]:
        model = single.build(shape, seed=0)
        training = single.Training(model, shape)
        if quantised:
            install([training.model], QAT, hook=hook)
        return model, training

    def state(model: Any, training: single.Training, loading: bool) -> dict[str, Any]:
        trainer_state.materialize_optimizer(training.optimizer)
        metadata = trainer_state.OPTIMIZER_METADATA | _metadata()
        sharded = model.sharded_state_dict(metadata=_metadata())
        return {"model": sharded, "optimizer": training.optimizer.sharded_state_dict(sharded, is_loading=loading,
                                                                                  metadata=metadata)}  # fmt: skip

    model, training = fresh(True)
    curve = run(STEPS, training)
    assert curve[-8:].mean() < curve[:8].mean() - 0.5
    if hook == "recipe":
        other = single.build(shape, seed=0)
        second = single.Training(other, shape)
        install([second.model], QAT, hook="substitute")
        assert run(STEPS, second).equal(curve)
    ckpt.save(state(model, training, False), str(tmp_path))
    straight = run(3, training, STEPS)
    again, resumed = fresh(True)
    run(1, resumed)
    loaded = ckpt.load(state(again, resumed, True), str(tmp_path))
    again.load_state_dict(loaded["model"])
    resumed.optimizer.load_state_dict(loaded["optimizer"])
    trainer_state.separate_steps(resumed.optimizer)  # for torch's Adam
    assert run(3, resumed, STEPS).equal(straight)
    plain, bf16 = fresh(False)
    saved, _ = fresh(True)
    run(1, bf16)
    plain.load_state_dict(ckpt.load({"model": plain.sharded_state_dict(metadata=_metadata())}, str(tmp_path))["model"])
    ids = training.batch(5)
    with torch.no_grad():
        before = single.losses(plain, ids)
        for p in experts_of(plain).values():
            p.copy_(qdq(p))
        saved.load_state_dict(
            ckpt.load({"model": saved.sharded_state_dict(metadata=_metadata())}, str(tmp_path))["model"]
        )
        assert single.losses(saved, ids).equal(single.losses(plain, ids)) and not before.equal(
            single.losses(plain, ids)
        )


def _metadata() -> dict[str, Any]:
    from megatron.core import parallel_state

    return {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def test_gradients_against_fp32_autograd() -> None:
    """One expert layer in BF16 with the recipe against plain FP32 torch on the quantised weights."""
    import transformer_engine.pytorch as te

    m = te.GroupedLinear(4, 256, 512, bias=False, params_dtype=torch.bfloat16)
    x = torch.randn(sum(SPLITS), 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with te.autocast(enabled=True, recipe=recipe.weight_recipe()):
        y = m(x, SPLITS)
    dy = torch.randn_like(y)
    y.backward(dy)
    exact = x.detach().double().requires_grad_()
    weights = [qdq(p).double().requires_grad_() for p in m.parameters()]
    ref = torch.cat([a @ w.T for a, w in zip(exact.split(SPLITS), weights, strict=True)])
    ref.backward(dy.double())
    pairs = [(x.grad, exact.grad), *((p.grad, w.grad) for p, w in zip(m.parameters(), weights, strict=True))]
    for got, expected in pairs:
        assert got is not None and expected is not None
        assert (got.double() - expected).norm() <= 3e-3 * expected.norm().clamp(min=1e-9)


FLAGS = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --kv-channels 64 "
    "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 "
    "--lr-decay-style constant --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-grouped-gemm --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 500 --bf16 --swiglu --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type rope --no-rope-fusion --untie-embeddings-and-output-weights --use-distributed-optimizer --log-interval 1 "
    "--eval-interval 1000 --eval-iters 1 --transformer-impl transformer_engine --moe-token-dispatcher-type alltoall "
    "--ckpt-format torch_dist --hidden-dropout 0 --attention-dropout 0 --split 90,5,5 --no-bias-swiglu-fusion"
)


def pretrain(*flags: str) -> dict[int, tuple[str, str]]:
    """One-GPU run of ``python -m megatron_quads.train``: the logged loss and gradient norm of each iteration."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--master-port", "29613",
         "-m", "megatron_quads.train", *FLAGS.split(), *flags],
        capture_output=True, text=True, timeout=240, env={**os.environ, "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    if "bf16" not in flags:
        assert "expert linears with 32 weights on this rank" in done.stdout + done.stderr
    return logged(done.stdout + done.stderr)


def logged(text: str) -> dict[int, tuple[str, str]]:
    found = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+).*?grad norm: (\S+)", text)
    return {int(i): (loss, norm) for i, loss, norm in found}


@pytest.mark.slow
def test_pretrain_command(tmp_path: Path) -> None:
    """Trains, saves, resumes to the same losses and gradient norms; differs from BF16, which loads its checkpoint.

    After a process's first iteration Megatron logs, as the second's loss, the mean of both (plain BF16 as well).
    """
    save = ["--save", str(tmp_path / "q"), "--save-interval", "3"]
    straight = pretrain("--quads-recipe", "quads", "--train-iters", "6", *save)
    assert sorted(straight) == [1, 2, 3, 4, 5, 6]
    (tmp_path / "q" / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = pretrain("--quads-recipe", "quads", "--train-iters", "6", "--load", str(tmp_path / "q"))
    assert sorted(resumed) == [4, 5, 6]
    assert resumed[4] == straight[4] and resumed[6] == straight[6] and resumed[5][1] == straight[5][1]
    assert float(resumed[5][0]) == pytest.approx((float(straight[4][0]) + float(straight[5][0])) / 2, abs=1e-6)
    as_bf16 = pretrain("--quads-recipe", "bf16", "--train-iters", "6", "--load", str(tmp_path / "q"))
    assert sorted(as_bf16) == [4, 5, 6] and as_bf16 != resumed
