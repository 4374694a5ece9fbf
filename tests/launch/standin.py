"""Light roles for fault tests: the real supervisor, steps, torchrun, rank wrapper and rollout pool, no model.

``standin.py trainer`` is a torchrun rank whose "model" is a number that each step hashes on; ``standin.py rollout HOST
PORT`` answers vLLM's routes. Settings come as JSON in STANDIN; ``fault`` makes one happen.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SETTINGS: dict[str, Any] = {
    "steps": 6,
    "step_s": 0.2,
    "save_s": 0.0,
    "save_every": 0,
    "update_s": 0.0,
    "fault": None,
    "fault_rank": 1,
    "fault_step": 2,
    "ballast": 0,
    "gloo": False,
    **json.loads(os.environ.get("STANDIN", "{}")),
}
RAC_HASH = "0123abcd"
FIGURES = {"train_rollout_logprob_abs_diff/mean": 0.01, "tokens_per_s": 50.0}


class Group:
    """All ranks of an attempt: gloo when asked for, else files, which saves a slow import."""

    def __init__(self, attempt: Any) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._folder, self._count = attempt.path / "control", 0
        self._dist: Any = None
        if SETTINGS["gloo"]:
            import torch.distributed as dist

            dist.init_process_group("gloo")
            self._dist = dist

    def share(self, value: Any = None) -> Any:
        """Rank 0's JSON value on every rank, once all have come."""
        if self._dist is not None:
            box = [value]
            self._dist.broadcast_object_list(box, src=0)
            self._dist.barrier()
            return box[0]
        self._count += 1
        mine = self._folder / f"meet-{self._count}-{self.rank}"
        aside = mine.with_suffix(".aside")
        aside.write_text(json.dumps(value))
        aside.rename(mine)
        files = [self._folder / f"meet-{self._count}-{r}" for r in range(self.world)]
        while not all(f.exists() for f in files):
            time.sleep(0.02)
        return json.loads(files[0].read_text())


def trainer() -> None:
    """One rank."""
    from megatron_quads.errors import QuadsError
    from megatron_quads.launch.attempt import Attempt
    from megatron_quads.rl.control import Control, StopRequested
    from megatron_quads.rl.runfolder import RunFolder

    attempt, control = Attempt.from_environment(), Control.from_environment()
    assert attempt is not None
    group, folder = Group(attempt), RunFolder(attempt.run)
    rank = group.rank
    print(f"rank {rank} on {os.uname().nodename} over {os.environ['GLOO_SOCKET_IFNAME']}", flush=True)
    print(
        "visible GPUs:", os.environ.get("CUDA_VISIBLE_DEVICES"), "has HF_TOKEN:", "HF_TOKEN" in os.environ, flush=True
    )
    if rank == 0:
        folder.acquire(resume=(folder.path / "run.json").exists())
        (folder.path / "run.json").write_text("{}")
    start = group.share(folder.latest_step()) or 0
    state = (folder.checkpoint(start) / "0").read_text()[:64] if start else ""
    pool = connect(folder, start, control) if rank == 0 and control.servers else None
    if rank == 0 and folder.metrics.exists():
        rows = [r for r in folder.metrics.read_text().splitlines() if json.loads(r)["step"] <= start]
        folder.metrics.write_text("".join(r + "\n" for r in rows))
    try:
        for step in range(start + 1, SETTINGS["steps"] + 1):
            sampled: Any = None
            try:
                if pool is not None:
                    ask = {"n": 1, "max_tokens": 2, "temperature": 1.0, "seed": step}
                    sampled = [s[0].token_ids for s in pool.generate([[1], [2], [3]], **ask)]
            except StopRequested:
                sampled = "stop"
            if group.share(sampled) == "stop":
                finish(group, folder, control, step - 1, state)
                return
            time.sleep(SETTINGS["step_s"])
            fault(rank, step, attempt.run)
            state = hashlib.sha256(f"{state}/{step}".encode()).hexdigest()
            with contextlib.suppress(StopRequested):
                if pool is not None:
                    pool.update_weights(export(folder, step), step)
                    assert pool.info().version == step
            if rank == 0:
                row = {"step": step, "state": state, "sampled": sampled, **FIGURES}
                folder.append(folder.metrics, row)
            due = SETTINGS["save_every"] and step % SETTINGS["save_every"] == 0
            if due or step == SETTINGS["steps"]:
                save(group, folder, step, state)
            if group.share(control.stop_reason()) and step < SETTINGS["steps"]:
                finish(group, folder, control, step, state)
                return
    except QuadsError as e:
        print(f"quads: error: {e}", file=sys.stderr, flush=True)
        os._exit(e.exit_code)


def finish(group: Group, folder: Any, control: Any, step: int, state: str) -> None:
    """Save and tell the launcher."""
    if folder.latest_step() != step:
        save(group, folder, step, state)
    if group.rank == 0:
        control.saved(step)


def save(group: Group, folder: Any, step: int, state: str) -> None:
    """All ranks write, then rank 0 commits."""
    from megatron_quads import atomic
    from megatron_quads.errors import QuadsError

    target = folder.checkpoint(step)
    aside = target.with_name(f".{target.name}.writing")
    aside.mkdir(parents=True, exist_ok=True)
    group.share()
    try:
        (aside / str(group.rank)).write_text(state + "x" * SETTINGS["ballast"])
    except OSError as e:
        raise QuadsError(f"cannot write: {e.strerror}", where=str(target), do="free space and resume the run") from e
    time.sleep(SETTINGS["save_s"])
    group.share()
    if group.rank == 0:
        atomic.write_json(aside / atomic.MARKER, {"step": step})
        atomic.commit(aside, target)
        print(f"saved {step}", flush=True)
    group.share()


def fault(rank: int, step: int, run: Path) -> None:
    """What the test asked for."""
    kind = SETTINGS["fault"]
    if kind is None or rank != SETTINGS["fault_rank"] or step != SETTINGS["fault_step"]:
        return
    if kind == "exit9":
        os._exit(9)
    if kind == "hang":
        time.sleep(3600)
    raise AssertionError(kind)


def export(folder: Any, version: int) -> Path:
    """A committed folder of that version."""
    from megatron_quads import atomic

    with atomic.folder(folder.refit(version), marker={"version": version}):
        pass
    return Path(folder.refit(version))


def connect(folder: Any, version: int, control: Any) -> Any:
    """The real pool on the stand-in servers."""
    from megatron_quads.rollout.pool import PoolRollout

    out = export(folder, version)
    control.offer(out, version, rac_hash=RAC_HASH)
    pool = PoolRollout(control, control.servers, rac_hash=RAC_HASH, timeout_s=20)
    pool.update_weights(out, version)
    return pool


def completion(prompt: list[int], seed: int, version: int | None) -> list[int]:
    """The two tokens that a server of ``version`` samples."""
    return list(hashlib.sha256(f"{prompt}/{seed}/{version}".encode()).digest()[:2])


def expected(steps: int, *, servers: bool) -> list[dict[str, Any]]:
    """metrics.jsonl of a run that nothing disturbed."""
    from megatron_quads.rollout.types import sample_seed

    rows, state = [], ""
    for step in range(1, steps + 1):
        state = hashlib.sha256(f"{state}/{step}".encode()).hexdigest()
        sampled = [completion([p], sample_seed(step, p - 1, 0), step - 1) for p in (1, 2, 3)] if servers else None
        rows.append({"step": step, "state": state, "sampled": sampled, **FIGURES})
    return rows


class Server(BaseHTTPRequestHandler):
    """vLLM's routes as far as HttpRollout uses them."""

    version: int | None = None

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        """Models."""
        self._reply({"data": [{"id": "standin", "max_model_len": 64}]})

    def do_POST(self) -> None:
        """Worker calls, weight updates, completions."""
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        if self.path.startswith("/collective_rpc"):
            name = body["args"][0]
            value: Any = (
                info() | {"version": Server.version} if name == "info" else [] if name == "stop_tokens" else None
            )
            self._reply({"results": [{"ok": value}]})
        elif self.path.startswith("/v1/completions"):
            ids = completion(body["prompt"], body["seed"], Server.version)
            self._reply(
                {
                    "choices": [
                        {"token_ids": ids, "logprobs": {"token_logprobs": [-1.0, -1.0]}, "finish_reason": "length"}
                    ]
                }
            )
        else:
            if self.path.startswith("/update_weights"):
                if SETTINGS["update_s"]:
                    Path(os.environ["QUADS_ATTEMPT_DIR"], "control", f"updating-{os.getpid()}").touch()
                    time.sleep(SETTINGS["update_s"])
                Server.version = int(body["update_info"]["version"])
            self._reply({})

    def _reply(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def info() -> dict[str, Any]:
    """What a worker reports."""
    from megatron_quads.launch.health import identity

    fixed = {
        "rac_hash": RAC_HASH,
        "rac_active_layers": [],
        "quantized_layers": [],
        "quant_method": "standin",
        "activation": "rac",
        "activation_scale": "token",
        "backend": "standin",
        "dtype": "float32",
    }
    return {**fixed, **identity()}


def rollout(host: str, port: int) -> None:
    """One server."""
    if SETTINGS["fault"] == "rollout_never":
        sys.exit(3)
    print("visible GPUs:", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    server = ThreadingHTTPServer((host, port), Server)
    print(f"serving on {os.uname().nodename} {host}:{port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1] == "trainer":
        trainer()
    else:
        rollout(sys.argv[2], int(sys.argv[3]))
