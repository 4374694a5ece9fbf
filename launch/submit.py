"""``quads submit``: resolve the configuration, write it and the job script into the run folder, hand them to SLURM."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

from .. import atomic
from ..errors import QuadsError
from . import history, plan
from .config import LaunchConfig, dump
from .process import exit_code


def describe(config: LaunchConfig, *, local: bool) -> str:
    """What ``--dry-run`` prints and ``submit`` writes: configuration, job script, and every step's command."""
    rank = shlex.join(plan.rank_command(config, resume=(config.run / "run.json").exists()))
    if local:
        script, steps = shlex.join(_supervisor(config)), plan.local_commands(config)
    else:
        script, steps = plan.job_script(config), plan.commands(config)
    return "\n".join(
        [
            f"# {plan.launch_folder(config) / 'config.yaml'}",
            dump(config),
            f"# {'command' if local else plan.launch_folder(config) / 'job.sbatch'}",
            script,
            "# steps",
            *steps,
            f"# each trainer rank ({config.world})",
            rank,
            "",
        ]
    )


def prepare(config: LaunchConfig, *, resume: bool, local: bool) -> Path:
    """Refuse a folder that is in use or holds a run, then write ``RUN/launch``; returns the job script's path.

    Call it inside ``history.locked``: of two submits at the same time one is refused.
    """
    history.require_free(config.run, None)
    if (config.run / "run.json").exists() and not resume:
        raise QuadsError(
            "run folder already holds a run", where=str(config.run), do="give --resume or choose another run folder"
        )
    folder = plan.launch_folder(config)
    atomic.make_folder(folder)
    atomic.write_bytes(folder / "config.yaml", dump(config).encode())
    atomic.write_bytes(folder / "dry_run.txt", describe(config, local=local).encode())
    script = folder / "job.sbatch"
    if not local:
        atomic.write_bytes(script, plan.job_script(config).encode())
    return script


def submit(config: LaunchConfig, *, resume: bool) -> str:
    """Queue the job; returns its id."""
    with history.locked(config.run):
        script = prepare(config, resume=resume, local=False)
        job = _run(["sbatch", "--parsable", str(script)], None).stdout.strip().split(";")[0]
        try:
            history.reserve(config.run, job)
        except QuadsError:  # a full disk: a job that nobody knows of must not run
            _run(["scancel", job], None)
            raise
    return job


def test_only(config: LaunchConfig) -> str:
    """Ask SLURM whether and when the job could run; nothing is queued or written."""
    if config.slurm.hetjob:
        raise QuadsError(
            "SLURM does not answer --test-only for heterogeneous jobs", where="slurm.hetjob", do="use --dry-run"
        )
    done = _run(["sbatch", "--test-only"], plan.job_script(config))
    return done.stderr.strip().removeprefix("sbatch: ")


def run_local(config: LaunchConfig, *, resume: bool) -> int:
    """The same plan in the foreground, on this host; the supervisor's exit code."""
    with history.locked(config.run):
        prepare(config, resume=resume, local=True)
    # Ctrl-C reaches the supervisor too: it saves, and this process waits for it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return exit_code(subprocess.run(_supervisor(config)).returncode)


def _supervisor(config: LaunchConfig) -> list[str]:
    file = plan.launch_folder(config) / "config.yaml"
    return [sys.executable, "-u", "-m", f"{plan.MODULE}.supervise", str(file), "--local"]


def _run(command: list[str], script: str | None) -> subprocess.CompletedProcess[str]:
    try:
        done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=120)
    except FileNotFoundError as e:
        raise QuadsError("sbatch is not installed here", where="PATH", do="submit on a login node, or --local") from e
    except subprocess.TimeoutExpired as e:
        raise QuadsError("SLURM does not answer", where="sbatch", do="try again; look at `scontrol ping`") from e
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise QuadsError(f"SLURM refuses the job: {said[-1]}", where=command[0], do="change slurm.* or ask `sinfo`")
    return done
