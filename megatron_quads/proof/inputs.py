"""What ``quads analyze`` needs of a run: sequences sampled by the real rollout from the run's starting weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .. import atomic, jobs
from ..checkpoint.hf import read_model_config
from ..errors import QuadsError
from ..rl.data import encode_prompts, step_prompts
from ..rl.runfolder import RunFolder
from ..rl.tasks import make_task
from ..rl.tokenizer import load_tokenizer
from ..rollout.client import LocalRollout


def sample_for_analysis(folder: RunFolder, info: dict[str, Any], out: Path, sequences: int) -> tuple[Path, Path]:
    """Export the run's starting model, sample ``sequences`` responses from it with vLLM; (samples JSON, HF model)."""
    rl, quads = info["rl"], info["quads"]
    if quads["recipe"] in ("bf16", "fp8"):
        raise QuadsError(
            f"recipe {quads['recipe']} has no NVFP4 error to split", where=str(folder.path), do="analyze an NVFP4 arm"
        )
    model = Path(rl["model"])
    hf, tokenizer = read_model_config(model), load_tokenizer(model)
    task = make_task(rl["task"], rl["task_config"])
    problems = step_prompts(task, rl["seed"], 0, sequences)
    prompts = encode_prompts(
        problems, lambda t: tokenizer.encode(t), context=hf.max_position, max_tokens=rl["max_new_tokens"]
    )
    atomic.make_folder(out)
    exported = out / "rollout"
    settings = {"model": str(model), "out": str(exported), "trainer_checkpoint": None}
    jobs.launch("export", settings, jobs.without_layout(info["argv"]), nproc=1, logs=folder.logs)
    dtype = "bfloat16" if "--bf16" in info["argv"] else "float32"
    with LocalRollout(
        exported,
        dtype=dtype,
        max_model_len=hf.max_position,
        max_num_seqs=64,
        seed=0,
        log=folder.logs / "analyze_rollout.log",
    ) as rollout:
        rollout.assert_active()
        groups = rollout.generate(
            prompts, n=1, max_tokens=rl["max_new_tokens"], temperature=rl["temperature"], seed=rl["seed"]
        )
    data = {
        "sequences": [[*p, *g[0].token_ids] for p, g in zip(prompts, groups, strict=True)],
        "logprobs": [g[0].logprobs for g in groups],
    }
    samples = out / "samples.json"
    atomic.write_bytes(samples, json.dumps(data).encode())
    return samples, model
