"""``make demo``: the whole QUADS loop on a tiny Qwen3-MoE with real Megatron-Core and real vLLM, on a CPU.

init -> supervised warm-up (Megatron) -> calibration (sort, residual blocks) -> GRPO per arm -> comparison
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import atomic, jobs
from .config import RECIPES
from .errors import QuadsError
from .proof.compare import compare
from .rl.config import RLConfig
from .rl.data import encode_prompts, warmup_prompts
from .rl.tasks import make_task
from .rl.tiny import DemoDefaults, make_tiny_checkpoint
from .screen import Screen

CALIBRATION_PROMPTS = 64
CALIBRATION_SEED = 7


def run_demo(out: Path, *, arms: Sequence[str], seed: int, steps: int | None, nproc: int, overwrite: bool) -> None:
    """Run the demo into ``out``. Raises QuadsError on an unknown arm or a folder in use."""
    for arm in arms:
        if arm not in RECIPES:
            raise QuadsError(f"unknown arm {arm!r}", where="--arms", do=f"choose among {', '.join(RECIPES)}")
    if out.exists() and any(out.iterdir()):
        if not overwrite:
            raise QuadsError("folder is not empty", where=str(out), do="give --overwrite or another --out")
        if not (out / "demo.json").exists():
            raise QuadsError("folder was not made by the demo", where=str(out), do="choose another --out")
        shutil.rmtree(out)
    atomic.make_folder(out)
    (out / "demo.json").write_text(json.dumps({"arms": list(arms), "seed": seed}))
    started = time.monotonic()
    with Screen(stages=len(arms) + 2) as screen:
        _stages(screen, out, arms=arms, seed=seed, steps=steps, nproc=nproc)
    rows = compare([out / arm for arm in arms], out)
    quads = next((r for r in rows if r["arm"] == "quads"), rows[-1])
    print(
        f"demo: done in {time.monotonic() - started:.0f} s; {quads['arm']}: gap mean {quads['gap_mean']:.2e}, "
        f"{quads['weight_bits_mismatched']} weight bits differ, reward {quads['reward_before']:.3f} -> {quads['reward_after']:.3f}; "
        f"table {out / 'compare.json'}",
        flush=True,
    )


def _stages(screen: Screen, out: Path, *, arms: Sequence[str], seed: int, steps: int | None, nproc: int) -> None:
    """Warm-up, calibration and the arms."""
    d = DemoDefaults()
    optimizer = optimizer_flags()
    layout = [
        "--expert-model-parallel-size",
        str(nproc),
        "--micro-batch-size",
        str(max(d.warmup_batch, d.groups * d.samples) // nproc),
    ]

    screen.stage(f"tiny Qwen3-MoE and supervised warm-up, {d.warmup_steps} steps, Megatron EP={nproc}")
    task = make_task(d.task, d.task_config)
    init = make_tiny_checkpoint(out / "init", seed, task=task)
    warm = out / "warm"
    settings, argv = warmup_job(init, warm, seed=seed, nproc=nproc)
    jobs.launch("warmup", settings, argv, nproc=nproc, logs=out / "logs" / "warmup", show=screen.line)

    screen.stage("calibration: sort the experts' channels, choose the residual blocks")
    prompts = calibration_sequences(init, seed)
    (out / "calibration.json").write_text(json.dumps(prompts))
    base = out / "base"
    jobs.launch(
        "calibrate",
        {"model": str(warm), "prompts": str(out / "calibration.json"), "out": str(base)},
        [*layout, "--quads-recipe", "quads"],
        nproc=nproc,
        logs=out / "logs" / "calibrate",
        show=screen.line,
    )

    for arm in arms:
        screen.stage(f"arm {arm}: GRPO, Megatron EP={nproc} and vLLM")
        cfg = RLConfig(
            model=str(base),
            out=str(out / arm),
            task=d.task,
            task_config=d.task_config,
            steps=d.steps if steps is None else steps,
            prompts_per_step=d.groups,
            samples_per_prompt=d.samples,
            max_new_tokens=d.max_tokens,
            temperature=d.temperature,
            seed=seed,
            lr_ramp=d.lr_ramp,
            heldout=d.heldout,
        )
        argv = [*layout, *optimizer, "--lr", str(d.lr), "--quads-recipe", arm]
        jobs.launch(
            "rl", {"rl": cfg.to_dict(), "resume": False}, argv, nproc=nproc, logs=out / arm / "logs", show=screen.line
        )

    screen.end()


def optimizer_flags() -> list[str]:
    """Megatron's optimizer flags of warm-up and arms."""
    d = DemoDefaults()
    return ["--adam-beta1", str(d.adam_beta1), "--adam-beta2", str(d.adam_beta2), "--clip-grad", str(d.clip_grad)]


def warmup_job(init: Path, out: Path, *, seed: int, nproc: int) -> tuple[dict[str, Any], list[str]]:
    """Settings and Megatron arguments of job ``warmup``: from the untrained ``init`` to the checkpoint ``out``."""
    d = DemoDefaults()
    settings = {
        "model": str(init),
        "out": str(out),
        "task": d.task,
        "task_config": d.task_config,
        "steps": d.warmup_steps,
        "batch": d.warmup_batch,
        "seed": seed,
        "noise": d.demo_noise,
    }
    layout = ["--expert-model-parallel-size", str(nproc), "--micro-batch-size", str(d.warmup_batch // nproc)]
    return settings, [*layout, *optimizer_flags(), "--quads-recipe", "bf16"]


def calibration_sequences(model: Path, seed: int) -> list[list[int]]:
    """Prompts with their answers, from a range of training problems that neither warm-up nor RL draws from."""
    from .checkpoint.hf import read_model_config
    from .rl.tokenizer import load_tokenizer

    d, hf, tokenizer = DemoDefaults(), read_model_config(model), load_tokenizer(model)
    task = make_task(d.task, d.task_config)
    problems = warmup_prompts(task, seed + CALIBRATION_SEED, 0, CALIBRATION_PROMPTS)
    prompts = encode_prompts(problems, lambda t: tokenizer.encode(t), context=hf.max_position, max_tokens=d.max_tokens)
    return [[*p, *tokenizer.encode(q.answer), tokenizer.eos_token_id] for p, q in zip(prompts, problems, strict=True)]
