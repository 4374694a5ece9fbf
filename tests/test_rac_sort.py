"""Sorting a checkpoint: exact permutations, the same function, atomic, refusals."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_quads import atomic
from megatron_quads.checkpoint.hf import INDEX
from megatron_quads.errors import QuadsError
from megatron_quads.rac import sort

LAYERS, EXPERTS, HIDDEN, INTER = 2, 4, 32, 48


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A random fp32 Qwen3-MoE in several shards."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=97, hidden_size=HIDDEN, intermediate_size=64, moe_intermediate_size=INTER, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=EXPERTS, num_experts_per_tok=2,
        norm_topk_prob=True, initializer_range=0.2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("hf") / "src"
    Qwen3MoeForCausalLM(config).float().save_pretrained(path, max_shard_size="60KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def permutations(seed=1):
    g = torch.Generator().manual_seed(seed)
    return {(x, e): torch.randperm(INTER, generator=g) for x in range(LAYERS) for e in range(EXPERTS)}


def tensors(path):
    return {k: v for shard in path.glob("*.safetensors") for k, v in load_file(shard).items()}


def test_every_tensor_is_the_exact_permutation(source, tmp_path):
    order = permutations()
    sort.sort_checkpoint(source, order, tmp_path / "out", record={"note": 1})
    before, after = tensors(source), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    moved = 0
    for name, old in before.items():
        new = after[name]
        if ".experts." in name:
            layer, expert = int(name.split(".")[2]), int(name.split(".")[5])
            p = order[layer, expert]
            expected = old[:, p] if "down_proj" in name else old[p]
            assert not torch.equal(old, new)
            moved += 1
        else:
            expected = old
        assert torch.equal(expected, new), name
    assert moved == LAYERS * EXPERTS * 3
    assert atomic.is_committed(tmp_path / "out")
    record = sort.read_calibration(tmp_path / "out")
    assert record["sorted"] is True and record["note"] == 1 and record["order_sha256"] == sort.order_digest(order)


def test_the_function_is_preserved(source, tmp_path):
    sort.sort_checkpoint(source, permutations(), tmp_path / "out")
    ids = torch.randint(0, 97, (4, 33), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        a, b = (
            Qwen3MoeForCausalLM.from_pretrained(p, dtype=torch.float32)(ids).logits for p in (source, tmp_path / "out")
        )
    assert a.std() > 0.1
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)  # only the order of the sums over I differs


def test_rms_order_is_descending_and_stable():
    assert sort.rms_order(torch.tensor([1.0, 3.0, 1.0, 9.0])).tolist() == [3, 1, 0, 2]


def test_quantised_input_is_refused(source, tmp_path):
    for kind in ("config", "file"):
        quantised = shutil.copytree(source, tmp_path / kind)
        if kind == "config":
            config = json.loads((quantised / "config.json").read_text())
            config["quantization_config"] = {"quant_algo": "NVFP4"}
            (quantised / "config.json").write_text(json.dumps(config))
        else:
            (quantised / "hf_quant_config.json").write_text("{}")
        with pytest.raises(QuadsError, match="quantised"):
            sort.sort_checkpoint(quantised, permutations(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_faults_leave_the_old_output(source, tmp_path):
    out = tmp_path / "out"
    sort.sort_checkpoint(source, permutations(1), out)
    old = tensors(out)
    damaged = shutil.copytree(source, tmp_path / "damaged")
    shard = sorted(damaged.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-64])
    missing = shutil.copytree(source, tmp_path / "missing")
    next(missing.glob("*.safetensors")).unlink()
    bad = permutations()
    bad[1, 2] = torch.zeros(INTER, dtype=torch.int64)
    extra = {**permutations(), (LAYERS, 0): torch.arange(INTER)}
    for src, order, text in (
        (damaged, permutations(2), "damaged"),
        (missing, permutations(2), "shard is missing"),
        (source, bad, "not a permutation"),
        (source, extra, "layers.2.mlp.experts.0.down_proj"),
        (source, {(0, 0): torch.arange(INTER - 16)}, "has shape"),
    ):
        with pytest.raises(QuadsError, match=text):
            sort.sort_checkpoint(src, order, out)
    assert all(torch.equal(v, old[k]) for k, v in tensors(out).items())
    assert [p.name for p in tmp_path.iterdir() if "writing" in p.name] == []


def test_weights_in_other_formats_stay_behind(source, tmp_path):
    src = shutil.copytree(source, tmp_path / "src")
    (src / "pytorch_model.bin").write_bytes(b"x")
    save_file({"x": torch.zeros(1)}, src / "stray.safetensors")
    (src / "tokenizer.json").write_text("{}")
    sort.sort_checkpoint(src, permutations(), tmp_path / "out")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "config.json", INDEX} <= names
    assert not {"pytorch_model.bin", "stray.safetensors"} & names
