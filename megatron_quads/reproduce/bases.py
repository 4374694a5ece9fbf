"""Calibrated checkpoints of the arms and of the study, several in one job: the warm model, one selection each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .. import atomic, jobs
from ..config import QuadsConfig
from ..rl.data import encode_prompts, warmup_prompts
from ..rl.tasks import make_task
from ..rl.tokenizer import load_tokenizer
from .config import Config, base_name
from .folder import Root

CALIBRATION_SEED = 7  # added to the seed: a range of training problems that neither warm-up nor RL draws from
Selection = tuple[float, str, bool]
"""Ratio, policy, sorted."""


def make_bases(root: Root, selections: Sequence[Selection]) -> None:
    """Calibrate the warm checkpoint for each selection that is not there yet; a process that wants one of them waits."""
    warm = root.require_warm()
    wanted = {base_name(*s): s for s in selections}
    with ExitStack() as locks:
        for name in sorted(wanted):  # in one order everywhere: no two processes wait for each other
            locks.enter_context(root.lock(f"base-{name}"))
        missing = [(name, s) for name, s in wanted.items() if not _made_from(root.base(name), warm)]
        if not missing:
            return
        folder = atomic.make_folder(root.path / "bases")
        prompts = folder / "prompts.json"
        atomic.write_bytes(prompts, json.dumps(calibration_sequences(root.config, root.warm)).encode())
        print(f"calibrating {', '.join(name for name, _ in missing)}", flush=True)
        parts = [{"out": str(root.base(name)), "ratio": r, "policy": p, "sort": s} for name, (r, p, s) in missing]
        settings = {"part": "calibrate", "model": str(root.warm), "prompts": str(prompts), "selections": parts}
        argv = [*root.config.flags(), "--quads-recipe", "quads"]
        jobs.launch("reproduce", settings, argv, nproc=root.config.nproc, logs=folder / f"logs-{missing[0][0]}")
        for name, _ in missing:
            atomic.write_json(_stamp(root.base(name)), {"warm": warm})


def _stamp(base: Path) -> Path:
    return base.with_name(f"{base.name}.json")


def _made_from(base: Path, warm: str) -> bool:
    """Whether the base is whole and of these warm weights."""
    stamp = _stamp(base)
    return atomic.is_committed(base) and stamp.exists() and json.loads(stamp.read_text()) == {"warm": warm}


def calibrate_job(job: jobs.Job) -> None:
    """Every rank: one calibration after the other."""
    import torch.distributed as dist

    from ..rac.calibrate import calibrate

    s: dict[str, Any] = job.settings
    args, _, _ = jobs.start(job, s["model"])
    prompts = json.loads(Path(s["prompts"]).read_text())
    for part in s["selections"]:
        quads = QuadsConfig(recipe="quads", rac_ratio=part["ratio"], rac_policy=part["policy"], rac_sort=part["sort"])
        report = calibrate(s["model"], prompts, quads, Path(part["out"]), args=args)
        if dist.get_rank() == 0:
            print(f"{Path(part['out']).name}: {report.flop_share:.1%} of the expert FLOPs compensated", flush=True)


def calibration_sequences(config: Config, model: Path) -> list[list[int]]:
    """Prompts with their answers."""
    from ..checkpoint.hf import read_model_config

    hf, tokenizer = read_model_config(model), load_tokenizer(model)
    task = make_task(config.task, config.task_config)
    problems = warmup_prompts(task, config.seed + CALIBRATION_SEED, 0, config.calibration_prompts)
    prompts = encode_prompts(
        problems, lambda t: tokenizer.encode(t), context=hf.max_position, max_tokens=config.rl.max_new_tokens
    )
    return [[*p, *tokenizer.encode(q.answer), tokenizer.eos_token_id] for p, q in zip(prompts, problems, strict=True)]
