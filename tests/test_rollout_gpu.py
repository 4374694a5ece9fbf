"""The rollout on a GPU: Marlin's layout, numerics before the GEMM, log-probs, refits under CUDA graphs. Prints its figures."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import make_tiny_hf
from rollout_helpers import HFReference, dequantized, half_metadata, write_export
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_quads.errors import QuadsError
from megatron_quads.kernels import nvfp4
from megatron_quads.rollout import LocalRollout
from megatron_quads.rollout.backends import ActivationPlan
from megatron_quads.rollout.flat import Chunk, chunks_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
BF16 = torch.bfloat16


def _packed(experts: int, n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator("cuda").manual_seed(seed)
    w = torch.randn(experts, n, k, generator=gen, device="cuda", dtype=BF16) * 0.02
    scale = nvfp4.tensor_scale(w.float().abs().amax((1, 2)))
    codes, s8 = nvfp4.quantize(w, scale[:, None, None].expand(experts, n, 1))
    return codes, s8, scale


def test_layout_equals_vllm_and_comes_back() -> None:
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_nvfp4_moe_layer_for_marlin

    from megatron_quads.rollout import marlin_format as f

    experts, hidden, inter = 3, 256, 128
    c13, s13, g13 = _packed(experts, 2 * inter, hidden)
    c2, s2, g2 = _packed(experts, hidden, inter, 1)
    layer = SimpleNamespace(
        num_experts=experts, hidden_size=hidden, intermediate_size_per_partition=inter, params_dtype=BF16
    )
    want = prepare_nvfp4_moe_layer_for_marlin(layer, c13, s13, g13, c2, s2, g2, is_act_and_mul=True)  # type: ignore[arg-type]
    got = [*f.to_marlin(c13, s13, g13, BF16)[:3], *f.to_marlin(c2, s2, g2, BF16)[:3]]
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    for codes, s8, scale in ((c13, s13, g13), (c2, s2, g2)):
        back = f.from_marlin(f.to_marlin(codes, s8, scale, BF16), BF16)
        for a, b in zip(back, (codes, s8, scale), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("mode", ["w4a4", "rac"])
@pytest.mark.parametrize("scale", ["token", "static"])
def test_activations_before_the_gemm_are_the_contract(mode: str, scale: str) -> None:
    from megatron_quads.rollout.prepared import PreparedPlan

    device = torch.device("cuda")
    index = {"gate_up": torch.tensor([0, 3, 7], device=device), "down": torch.arange(4, device=device)}
    plan = PreparedPlan(
        ActivationPlan(mode, scale, index, {"gate_up": 4.0, "down": 4.0}), {"gate_up": 256, "down": 128}, device
    )
    gen = torch.Generator("cuda").manual_seed(5)
    for rows in (1, 7, 700):
        x = torch.randn(rows, 256, generator=gen, device=device, dtype=BF16) * 3
        for gemm, silu in (("gate_up", False), ("down", True)):
            out = x.new_empty(rows, 128 if silu else 256)
            plan.quantize(gemm, x, out, silu=silu)
            plain = torch.nn.functional.silu(x[:, :128]) * x[:, 128:] if silu else x
            top = nvfp4.row_scale(plain) if scale == "token" else nvfp4.tensor_scale(torch.tensor(4.0, device=device))
            blocks = index[gemm].cpu() if mode == "rac" else None
            from megatron_quads.kernels.rac import reference

            want = reference.qdq_with_residual(plain.cpu(), top.cpu(), blocks)
            assert torch.equal(out.cpu(), want), (gemm, rows)


class Engines:
    """Graph engines on two sets of weights and on the unquantised first one, started together."""

    def __init__(self, root: Path, kernel: str) -> None:
        self.root, self.kernel = root, kernel
        self.sources = [make_tiny_hf(root / f"hf{i}", seed=i, dtype=BF16) for i in range(2)]
        self.metadata = half_metadata(self.sources[0], [0, 1])
        self.exports = [
            write_export(s, root / f"export{i}", metadata=self.metadata, version=i) for i, s in enumerate(self.sources)
        ]
        with ThreadPoolExecutor(3) as pool:
            first, second, plain = pool.map(self._start, (self.exports[0], self.exports[1], self.sources[0]))
        self.live, self.fresh, self.plain = first, second, plain

    def _start(self, folder: Path) -> LocalRollout:
        begin = time.monotonic()
        made = LocalRollout(
            folder,
            dtype="bfloat16",
            max_model_len=64,
            max_num_seqs=16,
            log=self.root / f"{folder.name}.log",
            engine_args={"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30},
        )
        print(f"engine on {folder.name}: {time.monotonic() - begin:.1f} s", made.info())
        return made

    def reference(self, mode: str, dtype: torch.dtype = torch.float32) -> HFReference:
        weights = load_file(self.sources[0] / "model.safetensors")
        if mode != "bf16":
            weights = dequantized(weights)
        made = HFReference(
            self.sources[0], {n: w.float() for n, w in weights.items()}, self.metadata, self.root / f"ref_{mode}"
        )
        made.mode = "w4a16" if mode == "bf16" else mode
        made.model.to(dtype)
        return made

    def chunks(self, i: int) -> Iterator[Chunk]:
        from megatron_quads.checkpoint.hf import SafetensorsFolder

        reader = SafetensorsFolder(self.exports[i])
        return chunks_of((n, reader.get(n).cuda()) for n in reader.names())


@pytest.fixture(scope="module", params=["marlin", "native"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """The same tests on both paths; without FP4 hardware the native one decodes FP4 in registers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUADS_KERNEL", request.param)
        made = Engines(tmp_path_factory.mktemp("gpu"), request.param)
    yield made
    for rollout in (made.live, made.fresh, made.plain):
        rollout.close()


def _tokens(rows: int = 24, columns: int = 56) -> Tensor:
    return torch.randint(3, 500, (rows, columns), generator=torch.Generator().manual_seed(3))


def _sampled(rollout: LocalRollout) -> list[tuple[list[int], list[float]]]:
    groups = rollout.generate(_tokens(8, 8).tolist(), n=1, max_tokens=32, temperature=1.0, seed=4)
    return [(s.token_ids, s.logprobs) for group in groups for s in group]


def _require_same(a: list[tuple[list[int], list[float]]], b: list[tuple[list[int], list[float]]]) -> None:
    """Two engines may compile other kernels: nearly all samples are equal bit for bit."""
    equal = sum(x == y for x, y in zip(a, b, strict=True))
    tokens = sum(x[0] == y[0] for x, y in zip(a, b, strict=True))
    print(f"{equal} of {len(a)} samples equal bit for bit, {tokens} in their tokens")
    assert equal >= len(a) // 2 and tokens >= len(a) - 2


def test_the_hook_is_active_and_weights_are_the_exports(engines: Engines, tmp_path: Path) -> None:
    info = engines.live.info()
    assert (info.backend, info.activation, info.rac_active_layers) == (engines.kernel, "rac", [0, 1])
    experts = {
        n: w for n, w in dequantized(load_file(engines.sources[0] / "model.safetensors")).items() if ".experts." in n
    }
    save_file({n: w.to(BF16) for n, w in experts.items()}, tmp_path / "w.safetensors")
    bits = engines.live.count_bits(tmp_path / "w.safetensors")
    assert bits.keys() == experts.keys() and not any(bits.values())
    with pytest.raises(QuadsError, match="CUDA graphs hold mode rac"):
        engines.live.set_activation("w4a4")
    assert ("emulates" if engines.kernel == "marlin" else "quads:") + " W4A4 + RAC" in (
        engines.root / "export0.log"
    ).read_text()


def test_logprobs_agree_with_the_cpu_reference(engines: Engines) -> None:
    """Against fp32 references on the CPU with the same activation contract.

    Quantisation turns BF16 noise into flipped codes, so RAC's yardstick is what BF16 alone does to it on the CPU.
    """
    tokens = _tokens()
    base = {m: engines.reference(m).score(tokens) for m in ("bf16", "rac", "w4a4", "w4a16")}
    cpu = {m: float((engines.reference(m, BF16).score(tokens) - base[m]).abs().mean()) for m in ("bf16", "rac")}
    plain = float((torch.tensor(engines.plain.score(tokens.tolist())) - base["bf16"]).abs().mean())
    got = torch.tensor(engines.live.score(tokens.tolist()))
    gaps = {m: float((got - base[m]).abs().mean()) for m in ("rac", "w4a4", "w4a16")}
    print("BF16 on the CPU", cpu, "GPU engine, unquantised", plain, "GPU engine with RAC, to", gaps)
    assert plain < 1.3 * cpu["bf16"] and gaps["rac"] < 1.3 * cpu["rac"]
    assert gaps["rac"] < gaps["w4a16"] < gaps["w4a4"]


def test_fifty_refits_equal_a_fresh_engine(engines: Engines) -> None:
    rac_hash = engines.metadata.content_hash
    before = _sampled(engines.live)
    begin = time.monotonic()
    for version in range(2, 52):
        sent = engines.live.update_flat(engines.chunks((version + 1) % 2), version, rac_hash=rac_hash)
    seconds = time.monotonic() - begin
    print(f"50 refits {seconds:.2f} s, each {sent.bytes} bytes in {sent.chunks} chunks; hash {sent.hash[:12]}")
    assert engines.live.info().version == 51
    assert _sampled(engines.live) == before  # the last one brought the first weights
    engines.live.update_flat(engines.chunks(1), 52, rac_hash=rac_hash)
    _require_same(_sampled(engines.live), _sampled(engines.fresh))
    assert _sampled(engines.live) != before
    assert engines.live.audit() == engines.fresh.audit()
    shared = engines.root / "flat.bin"
    engines.live.update_flat(engines.chunks(0), 53, rac_hash=rac_hash, file=shared)
    assert _sampled(engines.live) == before
    engines.live.update_weights(engines.exports[1], 1)  # the native flow from a folder
    _require_same(_sampled(engines.live), _sampled(engines.fresh))


def test_refused_and_partial_refits(engines: Engines) -> None:
    """Last: the engine is of no use afterwards."""
    rac_hash = engines.metadata.content_hash
    before, version = _sampled(engines.live), engines.live.info().version
    with pytest.raises(QuadsError, match="not the running one"):
        engines.live.update_flat(engines.chunks(0), 60, rac_hash=hashlib.sha256(b"x").hexdigest())
    assert engines.live.info().version == version and _sampled(engines.live) == before
    with pytest.raises(QuadsError, match="left out layer 1"):
        engines.live.update_flat((c for c in engines.chunks(0) if c.layer != 1), 61, rac_hash=rac_hash)
    with pytest.raises(QuadsError, match="half-way"):
        _sampled(engines.live)


def test_refit_cost_of_30b_a3b() -> None:
    """Quantise, convert and copy one layer of 128 experts; 48 such layers are the model."""
    from megatron_quads.rollout.marlin_format import to_marlin

    ws = [
        torch.randn(128, 1536, 2048, device="cuda", dtype=BF16),
        torch.randn(128, 2048, 768, device="cuda", dtype=BF16),
    ]
    held = [to_marlin(*_packed(128, w.shape[1], w.shape[2]), BF16) for w in ws]
    seconds, size = {"pack": [], "load": []}, 0  # type: ignore[var-annotated]
    for _ in range(4):
        torch.cuda.synchronize()
        begin = time.monotonic()
        packed = []
        for w in ws:
            parts = list(w)
            amax = nvfp4.grouped_amax(parts)
            codes, s8 = nvfp4.grouped_quantize(parts, amax)
            packed.append(
                (torch.stack(codes), torch.stack([s.view(torch.uint8) for s in s8]), nvfp4.tensor_scale(amax))
            )
        torch.cuda.synchronize()
        middle = time.monotonic()
        for old, (c, s, g) in zip(held, packed, strict=True):
            new = to_marlin(c, s.view(torch.float8_e4m3fn), g, BF16)
            for a, b in zip(old[:3], new[:3], strict=True):
                a.copy_(b)  # type: ignore[union-attr]
        torch.cuda.synchronize()
        seconds["pack"].append(middle - begin)
        seconds["load"].append(time.monotonic() - middle)
        size = sum(t.nbytes for p in packed for t in p)
    best = {k: 48 * sorted(v)[len(v) // 2] for k, v in seconds.items()}
    bf16 = sum(w.nbytes for w in ws)
    print(
        f"refit of 48 layers: {best} s; {48 * size / 2**30:.2f} GiB, BF16 {48 * bf16 / 2**30:.2f} GiB, {bf16 / size:.2f} x"
    )
    assert bf16 / size >= 3.4
