"""The rollout on a GPU: Marlin's layout, numerics before the GEMM, log-probs, refits under CUDA graphs. Prints its figures."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import make_tiny_hf
from rollout_helpers import HFReference, dequantized, half_metadata, write_export
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_quads.checkpoint.mapping import Unit
from megatron_quads.checkpoint.packing import encoded
from megatron_quads.digest import Digests
from megatron_quads.errors import QuadsError
from megatron_quads.kernels import nvfp4
from megatron_quads.rollout import LocalRollout
from megatron_quads.rollout.backends import ActivationPlan
from megatron_quads.rollout.flat import Chunk, chunks_of, send

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
    """Graph engines on two sets of weights, the second with sleep mode; they start in turn: each measures memory."""

    def __init__(self, root: Path, kernel: str) -> None:
        self.root, self.kernel = root, kernel
        self.sources = [make_tiny_hf(root / f"hf{i}", seed=i, dtype=BF16) for i in range(2)]
        self.metadata = half_metadata(self.sources[0], [0, 1])
        self.exports = [
            write_export(s, root / f"export{i}", metadata=self.metadata, version=i) for i, s in enumerate(self.sources)
        ]
        self.live = self.start(self.exports[0])
        self.fresh = self.start(self.exports[1], enable_sleep_mode=True)

    def start(self, folder: Path, **more: Any) -> LocalRollout:
        begin = time.monotonic()
        made = LocalRollout(
            folder,
            dtype="bfloat16",
            max_model_len=64,
            max_num_seqs=16,
            log=self.root / f"{folder.name}.log",
            engine_args={"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30, **more},
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
    for rollout in (made.live, made.fresh):
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
    plain = 0.0
    if engines.kernel == "marlin":  # the unquantised engine has no such kernel
        with engines.start(engines.sources[0]) as unquantised:
            plain = float((torch.tensor(unquantised.score(tokens.tolist())) - base["bf16"]).abs().mean())
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


def _memory_of(pid: int) -> int:
    """Bytes that a process holds on the GPU; what is free on all of it moves with its neighbours."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    return {p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}[pid]


def test_sleep_and_wake(engines: Engines) -> None:
    """Level 1 gives back what it took; after level 2 nothing is served before a refit, which restores all."""
    rollout, rac_hash = engines.fresh, engines.metadata.content_hash
    before, audit, info = _sampled(rollout), rollout.audit(), rollout.info()
    awake = _memory_of(rollout.pid)
    rollout.sleep(1)
    freed = awake - _memory_of(rollout.pid)
    print(f"level 1 frees {freed / 2**20:.0f} of {awake / 2**20:.0f} MiB")
    assert freed > (1 << 30) // 2  # the cache alone has 1 GiB
    with pytest.raises(QuadsError, match="the engine sleeps"):
        _sampled(rollout)
    rollout.wake()
    assert _sampled(rollout) == before and rollout.info() == info and rollout.audit() == audit
    for turn, tags in enumerate((["weights"], None)):
        rollout.sleep(2)
        with pytest.raises(QuadsError, match="the engine sleeps"):
            rollout.update_flat(engines.chunks(1), 70, rac_hash=rac_hash)
        filler = torch.full(
            (1 << 31,), 0xA5, dtype=torch.uint8, device="cuda"
        )  # other memory than before, or other values
        rollout.wake(tags)
        del filler
        torch.cuda.empty_cache()
        with pytest.raises(QuadsError, match="the engine sleeps" if tags else "level 2 sleep discarded the weights"):
            _sampled(rollout)
        assert rollout.info().version is None
        if turn == 0:
            rollout.update_flat(engines.chunks(1), 70, rac_hash=rac_hash)
            rollout.wake(["kv_cache"])
        else:
            rollout.update_weights(engines.exports[1], 1)
        assert rollout.audit() == audit and rollout.info().rac_active_layers == [0, 1]
        assert _sampled(rollout) == before, f"turn {turn}"


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


def _layer_of_30b(w13: Tensor, w2: Tensor) -> Iterator[tuple[Unit, list[Tensor]]]:
    """w13 [128, 1536, 2048], w2 [128, 2048, 768] as the trainer's stream gives them, then a norm."""
    stem = "model.layers.0.mlp.experts"
    for e in range(w13.shape[0]):
        into = tuple(f"{stem}.{e}.{p}_proj.weight" for p in ("gate", "up"))
        yield Unit(f"0.{e}.fc1", "glu", into, ((768, 2048),) * 2, 0, e), list(w13[e].chunk(2))
        yield Unit(f"0.{e}.fc2", "cols", (f"{stem}.{e}.down_proj.weight",), ((2048, 768),), 0, e), [w2[e]]
    yield Unit("final_layernorm", "whole", ("model.norm.weight",), ((2048,),)), [w2[0, :, 0].contiguous()]


def test_refit_cost_of_30b_a3b() -> None:
    """Pack and send one layer of 128 experts as `quads rl` does, convert and copy it; 48 such layers are the model.

    Then the digests by which both sides are compared after it: of the trainer's tensors, and of Marlin's read back.
    """
    from megatron_quads.rollout.marlin_format import dequantized as from_gemm
    from megatron_quads.rollout.marlin_format import to_marlin

    w13 = torch.randn(128, 1536, 2048, device="cuda", dtype=BF16)
    w2 = torch.randn(128, 2048, 768, device="cuda", dtype=BF16)
    held = [to_marlin(*_packed(128, w.shape[1], w.shape[2]), BF16) for w in (w13, w2)]
    seconds: dict[str, list[float]] = {"pack": [], "load": [], "prove trainer": [], "prove rollout": []}
    size = 0
    for _ in range(5):
        kept: list[Chunk] = []

        def chunks(kept: list[Chunk] = kept) -> Iterator[Chunk]:
            for chunk in chunks_of(encoded(_layer_of_30b(w13, w2), [0], None, BF16, input_scales=False)):
                kept.append(chunk)
                yield chunk

        with _timed(seconds["pack"]):
            sent = send(lambda **message: None, chunks(), 1, rac_hash=None)
        with _timed(seconds["load"]):
            t = kept[0].tensors
            for i, key in enumerate(("w13", "w2")):
                new = to_marlin(t[key], t[f"{key}_scale"].view(torch.float8_e4m3fn), t[f"{key}_scale_2"], BF16)
                for a, b in zip(held[i][:3], new[:3], strict=True):
                    a.copy_(b)  # type: ignore[union-attr]
                held[i] = held[i]._replace(factor=new.factor)
        amax = [w.abs().amax((1, 2)).float() for w in (w13, w2)]
        values = [torch.stack(nvfp4.grouped_qdq([*w], top)) for w, top in zip((w13, w2), amax, strict=True)]
        with _timed(seconds["prove trainer"]):
            wanted = _digests(values)
        del values
        with _timed(seconds["prove rollout"]):
            found = _digests([from_gemm(gemm, BF16) for gemm in held])
        assert found == wanted
        size = sent.bytes
    best = {k: round(48 * sorted(v)[len(v) // 2], 3) for k, v in seconds.items()}
    bf16 = w13.nbytes + w2.nbytes
    print(
        f"refit of 48 layers: {best} s; {48 * size / 2**30:.2f} GiB, BF16 {48 * bf16 / 2**30:.2f} GiB, {bf16 / size:.2f} x"
    )
    assert bf16 / size >= 3.4


@contextlib.contextmanager
def _timed(store: list[float]) -> Iterator[None]:
    torch.cuda.synchronize()
    begin = time.monotonic()
    yield
    torch.cuda.synchronize()
    store.append(time.monotonic() - begin)


def _digests(stacks: list[torch.Tensor]) -> dict[str, str]:
    found = Digests()
    for i, stack in enumerate(stacks):
        for e, weight in enumerate(stack):
            for j, part in enumerate(weight.chunk(2 - i)):
                found.add(f"{i}.{e}.{j}", part)
    return found.finish()
