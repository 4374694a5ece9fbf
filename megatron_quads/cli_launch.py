"""``quads submit`` and ``quads status``: jobs on SLURM (or this host), and where they are."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

ENDED = ("done", "failed")


def submit(
    config: Annotated[str, typer.Argument(help="YAML file, or the name of a shipped one (tiny, h200, ...).")],
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="KEY.SUBKEY=VALUE over the file; may be repeated.")
    ] = None,
    site: Annotated[str | None, typer.Option(help="Site file, or the name of a shipped one.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print configuration, job script and commands.")] = False,
    test_only: Annotated[bool, typer.Option("--test-only", help="Ask SLURM whether the job could run.")] = False,
    local: Annotated[bool, typer.Option("--local", help="Run the same plan here, without SLURM.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the run folder.")] = False,
) -> None:
    """Run trainer and rollout servers on SLURM: one allocation, supervised, saved and requeued on signals."""
    from .launch import submit as jobs
    from .launch.load import load

    resolved = load(config, sets or [], site=site)
    if dry_run:
        typer.echo(jobs.describe(resolved, local=local), nl=False)
    elif test_only:
        typer.echo(jobs.test_only(resolved))
    elif local:
        raise typer.Exit(jobs.run_local(resolved, resume=resume))
    else:
        job = jobs.submit(resolved, resume=resume)
        typer.echo(f"job {job}; watch it: quads status {resolved.run}")


def status(
    run: Annotated[Path, typer.Argument(help="Run folder of `quads submit`.")],
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until the run ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False,
) -> None:
    """Roles, steps, weight versions, gap and tokens/s of a launched run, from its files alone."""
    from rich.console import Console
    from rich.live import Live

    from .launch.status import render, snapshot

    found = snapshot(run)
    if as_json:
        typer.echo(json.dumps(found))
        return
    if not watch:
        Console().print(render(found))
        return
    with Live(render(found), refresh_per_second=1) as live:
        while found["state"] not in ENDED:
            time.sleep(1.0)
            found = snapshot(run)
            live.update(render(found))


def register(app: typer.Typer) -> None:
    """Add both commands to ``quads``."""
    app.command(epilog="Example:  quads submit tiny --set run=runs/a --set options.model=base/")(submit)
    app.command(epilog="Example:  quads status runs/a --watch")(status)
