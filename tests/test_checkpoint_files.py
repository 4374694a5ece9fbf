"""Reading HF folders and writing safetensors streams, without Megatron."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import make_tiny_hf, tiny_config
from safetensors.torch import load_file

from megatron_quads.checkpoint.hf import INDEX, SafetensorsFolder, read_model_config
from megatron_quads.checkpoint.mapping import merge, shard, units
from megatron_quads.checkpoint.stream import Entry, StreamWriter
from megatron_quads.errors import QuadsError


def write_config(folder: Path, **over: object) -> Path:
    """A folder with a config.json only."""
    (folder / "config.json").write_text(json.dumps(tiny_config(**over)))
    return folder


def test_config_of_both_generations_of_transformers(tmp_path: Path) -> None:
    new = read_model_config(write_config(tmp_path))
    assert (new.rope_theta, new.topk, new.head_dim, new.num_kv_heads) == (1e6, 2, 64, 2)
    old = {k: v for k, v in tiny_config(rope_theta=5e5).items() if k not in ("rope_parameters", "head_dim")}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert read_model_config(tmp_path).rope_theta == 5e5
    assert read_model_config(tmp_path).head_dim == 128 // 4


@pytest.mark.parametrize(
    ("over", "part"),
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"model_type": "qwen2_moe"}, "model_type 'qwen2_moe'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_only_layers": [0]}, "dense layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}, "'linear'"),
        ({"hidden_size": "wide"}, "wrong type"),
    ],
)
def test_unsupported_configurations_are_refused(over: dict, part: str, tmp_path: Path) -> None:
    with pytest.raises(QuadsError) as e:
        read_model_config(write_config(tmp_path, **over))
    assert part in str(e.value)
    assert "config.json" in str(e.value)


def test_missing_and_garbled_config(tmp_path: Path) -> None:
    with pytest.raises(QuadsError, match="No such file"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(QuadsError, match="not JSON"):
        read_model_config(tmp_path)


def test_reader_gives_the_same_from_one_file_and_from_shards(tmp_path: Path) -> None:
    one = SafetensorsFolder(make_tiny_hf(tmp_path / "one"))
    many = SafetensorsFolder(make_tiny_hf(tmp_path / "many", shards=4))
    assert one.names() == many.names()
    for name in one.names():
        assert torch.equal(one.get(name), many.get(name))
        assert one.shape(name) == tuple(one.get(name).shape)
        assert one.dtype(name) == torch.float32
    with pytest.raises(QuadsError, match=r"lm\.head is missing"):
        one.get("lm.head")


def test_index_naming_a_tensor_that_its_shard_lacks(tmp_path: Path) -> None:
    folder = make_tiny_hf(tmp_path / "hf", shards=2)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = "model-00002-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(QuadsError, match=r"lacks model\.extra\.weight.*00002-of-00002"):
        SafetensorsFolder(folder)


@pytest.mark.parametrize("size", [1, 2])
def test_mapping_inverts_itself(size: int, tiny_hf: Path) -> None:
    hf = read_model_config(tiny_hf)
    reader = SafetensorsFolder(tiny_hf)
    seen = []
    for unit in units(hf):
        tensors = [reader.get(n) for n in unit.names]
        rows = -(-hf.vocab_size // (128 * size)) * 128
        parts = [shard(unit, tensors, hf, rank=r, size=size, rows=rows) for r in range(size)]
        if unit.layout == "vocab":
            assert not parts[-1][hf.vocab_size - rows * (size - 1) :].any()
        for name, tensor, back in zip(unit.names, tensors, merge(unit, parts, hf), strict=True):
            assert torch.equal(tensor, back), name
            seen.append(name)
    assert sorted(seen) == reader.names()


def test_tensor_parallel_size_that_does_not_divide_the_key_heads(tiny_hf: Path) -> None:
    hf = read_model_config(tiny_hf)
    reader = SafetensorsFolder(tiny_hf)
    unit = next(u for u in units(hf) if u.layout == "qkv")
    with pytest.raises(QuadsError, match=r"2 cannot be split over 4.*q_proj"):
        shard(unit, [reader.get(n) for n in unit.names], hf, rank=0, size=4, rows=0)


def entries() -> list[tuple[Entry, torch.Tensor]]:
    """Tensors of every dtype, odd sizes first, so that unaligned offsets would show."""
    out = []
    for i, (dtype, shape) in enumerate(
        [(torch.uint8, (3, 5)), (torch.float32, ()), (torch.float8_e4m3fn, (7,)), (torch.bfloat16, (3, 3))] * 3
    ):
        values = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(i)).to(dtype)
        out.append((Entry(f"t{i}", dtype, shape), values))
    return out


@pytest.mark.parametrize(("limit", "files"), [(1 << 20, 1), (40, 4)])
def test_stream_is_read_back_by_safetensors(limit: int, files: int, tmp_path: Path) -> None:
    made = entries()
    with StreamWriter(tmp_path, [e for e, _ in made], limit) as writer:
        for entry, tensor in reversed(made):
            writer.write(entry.name, tensor)
    assert len(writer.files) == files
    back = {k: v for f in writer.files for k, v in load_file(tmp_path / f).items()}
    assert back.keys() == {e.name for e, _ in made}
    reader = SafetensorsFolder(tmp_path)
    for entry, tensor in made:
        for got in (back[entry.name], reader.get(entry.name)):
            assert got.dtype == tensor.dtype
            assert torch.equal(got.float(), tensor.float())


def test_stream_refuses_what_was_not_planned(tmp_path: Path) -> None:
    made = entries()
    with pytest.raises(QuadsError, match="t1 was never written"), StreamWriter(tmp_path, [made[1][0]], 99):
        pass
    with (
        pytest.raises(QuadsError, match="does not fit the plan"),
        StreamWriter(tmp_path, [made[0][0]], 99) as writer,
    ):
        writer.write("t0", made[0][1].float())
