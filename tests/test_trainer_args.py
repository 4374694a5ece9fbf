"""Megatron's own parser behind the trainer: what it derives, and bad input in one line."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_quads.checkpoint.hf import HFModel, read_model_config
from megatron_quads.errors import QuadsError
from megatron_quads.trainer.args import parse_args


@pytest.fixture(scope="module")
def hf(tiny_hf: Path) -> HFModel:
    return read_model_config(tiny_hf)


@pytest.mark.parametrize(
    ("argv", "world", "said"),
    [
        (["--expert-model-parallel-size", "3"], 3, "8 experts cannot be divided over 3 expert-parallel ranks"),
        (["--expert-model-parallel-size", "2"], 1, "1 processes do not hold"),
        (["--quads-recipe", "int3"], 1, "unknown recipe 'int3'"),
        (["--quads-rac-ratio", "1.5"], 1, "ratio 1.5 is outside 0..1"),
        (["--quads-rac-ratio", "much"], 1, "invalid float value: 'much'"),
        (["--quads-recipe", "fp8", "--quads-module-pattern", "nothing.*"], 1, "recipe 'fp8' matches no layer of 2"),
        (
            ["--transformer-impl", "inference_optimized"],
            1,
            "[--transformer-impl]; choose one of local, transformer_engine",
        ),
        (["--quads-weight-cache", "packed"], 1, "[--quads-weight-cache, --quads-weight-hook]; leave them out, or use"),
        (["--quads-module-pattern", "nothing.*"], 1, "matches no layer of 2"),
        (["--quads-keep-first-layers", "1", "--quads-keep-last-layers", "1"], 1, "matches no layer of 2"),
        (["--no-such-flag"], 1, "unrecognized arguments: --no-such-flag"),
        (["--num-layers", "3"], 1, "3 contradicts 2"),
        (["--attention-dropout", "0.1"], 1, "0.1 contradicts 0.0"),
        (["--norm-epsilon", "1e-5"], 1, "1e-05 contradicts 1e-06"),
        (["--transformer-impl", "transformer_engine"], 1, "Transformer Engine needs a GPU"),
        (["--expert-tensor-parallel-size", "8"], 8, "not a multiple of 128"),
        (["--tensor-model-parallel-size", "2"], 2, "Megatron sets it to the tensor parallel size, 2"),
    ],
)
def test_bad_input_is_one_line(
    hf: HFModel, monkeypatch: pytest.MonkeyPatch, argv: list[str], world: int, said: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    before = list(sys.argv)
    with pytest.raises(QuadsError) as error:
        parse_args(argv, hf)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert error.value.exit_code == 2 and sys.argv == before


def test_k_that_is_not_whole_blocks_names_the_tensor(hf: HFModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(QuadsError, match="K = 72 of every expert's down_proj"):
        parse_args([], dataclasses.replace(hf, moe_intermediate_size=72))


def test_derived_namespace(tiny_hf: Path, tmp_path: Path) -> None:
    """In a process of its own: checking the arguments applies patches."""
    code = (
        "import json, sys\n"
        "from megatron_quads.checkpoint.hf import read_model_config\n"
        "from megatron_quads.config import QuadsConfig\n"
        "from megatron_quads.trainer.args import parse_args\n"
        "a = parse_args(sys.argv[2:], read_model_config(sys.argv[1]))\n"
        "keys = sys.stdin.read().split()\n"
        "print(json.dumps({k: str(getattr(a, k)) for k in keys} | {'quads': QuadsConfig.from_args(a).to_dict()},"
        " default=str))\n"
    )
    expected = {
        "layernorm_epsilon": "1e-06",
        "rotary_base": "1000000.0",
        "padded_vocab_size": "512",
        "quads_vocab_size": "500",
        "kv_channels": "64",
        "num_query_groups": "2",
        "moe_router_pre_softmax": "False",
        "use_distributed_optimizer": "True",
        "calculate_per_token_loss": "True",
        "params_dtype": "torch.bfloat16",
        "lr": "0.002",
    }
    argv = ["--bf16", "--lr", "2e-3", "--quads-recipe", "qat", "--quads-keep-first-layers", "1", "--no-quads-rac-sort"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tiny_hf), *argv],
        input=" ".join(expected),
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    found = json.loads(done.stdout.strip().splitlines()[-1])
    quads = found.pop("quads")
    assert found == expected
    assert (quads["recipe"], quads["keep_first_layers"], quads["rac_sort"]) == ("qat", 1, False)
