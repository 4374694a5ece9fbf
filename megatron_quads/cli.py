"""The ``quads`` command. Options that it does not know go to Megatron's own parser (``--quads-recipe``, parallelism, lr)."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from . import cli_launch
from .errors import QuadsError
from .reproduce import cli as cli_reproduce

MEGATRON = {"allow_extra_args": True, "ignore_unknown_options": True}
app = typer.Typer(
    name="quads",
    help="NVFP4 reinforcement learning for MoE LLMs: Megatron trainer, vLLM rollout, one arithmetic contract.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
bench = typer.Typer(help="Benchmarks.", no_args_is_help=True)
app.add_typer(bench, name="bench")
cli_launch.register(app)
cli_reproduce.register(app)

Model = Annotated[Path, typer.Option(help="Hugging Face checkpoint folder (Qwen3-MoE).")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace --out; the old one stays until the new is whole.")
]
Nproc = Annotated[int, typer.Option(help="Local ranks to start; ignored under torchrun and srun.", min=1)]


def _epilog(example: str) -> str:
    return f"Example:  {example}"


def _launch(
    name: str,
    settings: dict[str, Any],
    argv: list[str],
    *,
    nproc: int,
    logs: Path,
    show: Callable[[str], None] = print,
) -> None:
    from . import jobs
    from .config import check_flags

    check_flags(argv)  # before anything slow is imported
    jobs.launch(name, settings, argv, nproc=nproc, logs=logs, show=show)


@app.command(
    context_settings=MEGATRON,
    epilog=_epilog(
        "quads rl --model sorted/ --out runs/a --task chain_sum --nproc 2 --quads-recipe quads --expert-model-parallel-size 2 --lr 1e-6"
    ),
)
def rl(
    ctx: typer.Context,
    model: Model,
    out: Annotated[Path, typer.Option(help="Run folder.")],
    task: Annotated[
        str, typer.Option(help="reasoning-gym dataset, or a .jsonl file with prompt and answer.")
    ] = "spell_backward",
    task_config: Annotated[str, typer.Option(help="JSON options of the reasoning-gym generator.")] = "{}",
    steps: int = 20,
    prompts_per_step: int = 32,
    samples_per_prompt: int = 8,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    seed: int = 0,
    updates_per_step: int = 1,
    lr_ramp: int = 0,
    heldout: int = 64,
    eval_every: Annotated[int, typer.Option(help="Held-out problems after every N steps too; see evals.jsonl.")] = 0,
    save_every: Annotated[int, typer.Option(help="Trainer checkpoint every N steps; the last is always saved.")] = 0,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    tis_cap: Annotated[float, typer.Option(help="Cap of the importance weight; 0 turns the correction off.")] = 2.0,
    kl_coef: Annotated[
        float, typer.Option(help="Weight of the KL to the starting policy; 0 keeps no reference.")
    ] = 0.0,
    recalibrate_every: Annotated[
        int, typer.Option(help="RAC's blocks anew every N steps, on the step's samples; 0: never.")
    ] = 0,
    rollout: Annotated[str, typer.Option(help="local, or the URL of a vLLM server.")] = "local",
    refit: Annotated[str, typer.Option(help="flat: packed weights from memory; folder: exports; auto.")] = "auto",
    wandb_project: Annotated[str | None, typer.Option(help="Also log to Weights & Biases.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    nproc: Nproc = 1,
) -> None:
    """GRPO: roll out with vLLM, train with Megatron, refit packed weights, measure the log-prob gap."""
    from .rl.config import RLConfig
    from .rl.loss import GRPOConfig

    cfg = RLConfig(
        model=str(model),
        out=str(out),
        task=task,
        task_config=_json_object(task_config, "--task-config"),
        steps=steps,
        prompts_per_step=prompts_per_step,
        samples_per_prompt=samples_per_prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        updates_per_step=updates_per_step,
        lr_ramp=lr_ramp,
        heldout=heldout,
        eval_every=eval_every,
        save_every=save_every,
        recalibrate_every=recalibrate_every,
        rollout=rollout,
        refit=refit,
        wandb_project=wandb_project,
        grpo=GRPOConfig(clip_low=clip_low, clip_high=clip_high, tis_cap=tis_cap or None, kl_coef=kl_coef),
    )
    from .screen import Screen

    _refuse_used(out, resume=resume)
    with Screen() as screen:
        settings = {"rl": cfg.to_dict(), "resume": resume}
        _launch("rl", settings, ctx.args, nproc=nproc, logs=out / "logs", show=screen.line)
    if "RANK" not in os.environ:
        _report_run(out)


@app.command(epilog=_epilog("quads compare runs/naive runs/qat runs/quads --out runs/table"))
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Finished run folders with the same seeds.")],
    out: Annotated[Path, typer.Option(help="Folder for compare.json and compare.png.")],
) -> None:
    """Arms side by side: gap, reward, weight bits, tokens/s; one table, compare.json and a PNG."""
    from .proof.compare import compare as run_compare

    run_compare(runs, out)


@app.command(
    context_settings=MEGATRON,
    epilog=_epilog(
        "quads export --model sorted/ --out nvfp4/ --quads-recipe quads --nproc 2 --expert-model-parallel-size 2"
    ),
)
def export(
    ctx: typer.Context,
    model: Model,
    out: Annotated[Path, typer.Option(help="Folder of the ModelOpt NVFP4 checkpoint.")],
    trainer_checkpoint: Annotated[
        Path | None, typer.Option(help="Take the weights from this trainer checkpoint.")
    ] = None,
    overwrite: Overwrite = False,
    nproc: Nproc = 1,
) -> None:
    """Pack routed experts to ModelOpt NVFP4, with RAC metadata, from any parallel layout."""
    _refuse_existing(out, overwrite=overwrite)
    settings = {
        "model": str(model),
        "out": str(out),
        "trainer_checkpoint": str(trainer_checkpoint) if trainer_checkpoint else None,
    }
    _launch("export", settings, ctx.args, nproc=nproc, logs=_logs_beside(out))
    typer.echo(f"exported {out}")


@app.command(
    context_settings=MEGATRON,
    epilog=_epilog("quads calibrate --model qwen3/ --prompts prompts.jsonl --out sorted/ --budget 0.5"),
)
def calibrate(
    ctx: typer.Context,
    model: Model,
    prompts: Annotated[Path, typer.Option(help='JSONL, one {"prompt": "..."} or {"tokens": [...]} a line.')],
    out: Annotated[Path, typer.Option(help="Folder of the sorted checkpoint with RAC metadata.")],
    budget: Annotated[
        float | None, typer.Option(help="RAC's share of all expert FLOPs; each GEMM's ratio follows by KL sensitivity.")
    ] = None,
    statistics: Annotated[
        str, typer.Option(help="Where activations are observed: trainer, or vllm (in its workers, by its routing).")
    ] = "trainer",
    overwrite: Overwrite = False,
    nproc: Nproc = 1,
) -> None:
    """Sort the experts' intermediate channels and choose the residual blocks, on calibration prompts."""
    import tempfile

    from .checkpoint.hf import read_model_config
    from .rac import engine
    from .rac.budget import show, with_budget
    from .rl.tokenizer import load_tokenizer

    argv = ctx.args if budget is None else with_budget(ctx.args, budget)
    _refuse_existing(out, overwrite=overwrite)
    hf = read_model_config(model)
    tokenizer = load_tokenizer(hf.path)
    tokens = _read_prompts(prompts, lambda t: tokenizer.encode(t), hf.max_position)
    if statistics not in ("trainer", "vllm"):
        raise QuadsError(f"unknown {statistics!r}", where="--statistics", do="give trainer or vllm")
    if statistics == "vllm":
        _refuse_launcher("quads calibrate --statistics vllm")
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "prompts.json"
        file.write_text(json.dumps(tokens))
        settings = {"model": str(model), "prompts": str(file), "out": str(out)}
        if statistics == "vllm":
            settings["statistics"] = scratch
            engine.collect(model, tokens, argv, Path(scratch), beside=out, nproc=nproc, logs=_logs_beside(out))
        _launch("calibrate", settings, argv, nproc=nproc, logs=_logs_beside(out))
    if "RANK" not in os.environ:
        show(out)
    typer.echo(f"calibrated checkpoint: {out}")


@app.command(epilog=_epilog("quads verify runs/quads"))
def verify(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    engine: Annotated[bool, typer.Option(help="Also load the export into vLLM and ask what it holds.")] = True,
    nproc: Nproc = 1,
) -> None:
    """Prove that the rollout's expert weights are the trainer's, bit for bit; exit 1 names the first that differs."""
    _refuse_launcher("quads verify")
    from . import jobs
    from .proof.compare import audited_refits, require_sound_audit
    from .rl.metrics import read_rows
    from .rl.runfolder import RunFolder

    folder = RunFolder(run)
    info = folder.read_run()
    step = folder.latest_step()
    if step is None:
        raise QuadsError(
            "the run has no trainer checkpoint", where=str(run), do="let it save one (--save-every) or finish"
        )
    if not folder.audit.exists():
        raise QuadsError("audit.jsonl is missing", where=str(run), do="run it again")
    rows = read_rows(folder.audit)
    require_sound_audit(rows, step, folder.audit, may_differ=info["quads"]["recipe"] == "naive")
    refits, tensors, bits = audited_refits(rows)
    typer.echo(f"during the run: {refits} refits audited, {tensors} expert tensors compared, {bits} mismatched bits")
    export_folder = folder.export if folder.export.exists() else folder.refit(step)
    settings = {
        "model": info["rl"]["model"],
        "trainer_checkpoint": str(folder.checkpoint(step)),
        "export": str(export_folder),
        "engine": engine,
        "logs": str(folder.logs),
    }
    _launch("verify", settings, jobs.without_layout(info["argv"]), nproc=nproc, logs=folder.logs)
    typer.echo(f"verify: version {step}: 0 mismatched bits")


@app.command(epilog=_epilog("quads analyze runs/quads"))
def analyze(
    run: Annotated[Path, typer.Argument(help="Run folder of a quantised recipe.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for analyze.json and analyze.png; default RUN/analyze.")
    ] = None,
    sequences: Annotated[int, typer.Option(help="Sequences to sample from the run's start.")] = 64,
    nproc: Nproc = 1,
) -> None:
    """Split the log-prob gap into weight error, activation error and engine drift."""
    _refuse_launcher("quads analyze")
    from . import jobs
    from .proof.inputs import sample_for_analysis
    from .rl.runfolder import RunFolder

    folder = RunFolder(run)
    info = folder.read_run()
    target = out or folder.path / "analyze"
    samples, model = sample_for_analysis(folder, info, target, sequences)
    _launch(
        "analyze",
        {"model": str(model), "samples": str(samples), "out": str(target)},
        jobs.without_layout(info["argv"]),
        nproc=nproc,
        logs=folder.logs,
    )


@app.command(epilog=_epilog("quads doctor --checkpoint nvfp4/;  quads doctor http://127.0.0.1:8000"))
def doctor(
    url: Annotated[str | None, typer.Argument(help="A live vLLM server to check instead of this machine.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Also check this exported checkpoint, or that URL serves it.")
    ] = None,
) -> None:
    """What this machine can run, whether a checkpoint would be served with RAC here, or whether a live server does."""
    from .doctor import report

    if url is not None:
        from .doctor_server import check

        check(url, checkpoint)
    elif not report(checkpoint):
        raise typer.Exit(2)


@app.command(epilog=_epilog("quads demo --out runs/demo"))
def demo(
    out: Annotated[Path, typer.Option(help="Folder for all arms.")] = Path("runs/demo"),
    arms: Annotated[str, typer.Option(help="Recipes, comma-separated.")] = "bf16,naive,qat,quads",
    seed: int = 0,
    steps: Annotated[int | None, typer.Option(help="GRPO steps per arm.")] = None,
    nproc: Annotated[int, typer.Option(help="Trainer processes (expert-parallel).", min=1)] = 2,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier demo in --out.")] = False,
) -> None:
    """The whole loop on a tiny Qwen3-MoE, on a CPU: warm-up, calibration, four arms, comparison."""
    from .demo import run_demo

    run_demo(out, arms=arms.split(","), seed=seed, steps=steps, nproc=nproc, overwrite=overwrite)


@bench.command("kernels", epilog=_epilog("quads bench kernels --out kernels_h200.json"))
def bench_kernels(
    out: Annotated[Path, typer.Option(help="JSON file; the PNG is written beside it.")] = Path("kernels.json"),
) -> None:
    """Time the GPU kernels against a copy and against what else one would use."""
    from .bench import kernels

    kernels(out)


@bench.command("train", epilog=_epilog("quads bench train --out train_h200.json"))
def bench_train(
    out: Annotated[Path, typer.Option(help="JSON file.")] = Path("train.json"),
    layers: Annotated[int, typer.Option(help="Layers of the Qwen3-30B-A3B shape.", min=1)] = 8,
    pairs: Annotated[int, typer.Option(help="Pairs of a plain and a quantised step, each configuration.", min=3)] = 20,
    seconds: Annotated[
        float, typer.Option(help="Fewer pairs (3 at least) if they take longer than this.", min=0.0)
    ] = 20.0,
) -> None:
    """Time a training step with and without quantised experts; needs a GPU with Transformer Engine."""
    from .bench_train import train

    train(out, layers=layers, pairs=pairs, seconds=seconds)


@bench.command("rollout", epilog=_epilog("quads bench rollout --out rollout_h200.json"))
def bench_rollout(
    out: Annotated[Path, typer.Option(help="JSON file; the engines' logs are written beside it.")] = Path(
        "rollout.json"
    ),
    layers: Annotated[int, typer.Option(help="Layers of the Qwen3-30B-A3B shape.", min=1)] = 12,
    arms: Annotated[str | None, typer.Option(help="Comma-separated; default all.")] = None,
    rounds: Annotated[int, typer.Option(help="Paired rounds.", min=1)] = 6,
) -> None:
    """Time vLLM with BF16, FP8, W4A16, emulated W4A4 and QUADS experts in turn, on one GPU."""
    from .bench_rollout import ARMS, rollout

    rollout(out, layers=layers, arms=tuple(arms.split(",")) if arms else ARMS, rounds=rounds)


def _refuse_launcher(command: str) -> None:
    """Proofs start an engine of their own once: not once per rank."""
    if "RANK" in os.environ:
        raise QuadsError(
            f"{command} starts its own ranks", where="RANK is set", do="run it without torchrun or srun, with --nproc"
        )


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as e:
        raise QuadsError(f"not JSON: {e}", where=where, do="give an object such as '{\"min_terms\": 2}'") from e
    if not isinstance(value, dict):
        raise QuadsError("not a JSON object", where=where, do="give an object such as '{\"min_terms\": 2}'")
    return value


def _refuse_existing(out: Path, *, overwrite: bool) -> None:
    if not overwrite and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise QuadsError("--out exists already", where=str(out), do="give --overwrite or choose another folder")


def _report_run(out: Path) -> None:
    """The last line of a finished run."""
    from .rl.runfolder import RunFolder

    folder = RunFolder(out)
    status = json.loads((folder.path / "status.json").read_text())
    if status["state"] == "done":
        rewards = f"{status['reward_before']:.3f} -> {status['reward_after']:.3f}"
        typer.echo(f"done: {status['step']} steps, held-out reward {rewards}; to serve: {folder.export}")


def _refuse_used(out: Path, *, resume: bool) -> None:
    """Before any rank starts; the ranks check again under the folder's lock."""
    from .rl.runfolder import RunFolder

    if (out / "run.json").exists() and not resume and "RANK" not in os.environ:
        folder = RunFolder(out)
        folder.acquire(resume=resume)


def _read_prompts(path: Path, encode: Callable[[str], list[int]], context: int) -> list[list[int]]:
    try:
        lines = path.read_text().splitlines()
    except OSError as e:
        raise QuadsError(f"cannot read: {e.strerror}", where=str(path), do="give a JSONL file") from e
    out: list[list[int]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        row = _json_object(line, where)
        ids = row["tokens"] if "tokens" in row else encode(row["prompt"]) if "prompt" in row else None
        if ids is None:
            raise QuadsError("neither prompt nor tokens", where=where, do='write {"prompt": "..."}')
        if not ids:
            raise QuadsError("the prompt has no tokens", where=where, do="remove it, or look at the tokenizer")
        if len(ids) > context:
            raise QuadsError(
                f"{len(ids)} tokens do not fit a context of {context}",
                where=where,
                do="shorten or remove the prompt",
            )
        out.append([int(i) for i in ids])
    if not out:
        raise QuadsError("no prompts", where=str(path), do='write one {"prompt": "..."} a line')
    return out


def _logs_beside(out: Path) -> Path:
    return out.parent / f"{out.name}.logs"


def main() -> None:
    """Console entry: one line and the exit code for every QuadsError."""
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")
    try:
        app()
    except QuadsError as e:
        print(f"quads: error: {e}", file=sys.stderr, flush=True)
        if "RANK" in os.environ:
            os._exit(e.exit_code)  # a peer may wait in a collective: leave without destroying the process group
        sys.exit(e.exit_code)


if __name__ == "__main__":
    main()
