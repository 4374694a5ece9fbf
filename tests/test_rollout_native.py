"""Experts on packed operands: all of the native path but the FP4 MMA, on the CPU."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import make_tiny_hf
from rollout_helpers import HFReference, dequantized, half_metadata, reference_experts, write_export
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_quads.digest import tensor_digest as digest
from megatron_quads.kernels import nvfp4, rac
from megatron_quads.kernels.rac import frontend
from megatron_quads.rollout import native_gemm
from megatron_quads.rollout.backends import ActivationPlan, EmulationBackend, PackedExperts
from megatron_quads.rollout.prepared import PreparedPlan
from megatron_quads.rollout.process import engine_environment

E, H, INTER, K = 6, 96, 80, 2
CPU = torch.device("cpu")
LISTED, LEADING = torch.tensor([1, 4, 5]), torch.arange(2)
WIDTH = {"gate_up": H, "down": INTER}


def _packed(seed: int = 0) -> PackedExperts:
    """Experts whose FP32 scales differ by more than a thousandfold, one expert of zeros."""
    gen = torch.Generator().manual_seed(seed)
    w13, w2 = torch.randn(E, 2 * INTER, H, generator=gen), torch.randn(E, H, INTER, generator=gen)
    size = torch.logspace(-2, 1.2, E)[:, None, None]
    w13, w2 = w13 * size, w2 * size.flip(0)
    w2[2] = 0
    scales = [torch.stack([nvfp4.tensor_scale(nvfp4.amax(w[e])) for e in range(E)]) for w in (w13, w2)]
    (c1, s1), (c2, s2) = (nvfp4.quantize(w, s[:, None, None]) for w, s in zip((w13, w2), scales, strict=True))
    return PackedExperts(c1, s1, scales[0], c2, s2, scales[1])


def _inputs(tokens: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Expert 3 is never hit; some slots belong to other ranks."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, H, generator=gen) * torch.rand(tokens, 1, generator=gen) * 5
    some = torch.tensor([e for e in range(E) if e != 3])
    ids = torch.stack([some[torch.randperm(E - 1, generator=gen)[:K]] for _ in range(tokens)]).view(tokens, K)
    ids[torch.rand(tokens, K, generator=gen) < 0.1] = -1
    return x, torch.rand(tokens, K, generator=gen), ids


def _plan(mode: str, scale: str = "token") -> ActivationPlan:
    return ActivationPlan(mode, scale, {"gate_up": LISTED, "down": LEADING}, {"gate_up": 9.0, "down": 70.0})


@pytest.mark.parametrize("tokens", [1, 7, 33])
@pytest.mark.parametrize("mode", ["w4a4", "rac"])
@pytest.mark.parametrize("scale", ["token", "static"])
def test_experts_are_the_contracts(mode: str, scale: str, tokens: int) -> None:
    packed, (x, probs, ids) = _packed(), _inputs(tokens)
    plan = _plan(mode, scale)
    got = native_gemm.forward(x, probs, ids, packed, PreparedPlan(plan, WIDTH, CPU))
    emulation = EmulationBackend()
    emulation.load(packed, torch.float32)
    want = reference_experts(x, ids, probs, *emulation.weights(), plan.quantize)
    # the only difference is the order of sums in fp32
    assert (got - want).abs().mean() <= 1e-5 * want.abs().mean()
    assert torch.equal(got, native_gemm.forward(x, probs, ids, packed, PreparedPlan(plan, WIDTH, CPU)))
    if mode == "rac":
        without = native_gemm.forward(x, probs, ids, packed, PreparedPlan(_plan("w4a4", scale), WIDTH, CPU))
        assert (without - want).abs().mean() > 1e-2 * want.abs().mean()


def test_operands_decode_to_the_contract_bit_for_bit() -> None:
    x, _, ids = _inputs(29)
    plan = PreparedPlan(_plan("rac"), WIDTH, CPU)
    way = native_gemm.route(ids, E)
    pairs = native_gemm.gather(plan.pack("gate_up", x), way.token)
    values = nvfp4.dequantize(pairs.codes, pairs.block_scales, pairs.scale[:, None])
    rows = x[way.token]
    row = nvfp4.row_scale(rows)
    first = nvfp4.qdq(rows, row)
    columns = (LISTED[:, None] * 16 + torch.arange(16)).flatten()
    assert torch.equal(values[:, :H], first)
    assert torch.equal(values[:, H:], nvfp4.qdq((rows - first)[:, columns], row))
    bounds = way.offsets.tolist()
    owner = ids.flatten()[way.order]
    assert way.offsets.dtype == torch.int32 and bounds[0] == int((ids < 0).sum()) and bounds[-1] == ids.numel()
    assert all(owner[a:b].eq(e).all() for e, (a, b) in enumerate(itertools.pairwise(bounds)))
    assert bounds[3] == bounds[4] and owner[: bounds[0]].eq(-1).all()
    gate = torch.randn(5, 2 * INTER, generator=torch.Generator().manual_seed(4))
    inner = plan.pack("down", gate, silu=True)
    values = nvfp4.dequantize(inner.codes, inner.block_scales, inner.scale[:, None])
    both = values[:, :INTER].clone()
    both[:, : LEADING.numel() * 16] += values[:, INTER:]
    plain = torch.nn.functional.silu(gate[:, :INTER]) * gate[:, INTER:]
    assert torch.equal(both, rac.qdq_with_residual(plain, nvfp4.row_scale(plain), LEADING))


def test_no_tokens_and_no_local_expert() -> None:
    packed, plan = _packed(), PreparedPlan(_plan("rac"), WIDTH, CPU)
    x, probs, ids = _inputs(5)
    assert native_gemm.forward(x[:0], probs[:0], ids[:0], packed, plan).shape == (0, H)
    assert not native_gemm.forward(x, probs, torch.full_like(ids, -1), packed, plan).any()


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shapes_for_a_gpu_and_no_host_sync(tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake CUDA tensors through the real operators' schemas: a value read on the host would raise."""
    monkeypatch.setattr(frontend, "has_kernels", lambda device: device.type == "cuda")
    seen: list[str] = []
    for name in ("_quantize_op", "_grouped_gemm"):
        op = getattr(frontend, name)
        monkeypatch.setattr(frontend, name, lambda *a, op=op, name=name: seen.append(name) or op(*a))
    shape = _packed()
    with FakeTensorMode():

        def on_gpu(t: Tensor) -> Tensor:
            return torch.empty(t.shape, dtype=t.dtype, device="cuda")

        packed = PackedExperts(*(on_gpu(t) for t in vars(shape).values()))
        plan = PreparedPlan(ActivationPlan("w4a4", "token", {}), WIDTH, torch.device("cuda", 0))
        for gemm, count in (("gate_up", 3), ("down", 2)):
            blocks = WIDTH[gemm] // 16
            index = torch.empty(count, dtype=torch.int64, device="cuda")
            order = torch.empty(blocks, dtype=torch.int32, device="cuda")
            plan.blocks[gemm] = rac.Blocks(index, order, gemm == "gate_up")
        x = torch.empty(tokens, H, dtype=dtype, device="cuda")
        probs, ids = torch.empty(tokens, K, device="cuda"), torch.empty(tokens, K, dtype=torch.int32, device="cuda")
        out = native_gemm.forward(x, probs, ids, packed, plan)
    assert out.shape == (tokens, H) and out.dtype == dtype
    assert seen == (["_quantize_op", "_grouped_gemm"] * 2 if tokens else [])


@pytest.mark.slow
def test_two_checkpoints_in_one_process(tmp_path: Path) -> None:
    """Other weights, RAC metadata and kernels, one process: neither engine sees the other's; B's run the native path."""
    sources = [make_tiny_hf(tmp_path / f"hf{i}", seed=i) for i in range(3)]
    metadata = [half_metadata(sources[0], [0, 1], offset=i) for i in range(2)]
    other, same = (load_file(sources[i] / "model.safetensors") for i in (2, 1))
    mixed = {n: (other if ".experts." in n else same)[n] for n in same}  # other experts, the same dense weights
    save_file(mixed, sources[2] / "model.safetensors", metadata={"format": "pt"})
    for name, source, rac_block in zip(("a", "b", "b2"), sources, (metadata[0], metadata[1], metadata[1]), strict=True):
        write_export(source, tmp_path / name, metadata=rac_block, version=5 if name == "b2" else 0)
    tokens = torch.randint(3, 500, (6, 40), generator=torch.Generator().manual_seed(3))
    (tmp_path / "tokens.json").write_text(json.dumps(tokens.tolist()))
    env = {**engine_environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    worker = Path(__file__).with_name("two_engines_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker), str(tmp_path)], env=env, capture_output=True, text=True, timeout=600
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("@@")]
    assert said, done.stdout[-2000:] + done.stderr[-3000:]
    found = json.loads(said[0][2:])
    info = found["info"]
    assert [info[n]["backend"] for n in "ab"] == ["emulation", "native"]
    assert [info[n]["rac_hash"] for n in "ab"] == [m.content_hash for m in metadata]
    weights = [dequantized(load_file(s / "model.safetensors")) for s in sources]
    expected = {"a1": (0, 0, "rac"), "b1": (1, 1, "rac"), "b3": (2, 1, "rac"), "b4": (2, 1, "w4a4")}
    for turn, (i, block, mode) in expected.items():
        reference = HFReference(sources[i], weights[i], metadata[block], tmp_path / f"reference_{turn}")
        reference.mode = mode
        gap = (torch.tensor(found[turn]) - reference.score(tokens)).abs()
        print(turn, f"mean {gap.mean():.2e} max {gap.max():.2e}")
        # an activation on the border between two codes may round the other way in another engine
        assert gap.median() < 1e-5 and gap.mean() < 2e-3, turn
    assert found["a1"] == found["a2"] == found["a3"] == found["a4"] and found["b1"] == found["b2"]
    assert found["b1"] != found["b3"] != found["b4"]
    # the first experts again, from flat buffers into the tensors in use
    assert found["b5"] == found["b1"] and found["kept"]
    experts = {n: digest(w) for n, w in weights[2].items() if ".experts." in n}
    assert found["audit"] == experts
