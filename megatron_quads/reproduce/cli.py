"""``quads reproduce``: warm, run, study, status, pack, merge, tables."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import MismatchError, QuadsError

if TYPE_CHECKING:
    from .folder import Root

app = typer.Typer(help="The paper's findings at small scale, arm by arm: docs/reproduction.md.", no_args_is_help=True)
Folder = Annotated[Path, typer.Option("--root", help="Folder of the reproduction.")]
ConfigOption = Annotated[
    str | None,
    typer.Option("--config", help="YAML file, reproduce or reproduce-cpu; default: what --root was made with."),
]
ROOT = Path("runs/reproduce")


def register(parent: typer.Typer) -> None:
    """Add the commands to ``quads``."""
    parent.add_typer(app, name="reproduce")


@app.command(epilog="Example:  quads reproduce warm --config reproduce-cpu --root runs/small")
def warm(root: Folder = ROOT, config: ConfigOption = None) -> None:
    """Make the warm checkpoint, with a held-out pass@1 in the wanted range. Takes up a broken-off one."""
    from .warm import make_warm

    opened = _open(root, config, new=True)
    with opened.lock("warm"):
        make_warm(opened)


@app.command(epilog="Example:  quads reproduce run --arm naive --seed 0 --max-seconds 540")
def run(
    root: Folder = ROOT,
    config: ConfigOption = None,
    arm: Annotated[list[str] | None, typer.Option(help="Arm; may be repeated. Default: all.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Seed; may be repeated. Default: all of the arm.")] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="Then stop after the step in hand and save.", min=1.0)
    ] = None,
) -> None:
    """Run what is not done. A run that was stopped or killed goes on; one that is done is left alone.

    Start it several times to have several runs at once: each process takes the next run that nobody works on.
    """
    from .arms import run_arms

    run_arms(_open(root, config), arm or [], seed or [], max_seconds=max_seconds)


@app.command(epilog="Example:  quads reproduce study --root runs/small")
def study(root: Folder = ROOT, config: ConfigOption = None) -> None:
    """Measure on the warm checkpoint: RAC ratios, split of the gap, symmetric against asymmetric per layer."""
    from .study import run_study

    opened = _open(root, config)
    with opened.lock("study"):
        run_study(opened)


@app.command(epilog="Example:  quads reproduce status --root runs/small")
def status(root: Folder = ROOT) -> None:
    """What is done and what is not, from the logs alone."""
    from .tables import show_status

    show_status(_read(root))


@app.command(epilog="Example:  quads reproduce pack --out logs.tar.gz")
def pack(
    out: Annotated[Path, typer.Option(help="Archive to write, .tar.gz.")],
    root: Folder = ROOT,
) -> None:
    """All logs, no weights, in one small archive: what tables are made of."""
    names = _read(root).pack(out)
    typer.echo(f"{out}: {len(names)} files, {out.stat().st_size:,} bytes")


@app.command(epilog="Example:  quads reproduce merge logs-1.tar.gz logs-2.tar.gz --root runs/reproduce")
def merge(
    archives: Annotated[list[Path], typer.Argument(help="Archives of `quads reproduce pack`.")],
    root: Folder = ROOT,
    config: ConfigOption = None,
) -> None:
    """Take up the logs of other machines; of a run that is here too the one that went further stays.

    A new folder gets the first archive's configuration.
    """
    from .folder import Root

    new = config is None and not (root / "reproduce.json").exists()
    opened = Root.like(root, archives[0]) if new else _open(root, config, new=True)
    with opened.lock("merge"):
        for archive in archives:
            typer.echo(f"{archive}: {', '.join(opened.merge(archive)) or 'nothing new'}")


@app.command(epilog="Example:  quads reproduce tables --root runs/small --out docs/results/reproduction_cpu")
def tables(
    out: Annotated[Path, typer.Option(help="Folder for reproduction.md, CSV and PNG files.")],
    root: Folder = ROOT,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 also when a check lacks its runs.")] = False,
) -> None:
    """Rebuild every table and figure from the logs; exit 1 when one of the paper's orders fails here."""
    from .report import write_report

    checks = write_report(_read(root), out)
    for check in checks:
        typer.echo(f"{check.outcome:8}  {check.statement}: {check.detail}")
    failed = [c for c in checks if c.outcome == "fails" or (strict and c.outcome == "not run")]
    if failed:
        raise MismatchError(
            f"{len(failed)} of {len(checks)} checks not met: {failed[0].statement}",
            where=str(out / "reproduction.md"),
            do="see its section on what agrees",
        )


def _read(root: Path) -> Root:
    from .folder import Root

    return Root.read(root)


def _open(root: Path, config: str | None, *, new: bool = False) -> Root:
    """To work in: with the configuration given, that of the folder, or (``new``) the shipped one."""
    from .config import load
    from .folder import Root

    if "RANK" in os.environ:
        raise QuadsError("RANK is set", where="quads reproduce", do="run it without torchrun or srun")
    exists = (root / "reproduce.json").exists()
    if (exists and config is None) or not (exists or new):
        opened = Root.read(root)  # says what to do where there is none
    else:
        opened = Root.open(root, load(config or "reproduce"))
    # a fixed size, not a share of what is free, which changes while other runs start; what the user set wins
    if "QUADS_GPU_MEMORY_FRACTION" not in os.environ:
        os.environ.setdefault("QUADS_KV_CACHE_GIB", f"{opened.config.kv_cache_gib:g}")
    return opened
