"""What the Marlin path and flat refits need of vLLM, on the installed package; no GPU."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from helpers import make_tiny_hf
from rollout_helpers import pack_experts
from safetensors.torch import load_file

from megatron_quads.bench_rollout import ARMS, model_config, rows
from megatron_quads.errors import QuadsError
from megatron_quads.kernels import nvfp4
from megatron_quads.kernels.rac import reference
from megatron_quads.rac.metadata import RacMetadata
from megatron_quads.rollout import flat
from megatron_quads.rollout.kernel_choice import choose, describe

BF16 = torch.bfloat16


def _parameters(function: object) -> set[str]:
    return set(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_symbols_of_vllm() -> None:
    from vllm import LLM, _custom_ops
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts, fused_marlin_moe
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from megatron_quads.rollout.marlin import RacMarlinExperts

    assert {"output", "hidden_states"} <= _parameters(MarlinExperts.apply)
    assert list(inspect.signature(MarlinExperts.activation).parameters)[:4] == ["self", "activation", "output", "input"]
    assert {"activation_func", "hidden_states"} <= _parameters(fused_marlin_moe)
    assert "activation_func=self.activation" in inspect.getsource(MarlinExperts.apply)
    assert "activation_func(" in inspect.getsource(inspect.getmodule(fused_marlin_moe)._fused_marlin_moe)  # type: ignore[union-attr]
    assert issubclass(RacMarlinExperts, MarlinExperts)
    for name in ("apply", "activation"):
        assert getattr(RacMarlinExperts, name) is not getattr(MarlinExperts, name)
    assert {"config", "weight_key", "activation_key"} <= _parameters(oracle.select_nvfp4_moe_backend)
    needed = {"moe_quant_config", "moe_config", "experts_cls", "backend", "routing_tables"}
    assert needed <= _parameters(oracle.make_nvfp4_moe_kernel)
    scales = {f"{a}{b}" for a in ("w13", "w2") for b in ("_scale", "_scale_2")}
    assert {"backend", "a13_scale", "a2_scale", "layer", *scales} <= _parameters(oracle.make_nvfp4_moe_quant_config)
    assert {"b_q_weight", "size_k", "size_n", "num_bits", "is_a_8bit"} <= _parameters(_custom_ops.gptq_marlin_repack)
    assert hasattr(RoutedExperts, "_expert_routing_tables")
    assert {"start_weight_update", "update_weights", "finish_weight_update"} <= set(dir(LLM))


def test_scales_for_all_experts_are_vllms_one_by_one() -> None:
    from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4

    from megatron_quads.rollout import marlin_format as f

    gen = torch.Generator().manual_seed(0)
    s8 = (torch.rand(3, 192, 16, generator=gen) * 200 + 0.02).to(torch.float8_e4m3fn)
    got, factor = f.scales_to_marlin(s8, BF16)
    for e in range(3):
        one = marlin_utils.marlin_permute_scales(s8[e].to(BF16).T, size_k=256, size_n=192, group_size=16)
        want, _ = marlin_utils_fp4.nvfp4_marlin_process_scales(one, scale_factor=factor, a_dtype=BF16)
        assert torch.equal(got[e].view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(f.scales_from_marlin(got, factor).view(torch.uint8), s8.view(torch.uint8))
    # what Marlin cannot hold comes back as 0, so that an audit shows it
    s8[0, 5, 2], s8[1, 0, 0] = 2.0**-9, 448.0
    got, factor = f.scales_to_marlin(s8, BF16)
    back = f.scales_from_marlin(got, factor)
    assert back[0, 5, 2] == 0 and int((back.float() != s8.float()).sum()) == 1


def test_plan_quantises_by_the_contract() -> None:
    from megatron_quads.rollout.backends import ActivationPlan
    from megatron_quads.rollout.prepared import PreparedPlan

    cpu = torch.device("cpu")
    index = {"gate_up": torch.tensor([1, 4]), "down": torch.arange(3)}
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(1)).to(BF16)
    for mode, scale in (("rac", "token"), ("w4a4", "token"), ("rac", "static")):
        plan = PreparedPlan(
            ActivationPlan(mode, scale, index, {"gate_up": 3.0, "down": 3.0}), {"gate_up": 128, "down": 64}, cpu
        )
        for gemm, silu in (("gate_up", False), ("down", True)):
            plain = torch.nn.functional.silu(x[:, :64]) * x[:, 64:] if silu else x
            top = nvfp4.row_scale(plain) if scale == "token" else nvfp4.tensor_scale(torch.tensor(3.0))
            want = reference.qdq_with_residual(plain, top, index[gemm] if mode == "rac" else None)
            plan.quantize(gemm, x, out := torch.empty_like(plain), silu=silu)
            assert torch.equal(out, want)


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUADS_KERNEL", raising=False)
    assert choose("bfloat16", None) == choose("float32", (9, 0)) == choose("bfloat16", (7, 5)) == "emulation"
    assert choose("bfloat16", (8, 0)) == choose("float16", (9, 0)) == choose("bfloat16", (11, 0)) == "marlin"
    for fp4 in ((10, 0), (10, 3), (12, 0)):
        assert choose("bfloat16", fp4) == choose("float16", fp4) == "native" and choose("float32", fp4) == "emulation"
        assert choose("bfloat16", fp4, "marlin") == "marlin"
    assert choose("bfloat16", (9, 0), "native") == "native"  # a check: it decodes FP4 in registers there
    monkeypatch.setenv("QUADS_KERNEL", "emulation")
    assert choose("bfloat16", (9, 0)) == "emulation"
    with pytest.raises(QuadsError, match="sm_80"):
        choose("float32", (9, 0), "marlin")
    with pytest.raises(QuadsError, match="unknown kernel 'fast'"):
        choose("bfloat16", (10, 0), "fast")
    for dtype, where in (("bfloat16", None), ("bfloat16", (8, 0)), ("bfloat16", (12, 1)), ("float32", (10, 0))):
        with pytest.raises(QuadsError, match=r"native kernel needs sm_100.*not \w+ on (sm_\d+|no CUDA GPU)"):
            choose(dtype, where, "native")
    assert "emulates" not in describe("native", "rac") and "one fp32 accumulator" in describe("native", "w4a4")
    assert "W4A4 + RAC" in describe("marlin", "rac") and "unquantised" in describe("emulation", "w4a16")


def test_flat_chunks_hold_the_export(tmp_path: Path) -> None:
    source = make_tiny_hf(tmp_path / "hf", dtype=BF16)
    tensors = pack_experts(load_file(source / "model.safetensors"), keep=(1,))
    calls: list[dict] = []
    found: dict[int | None, dict[str, torch.Tensor]] = {}

    def call(*, chunk: dict, version: int, first: bool, last: bool) -> None:
        calls.append({**chunk, "version": version, "first": first, "last": last})
        data = torch.frombuffer(bytearray(Path(chunk["file"]).read_bytes()), dtype=torch.uint8)
        assert flat.checksum(data) == chunk["checksum"] and data.numel() == chunk["bytes"]
        found[chunk["layer"]] = flat.unflatten(data, chunk["entries"])
        damaged = data.clone()
        damaged[7] ^= 1
        assert flat.checksum(damaged) != chunk["checksum"]

    stream = ((n, tensors[n]) for n in sorted(tensors))
    sent = flat.send(call, flat.chunks_of(stream), 3, rac_hash="x", file=tmp_path / "flat.bin")
    assert [(c["layer"], c["first"], c["last"]) for c in calls] == [(0, True, False), (None, False, True)]
    assert sent.chunks == 2 and len(sent.hash) == 64
    prefix = "model.layers.0.mlp.experts.5."
    assert torch.equal(found[0]["w13"][5, 64:], tensors[prefix + "up_proj.weight"])
    down = tensors[prefix + "down_proj.weight_scale"].view(torch.uint8)
    assert torch.equal(found[0]["w2_scale"][5], down)
    dense = {n for n in tensors if "layers.0.mlp.experts" not in n}
    assert found[None].keys() == dense and all(torch.equal(found[None][n], tensors[n]) for n in dense)
    with pytest.raises(QuadsError, match="needs weights on a GPU"):
        flat.send(call, [flat.Chunk(None, {"a": torch.zeros(4)})], 1, rac_hash=None)


def test_bench_arms_and_paired_ratios() -> None:
    for arm in ARMS:
        block = model_config(2, arm).get("quantization_config", {})
        if arm.startswith("quads-"):
            made = RacMetadata.from_block(block["rac"], where=arm)
            assert len(made.layers[1].gate_up.indices()) == 128 * float(arm[6:])
        assert ("rac" in block) == arm.startswith("quads-")
    half, base = rows({("quads-0.5", 16): [9.0, 19.0], ("w4a16", 16): [10.0, 20.0]})
    assert (half.of_w4a16, half.ratio, half.tok_s, base.of_w4a16) == (0.925, 0.5, 14.0, 1.0)
