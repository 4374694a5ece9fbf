"""The NVFP4 rollout on real vLLM: arithmetic against Transformers, weight updates, audit, refusals, a killed engine."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import make_tiny_hf
from rollout_helpers import HFReference, dequantized, half_metadata, write_export
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_quads import atomic
from megatron_quads.errors import QuadsError
from megatron_quads.rollout import LocalRollout

pytestmark = pytest.mark.slow
KEEP = (2,)  # the last of three layers stays unquantised
CONTEXT = 64


class Setup:
    """Two sets of weights, their exports with the same metadata, and an engine on the first."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sources = [make_tiny_hf(root / f"hf{i}", seed=i, num_hidden_layers=3) for i in range(2)]
        self.metadata = half_metadata(self.sources[0], [0, 1])
        self.exports = [
            write_export(s, root / f"export{i}", metadata=self.metadata, keep=KEEP, version=i)
            for i, s in enumerate(self.sources)
        ]
        self.weights = [dequantized(load_file(s / "model.safetensors"), KEEP) for s in self.sources]
        self.rollout = LocalRollout(
            self.exports[0], max_model_len=CONTEXT, max_num_seqs=32, log=root / "logs" / "rollout.log"
        )

    def reference(self, i: int, mode: str = "w4a16") -> HFReference:
        made = HFReference(self.sources[i], self.weights[i], self.metadata, self.root / f"reference{i}{mode}")
        made.mode = mode
        return made


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    made = Setup(tmp_path_factory.mktemp("rollout"))
    yield made
    made.rollout.close()


def _tokens(rows: int = 40, columns: int = 60) -> Tensor:
    return torch.randint(3, 500, (rows, columns), generator=torch.Generator().manual_seed(3))


def _score(rollout: LocalRollout, tokens: Tensor) -> Tensor:
    return torch.tensor(rollout.score(tokens.tolist()))


def test_info_of_a_fresh_engine(setup: Setup) -> None:
    info = setup.rollout.info()
    assert (info.version, info.activation, info.quant_method) == (0, "rac", "modelopt_fp4_rac")
    assert info.rac_active_layers == info.quantized_layers == [0, 1]
    assert info.rac_hash == setup.metadata.content_hash
    setup.rollout.assert_active()


def test_scores_equal_transformers(setup: Setup) -> None:
    """W4A16: equal to HF with dequantised weights. W4A4 and RAC: equal up to rare rounding ties, and in this order."""
    tokens = _tokens()
    gaps, base = {}, None
    for mode in ("w4a16", "w4a4", "rac"):
        setup.rollout.set_activation(mode)
        got = _score(setup.rollout, tokens)
        want = setup.reference(0, mode).score(tokens)
        base = want if base is None else base
        gap = (got - want).abs()
        gaps[mode] = float((got - base).abs().mean())
        print(mode, f"n {gap.numel()} mean {gap.mean():.2e} max {gap.max():.2e}; to w4a16 {gaps[mode]:.4f}")
        if mode == "w4a16":
            assert gap.numel() >= 2000 and gap.max() <= 1e-4
            with pytest.raises(QuadsError, match=r"layer 0 runs w4a16, the checkpoint asks for rac"):
                setup.rollout.assert_active()
        else:
            assert gap.median() < 2e-6 and gap.mean() < 0.02 * gaps[mode]
    setup.rollout.set_activation("rac")
    assert gaps["w4a16"] < 1e-5 < gaps["rac"] < gaps["w4a4"]


def test_sampling(setup: Setup) -> None:
    prompts = _tokens(6, 8).tolist()
    ask = {"n": 4, "max_tokens": 24, "temperature": 1.0, "seed": 11}
    first = setup.rollout.generate(prompts, **ask)
    assert [len(group) for group in first] == [4] * 6
    again = setup.rollout.generate(prompts[:2], **ask)
    assert [[s.token_ids for s in g] for g in again] == [[s.token_ids for s in g] for g in first[:2]]
    flat = [s for group in first for s in group]
    assert len({tuple(s.token_ids) for s in flat}) == len(flat)
    for sample in flat:
        stopped = sample.token_ids[-1] == 2
        assert 2 not in sample.token_ids[:-1]
        assert sample.finish_reason == ("stop" if stopped else "length") and (stopped or len(sample.token_ids) == 24)
    scores = setup.rollout.score([p + s.token_ids for p, g in zip(prompts, first, strict=True) for s in g])
    gap = torch.cat([torch.tensor(s.logprobs) - torch.tensor(q[7:]) for s, q in zip(flat, scores, strict=True)]).abs()
    assert gap.median() < 1e-5 and gap.mean() < 1e-3


def test_a_prompt_beyond_the_context_is_refused(setup: Setup) -> None:
    with pytest.raises(QuadsError, match=rf"prompt of {CONTEXT} tokens does not fit a context of {CONTEXT} \[prompt 1"):
        setup.rollout.generate([[5] * 4, [5] * CONTEXT], n=1, max_tokens=1, temperature=1.0, seed=0)
    assert len(setup.rollout.score([[5] * CONTEXT])[0]) == CONTEXT - 1


def test_routes(setup: Setup) -> None:
    setup.rollout.set_activation("w4a16")
    tokens = _tokens(2, 20)
    routes = setup.rollout.record_routes(tokens.tolist())
    setup.rollout.set_activation("rac")
    model = setup.reference(0, "w4a16").model
    with torch.no_grad():
        logits = model(tokens, output_router_logits=True).router_logits
    for i, route in enumerate(routes):
        assert route.shape == (3, 20, 2)
        for layer in range(3):
            want = logits[layer].view(2, 20, -1)[i].topk(2, -1).indices.sort(-1).values
            assert torch.equal(route[layer].sort(-1).values, want)


def test_audit_and_bits(setup: Setup, tmp_path: Path) -> None:
    experts = {n: w for n, w in setup.weights[0].items() if ".experts." in n}
    assert setup.rollout.audit().keys() == experts.keys()
    save_file(experts, tmp_path / "w.safetensors")
    bits = setup.rollout.count_bits(tmp_path / "w.safetensors")
    assert bits.keys() == experts.keys() and not any(bits.values())
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    experts[name] = experts[name].clone()
    experts[name].view(torch.int32)[0, 0] ^= 0b101
    save_file(experts, tmp_path / "w.safetensors")
    bits = setup.rollout.count_bits(tmp_path / "w.safetensors")
    assert {n: b for n, b in bits.items() if b} == {name: 2}
    del experts[name]
    save_file(experts, tmp_path / "w.safetensors")
    with pytest.raises(QuadsError, match=re.escape(name)):
        setup.rollout.count_bits(tmp_path / "w.safetensors")


def test_refused_updates_leave_the_weights(setup: Setup, tmp_path: Path) -> None:
    before = setup.rollout.audit()
    source = setup.sources[1]

    def drop(tensors: dict[str, Tensor], config: dict) -> None:
        del tensors["model.layers.1.mlp.experts.3.up_proj.weight_scale"]

    def shrink(tensors: dict[str, Tensor], config: dict) -> None:
        name = "model.layers.0.mlp.experts.0.down_proj.weight"
        tensors[name] = tensors[name][:, :8]

    def unignore(tensors: dict[str, Tensor], config: dict) -> None:
        config["quantization_config"]["ignore"].append("x")

    good = {"metadata": setup.metadata, "keep": KEEP, "version": 5}
    cases = {
        "other RAC": ({**good, "metadata": half_metadata(source, [0, 1], offset=1)}, r"RAC metadata .* differs"),
        "version": ({**good, "version": 4}, r"export holds version 4, not 5"),
        "missing": ({**good, "mutate": drop}, r"experts\.3\.up_proj\.weight_scale is missing"),
        "shape": ({**good, "mutate": shrink}, r"experts\.0\.down_proj\.weight is \[128, 8\]"),
        "ignore": ({**good, "mutate": unignore}, r"quantization_config\.ignore"),
    }
    for i, (settings, message) in enumerate(cases.values()):
        with pytest.raises(QuadsError, match=message):
            setup.rollout.update_weights(write_export(source, tmp_path / str(i), **settings), 5)
    unfinished = write_export(source, tmp_path / "unfinished", **good)
    (unfinished / atomic.MARKER).unlink()
    with pytest.raises(QuadsError, match="commit marker"):
        setup.rollout.update_weights(unfinished, 5)
    assert setup.rollout.info().version == 0 and setup.rollout.audit() == before


def test_update(setup: Setup, tmp_path: Path) -> None:
    setup.rollout.update_weights(setup.exports[1], 1)
    info = setup.rollout.info()
    assert info.version == 1 and info.rac_active_layers == [0, 1]
    setup.rollout.assert_active()
    experts = {n: w for n, w in setup.weights[1].items() if ".experts." in n}
    save_file(experts, tmp_path / "w.safetensors")
    assert not any(setup.rollout.count_bits(tmp_path / "w.safetensors").values())
    tokens = _tokens(8)
    setup.rollout.set_activation("w4a16")
    gap = (_score(setup.rollout, tokens) - setup.reference(1).score(tokens)).abs()
    setup.rollout.set_activation("rac")
    assert gap.max() <= 1e-4


def test_killed_in_mid_generation(setup: Setup) -> None:
    """Last: the engine is gone afterwards."""
    pid = setup.rollout.pid
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(QuadsError, match=r"rollout process died \(signal SIGKILL\).*rollout\.log"):
        while time.monotonic() - start < 60:
            setup.rollout.generate([[5, 6, 7]] * 32, n=2, max_tokens=56, temperature=1.0, seed=0)
    assert time.monotonic() - start < 20
    with pytest.raises(QuadsError, match=r"died|closed"):
        setup.rollout.info()
    setup.rollout.close()
    assert json.loads((setup.exports[1] / atomic.MARKER).read_text())["version"] == 1
