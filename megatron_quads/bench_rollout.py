"""``quads bench rollout``: tokens/s of vLLM with BF16, FP8, W4A16, W4A4-emulated and QUADS experts, on one GPU.

Every arm is an engine in a process of its own on the same GPU, all alive, and the arms take turns: one round is each arm
once, so clocks and neighbours are the same for all. Only one generates at a time. Qwen3-30B-A3B's shapes with random
weights; greedy, ``TOKENS_OUT`` tokens each, CUDA graphs and torch.compile as vLLM sets them.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from . import atomic
from .errors import QuadsError

TOKENS_IN, TOKENS_OUT = 32, 96
BATCHES = (16, 64, 256)
VOCAB = 151936
ARMS = ("bf16", "fp8", "w4a16", "emulation", "quads-0", "quads-0.25", "quads-0.5", "quads-1")


@dataclass
class Row:
    """Median over rounds. ``of_w4a16``: median over rounds of the ratio to that round's W4A16."""

    arm: str
    ratio: float | None
    batch: int
    tok_s: float
    of_w4a16: float | None
    rounds: int


def model_config(layers: int, arm: str) -> dict[str, Any]:
    """config.json of one arm."""
    from .rac.metadata import GemmSelection, LayerSelection, ModelShape, RacMetadata

    hidden, inter, experts = 2048, 768, 128
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": VOCAB, "hidden_size": hidden,
        "intermediate_size": 6144, "moe_intermediate_size": inter, "num_hidden_layers": layers,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": experts,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "hidden_act": "silu", "attention_bias": False, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16",
    }  # fmt: skip
    if arm in ("bf16", "fp8"):
        return config
    block: dict[str, Any] = {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16,
        "ignore": ["lm_head", "*mlp.gate", "*self_attn*"], "producer": {"name": "modelopt", "version": "0.47.0"},
    }  # fmt: skip
    if arm.startswith("quads-"):
        ratio = float(arm.removeprefix("quads-"))
        rng = random.Random(0)
        chosen = sorted(rng.sample(range(hidden // 16), int(ratio * hidden / 16)))
        entry = LayerSelection(gate_up=GemmSelection(blocks=chosen), down=GemmSelection(prefix=int(ratio * inter / 16)))
        shape = ModelShape(model_type="qwen3_moe", num_layers=layers, num_experts=experts, hidden_size=hidden,
                           moe_intermediate_size=inter)  # fmt: skip
        made = RacMetadata(model=shape, activation_scale="token", policy="uniform", ratio=ratio, sorted=False,
                           layers=dict.fromkeys(range(layers), entry))  # fmt: skip
        block["rac"] = made.to_block()
    return {**config, "quantization_config": block}


class Arm:
    """One engine in a child process: JSON lines in and out."""

    def __init__(self, name: str, folder: Path, log: Path) -> None:
        self.name, self.log = name, log
        env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
               "QUADS_KERNEL": "auto"}  # fmt: skip
        command = [sys.executable, "-m", "megatron_quads.bench_rollout", name, str(folder)]
        with open(log, "wb") as out:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, env=env)

    def read(self) -> dict[str, Any]:
        """The next reply; QuadsError when the child is gone."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"@@"):
                return json.loads(line[2:])
        raise QuadsError(f"arm {self.name} died ({self.process.wait()})", where=str(self.log), do="read its log")

    def ask(self, **message: Any) -> dict[str, Any]:
        """Send one command, wait for its reply."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as e:
            raise QuadsError(f"arm {self.name} died", where=str(self.log), do="read its log") from e
        return self.read()

    def stop(self) -> None:
        """End the child."""
        self.process.kill()
        self.process.wait()


def rollout(out: Path, *, layers: int = 12, arms: tuple[str, ...] = ARMS, rounds: int = 6) -> None:
    """Run all arms, write ``out``. An arm that does not start is reported and left out; QuadsError when none does."""
    unknown = [a for a in arms if a not in ARMS]
    if unknown:
        raise QuadsError(f"unknown arms {unknown}", where="--arms", do=f"choose from {', '.join(ARMS)}")
    import torch

    if not torch.cuda.is_available():
        raise QuadsError("no CUDA GPU", where="quads bench rollout", do="run it on a machine with one")
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "layers": layers,
             "tokens_in": TOKENS_IN, "tokens_out": TOKENS_OUT}  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        started = [_start(name, Path(scratch), out.parent, layers) for name in arms]
        try:
            ready = [arm for arm in started if _ready(arm)]
            if not ready:
                raise QuadsError("no arm started", where=str(out.parent), do="read the logs")
            found: dict[tuple[str, int], list[float]] = {}
            for number in range(rounds + 1):
                for batch in BATCHES:
                    for arm in ready[:: 1 if number % 2 else -1]:
                        tok_s = arm.ask(batch=batch, seed=number)["tok_s"]
                        if number:  # the first round warms up
                            found.setdefault((arm.name, batch), []).append(tok_s)
                if number:
                    atomic.write_json(out, {**about, "rows": [asdict(r) for r in rows(found)]})
        finally:
            for arm in started:
                arm.stop()
    for row in rows(found):
        print(json.dumps(asdict(row)), flush=True)


def rows(found: dict[tuple[str, int], list[float]]) -> list[Row]:
    """Medians of the paired rounds."""
    out = []
    for (arm, batch), values in found.items():
        base = found.get(("w4a16", batch))
        paired = statistics.median(v / b for v, b in zip(values, base, strict=False)) if base else None
        ratio = float(arm.removeprefix("quads-")) if arm.startswith("quads-") else None
        out.append(
            Row(arm, ratio, batch, round(statistics.median(values), 1), paired and round(paired, 4), len(values))
        )
    return out


def _start(name: str, scratch: Path, logs: Path, layers: int) -> Arm:
    folder = scratch / name
    folder.mkdir()
    config = model_config(layers, name)
    (folder / "config.json").write_text(json.dumps(config))
    if "rac" in config.get("quantization_config", {}):
        from .rac.metadata import SIDECAR

        atomic.write_json(folder / SIDECAR, config["quantization_config"]["rac"])
    return Arm(name, folder, logs / f"bench_{name}.log")


def _ready(arm: Arm) -> bool:
    try:
        print(json.dumps({"arm": arm.name, **arm.read()}), flush=True)
    except QuadsError as e:
        print(f"left out: {e}", flush=True)
        return False
    return True


def _serve(name: str, folder: str, commands: IO[str]) -> None:
    begin = time.monotonic()
    from vllm import LLM, SamplingParams

    from .rollout.plugin import require_registered

    require_registered()
    extra: dict[str, Any] = {"quantization": "fp8"} if name == "fp8" else {}
    if name == "emulation":
        extra["moe_backend"] = "emulation"
    llm = LLM(model=folder, load_format="dummy", dtype="bfloat16", max_model_len=160, max_num_seqs=max(BATCHES),
              skip_tokenizer_init=True, enable_prefix_caching=False, gpu_memory_utilization=0.05,
              kv_cache_memory_bytes=2 << 30, seed=0, **extra)  # fmt: skip
    print("@@" + json.dumps({"start_s": round(time.monotonic() - begin, 1)}), flush=True)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS_OUT, ignore_eos=True, detokenize=False)
    for line in commands:
        ask = json.loads(line)
        rng = random.Random(ask["seed"])
        prompts: Any = [
            {"prompt_token_ids": [rng.randrange(VOCAB) for _ in range(TOKENS_IN)]} for _ in range(ask["batch"])
        ]
        start = time.monotonic()
        llm.generate(prompts, params, use_tqdm=False)
        seconds = time.monotonic() - start
        print("@@" + json.dumps({"tok_s": ask["batch"] * TOKENS_OUT / seconds}), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], sys.stdin)
