"""Work that runs on Megatron ranks. ``quads`` starts these: in place under torchrun or srun, else as local processes.

A job is a name, a JSON object of settings and Megatron's own command line. Every rank runs the same function.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import QuadsError
from .launch.local import end_with_launcher


@dataclass(frozen=True)
class Job:
    """What one rank needs: settings (JSON values) and Megatron arguments."""

    settings: dict[str, Any]
    argv: list[str]


def launch(
    name: str,
    settings: dict[str, Any],
    argv: Sequence[str],
    *,
    nproc: int,
    logs: Path,
    show: Callable[[str], None] = print,
) -> None:
    """Run job ``name`` here (RANK is set) or as ``nproc`` local processes; raises QuadsError when it fails.

    ``show`` gets the lines that rank 0 of local processes prints.
    """
    if name not in JOBS:
        raise KeyError(name)
    if "RANK" in os.environ:
        run(name, Job(settings, list(argv)))
        from .trainer import runtime

        runtime.shutdown()
        return
    from .launch.local import run_ranks

    payload = json.dumps({"settings": settings, "argv": list(argv)})
    run_ranks([sys.executable, "-m", "megatron_quads.jobs", name, payload], nproc=nproc, logs=logs, show=show)


def without_layout(argv: list[str]) -> list[str]:
    """A run's Megatron arguments without its layout: proofs reshard to the ranks they run on."""
    out, skip = [], False
    for word in argv:
        if skip:
            skip = False
            continue
        name = word.split("=")[0]
        if name.endswith("-parallel-size"):
            skip = "=" not in word
            continue
        out.append(word)
    return out


def run(name: str, job: Job) -> None:
    """Run one job on this rank, inside an initialised distributed runtime."""
    # set before transformers, vLLM or Megatron are imported
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    JOBS[name](job)


def start(job: Job, model: str) -> tuple[Any, Any, Any]:
    """Megatron's arguments, the checkpoint's configuration and the recipe, in an initialised runtime."""
    from .checkpoint.hf import read_model_config
    from .config import QuadsConfig
    from .trainer import runtime
    from .trainer.args import parse_args

    hf = read_model_config(model)
    args = parse_args(job.argv, hf)
    runtime.initialize(args)
    return args, hf, QuadsConfig.from_args(args)


def rl(job: Job) -> None:
    """``quads rl``: GRPO until ``steps``."""
    import torch.distributed as dist

    from . import __version__, atomic
    from .rl.config import RLConfig
    from .rl.loop import train
    from .rl.ranks import share
    from .rl.runfolder import RunFolder

    cfg, resume = RLConfig.from_dict(job.settings["rl"]), job.settings["resume"]
    args, hf, quads = start(job, cfg.model)
    folder = RunFolder(cfg.out)
    fault: QuadsError | None = None
    if dist.get_rank() == 0:
        try:
            folder.acquire(resume=resume)
            run_json = {"rl": cfg.to_dict(), "quads": quads.to_dict(), "argv": job.argv, "version": __version__}
            if resume:
                _require_same(folder.read_run(), run_json, folder.path, model=not job.settings.get("model_is_checked"))
            atomic.write_json(folder.path / "run.json", run_json)
        except QuadsError as e:
            fault = e
    if refused := share(fault):
        raise refused
    try:
        train(args, hf, quads, cfg, resume=resume)
    except QuadsError:
        if dist.get_rank() == 0 and not resume:
            folder.abandon()
        raise
    finally:
        folder.release()


def _require_same(old: dict[str, Any], new: dict[str, Any], where: Path, *, model: bool = True) -> None:
    """A resumed run may change how long it goes on and how often it saves, nothing that its numbers depend on.

    ``model`` False: the caller knows the checkpoint by its digest, wherever it lies now.
    """
    free = {"steps", "save_every", "eval_every", "wandb_project", "rollout", "refit", "out"}
    if not model:
        free.add("model")
    from .rl.config import RLConfig

    old = {**old, "rl": RLConfig.from_dict(old["rl"]).to_dict()}  # an older run.json lacks newer settings
    for part in ("rl", "quads"):
        for key, value in new[part].items():
            if key not in free and old[part].get(key) != value:
                raise QuadsError(
                    f"{key} was {old[part].get(key)!r} and is now {value!r}",
                    where=str(where / "run.json"),
                    do="resume with the run's own settings",
                )


def warmup(job: Job) -> None:
    """Supervised warm-up on a task's own answers, then export of a plain HF checkpoint."""
    import torch.distributed as dist

    from .checkpoint.export import export_hf
    from .rl.data import warmup_batch
    from .rl.loss import supervised_loss
    from .rl.tasks import make_task
    from .rl.tiny import DemoDefaults
    from .rl.tokenizer import load_tokenizer
    from .trainer.trainer import Trainer

    s = job.settings
    args, hf, quads = start(job, s["model"])
    demo = DemoDefaults()
    task, tokenizer = make_task(s["task"], s["task_config"]), load_tokenizer(hf.path)
    trainer = Trainer(args, hf, quads)
    for step in range(s["steps"]):
        batch = warmup_batch(
            task,
            lambda t: tokenizer.encode(t),
            seed=s["seed"],
            step=step,
            n=s["batch"],
            eos_id=tokenizer.eos_token_id,
            pad_id=tokenizer.pad_token_id,
            context=hf.max_position,
            noise=s["noise"],
            multiple=args.tensor_model_parallel_size,
        )
        for group in trainer.optimizer.param_groups:
            group["lr"] = demo.warmup_lr_at(step)
        found = trainer.step(batch, supervised_loss)
        if dist.get_rank() == 0 and ((step + 1) % 25 == 0 or step == 0):
            print(f"warm-up {step + 1:4d}/{s['steps']}  loss {found['loss']:.3f}", flush=True)
    export_hf(
        trainer.chunks, hf, quads, Path(s["out"]), rac=None, dtype=trainer.dtype, extra_marker={"kind": "warm-up"}
    )


def calibrate(job: Job) -> None:
    """``quads calibrate``."""
    import torch.distributed as dist

    from .rac.calibrate import calibrate as run_calibration

    args, _, quads = start(job, job.settings["model"])
    prompts = json.loads(Path(job.settings["prompts"]).read_text())
    found = job.settings.get("statistics")
    report = run_calibration(
        job.settings["model"],
        prompts,
        quads,
        Path(job.settings["out"]),
        args=args,
        statistics=Path(found) if found else None,
    )
    if dist.get_rank() == 0:
        print(
            f"calibrated on {report.tokens} tokens; {report.flop_share:.1%} of the expert FLOPs compensated; RAC {report.rac.content_hash[:12]}",
            flush=True,
        )


def export(job: Job) -> None:
    """``quads export``: a HF checkpoint, or a run's trainer checkpoint, to what vLLM serves."""

    from .checkpoint.export import export_hf
    from .rac.metadata import required_rac

    s = job.settings
    args, hf, quads = start(job, s["model"])
    rac = required_rac(quads, hf)
    if rac is not None:
        rac = _saved_selection(s["trainer_checkpoint"]) or rac
    chunks = _model(args, hf, quads, s["trainer_checkpoint"])
    export_hf(chunks, hf, quads, Path(s["out"]), rac=rac, dtype=args.params_dtype, extra_marker={"kind": "export"})


def _saved_selection(trainer_checkpoint: str | None) -> Any:
    """The RAC metadata that belong to a trainer checkpoint's weights; None where it holds none."""
    from .rac.metadata import saved_selection
    from .trainer.state import read_extra

    if trainer_checkpoint is None:
        return None
    return saved_selection(read_extra(Path(trainer_checkpoint)), where=trainer_checkpoint)


def _model(args: Any, hf: Any, quads: Any, trainer_checkpoint: str | None) -> list[Any]:
    """The model without an optimizer, holding a trainer checkpoint's weights or the HF folder's."""
    from .checkpoint.load import load_hf
    from .trainer.experts import require_match
    from .trainer.model import build
    from .trainer.trainer import load_weights

    chunks = build(args, hf, quads)
    require_match(chunks, quads)
    if trainer_checkpoint:
        load_weights(chunks, trainer_checkpoint)
    else:
        load_hf(chunks, hf)
    return chunks


def verify(job: Job) -> None:
    """``quads verify``: the weights of a trainer checkpoint against the exported ones."""
    from .proof.verify import require_selection, verify_export

    s = job.settings
    args, hf, quads = start(job, s["model"])
    require_selection(_saved_selection(s["trainer_checkpoint"]), Path(s["export"]))
    chunks = _model(args, hf, quads, s["trainer_checkpoint"])
    verify_export(chunks, hf, Path(s["export"]), dtype=args.params_dtype, engine=s["engine"], logs=Path(s["logs"]))


def analyze(job: Job) -> None:
    """``quads analyze``."""
    from .proof.analyze import analyze as run_analysis
    from .rac.metadata import required_rac

    s = job.settings
    args, hf, quads = start(job, s["model"])
    data = json.loads(Path(s["samples"]).read_text())
    run_analysis(
        s["model"], data["sequences"], data["logprobs"], quads, Path(s["out"]), args=args, rac=required_rac(quads, hf)
    )


def reproduce(job: Job) -> None:
    """``quads reproduce``: the part that the settings name."""
    from .reproduce.worker import PARTS

    PARTS[job.settings["part"]](job)


JOBS: dict[str, Callable[[Job], None]] = {
    "rl": rl,
    "warmup": warmup,
    "calibrate": calibrate,
    "export": export,
    "verify": verify,
    "analyze": analyze,
    "reproduce": reproduce,
}


def main() -> None:
    """Entry point of one local rank: ``python -m megatron_quads.jobs NAME JSON``."""
    logging.basicConfig(level=os.environ.get("QUADS_LOG", "WARNING"), format="%(levelname)s %(name)s: %(message)s")
    end_with_launcher()
    payload = json.loads(sys.argv[2])
    try:
        run(sys.argv[1], Job(payload["settings"], payload["argv"]))
    except QuadsError as e:
        print(f"quads: error: {e}", file=sys.stderr, flush=True)
        # a peer may wait in a collective: leave without destroying the process group, the launcher ends the others
        os._exit(e.exit_code)
    from .trainer import runtime

    runtime.shutdown()


if __name__ == "__main__":
    main()
