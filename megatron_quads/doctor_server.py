"""``quads doctor URL``: is a live vLLM server healthy, and does it run the RAC that its checkpoint asks for."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .errors import QuadsError
from .rac.metadata import RacMetadata

_SAMPLE = re.compile(r"^(quads_rac_\w+)\{(.*)\} (\S+)$", re.M)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
TIMEOUT_S = (5, 30)


@dataclass(frozen=True)
class Served:
    """What ``/metrics`` says of one engine."""

    rac_version: str
    activation: str
    activation_scale: str
    kernel: str
    ratio: float
    flop_share: float


def check(url: str, checkpoint: Path | None) -> None:
    """Print what the server at ``url`` runs; QuadsError on the first thing that is wrong.

    ``checkpoint``: what it should serve; without it, the folder that the server names, when it can be read here.
    """
    url = url.rstrip("/")
    with requests.Session() as session:
        session.trust_env = False  # a site's proxy does not reach compute nodes
        _get(session, url, "/health")
        version = str(_get(session, url, "/version").json()["version"])
        card = _get(session, url, "/v1/models").json()["data"][0]
        served = parse(_get(session, url, "/metrics").text)
        workers = _workers(session, url)
    folder = checkpoint or Path(card.get("root") or "")
    found = "seen here" if (folder / "config.json").is_file() else "not readable here"
    if checkpoint is not None and found != "seen here":
        raise QuadsError("no config.json", where=str(checkpoint), do="give the checkpoint's folder")
    if found == "seen here":
        compare(url, served, workers, folder)
    elif not served:
        raise QuadsError("the server reports no RAC and its checkpoint cannot be read here", where=url,
                         do="install megatron-quads where vLLM runs, or name the checkpoint with --checkpoint")  # fmt: skip
    rows = [("health", "ok", f"vLLM {version}"), ("model", card["id"], f"{folder} ({found})")]
    for engine, one in served.items():
        running = (workers[0]["rac_hash"] if workers else None) or one.rac_version
        what = f"RAC {running[:12]}" if one.rac_version else "W4A4, no RAC"
        if running != one.rac_version:
            what += f", started with {one.rac_version[:12]}"
        share = (
            f"ratio {one.ratio:g}, {one.flop_share:.0%} of the expert FLOPs, activation scale {one.activation_scale}"
        )
        rows += [(f"engine {engine}", what, share), (f"engine {engine}", one.kernel, "kernel of the expert GEMMs")]
    if not served:
        rows.append(("RAC", "none", "this checkpoint has none"))
    asked = f"{len(workers)} agree" if workers else "not asked: needs VLLM_SERVER_DEV_MODE=1 and our worker extension"
    table = Table("what", "found", "meaning")
    for row in [*rows, ("workers", asked, "")]:
        table.add_row(*(escape(str(cell)) for cell in row))
    Console().print(table)


def parse(text: str) -> dict[str, Served]:
    """The gauges of ``rollout/metrics.py`` in Prometheus' text format, by engine; {} when there are none."""
    values: dict[str, dict[str, Any]] = {}
    for name, labels, value in _SAMPLE.findall(text):
        found = dict(_LABEL.findall(labels))
        engine = values.setdefault(found.get("engine", "?"), {})
        if name == "quads_rac_info":
            engine |= {k: found[k] for k in ("rac_version", "activation", "activation_scale", "kernel") if k in found}
        else:
            engine[name.removeprefix("quads_rac_")] = float(value)
    try:
        return {
            engine: Served(**{k: v for k, v in one.items() if k in Served.__annotations__})
            for engine, one in sorted(values.items())
        }
    except TypeError as e:
        raise QuadsError(f"its RAC metrics are not ours: {e}", where="/metrics", do="use matching versions") from e


def compare(url: str, served: dict[str, Served], workers: list[dict[str, Any]], folder: Path) -> None:
    """QuadsError unless front end, workers and checkpoint agree."""

    def refuse(what: str, do: str = "restart the server on this checkpoint") -> None:
        raise QuadsError(what, where=url, do=do)

    file = folder / "config.json"
    try:
        block = json.loads(file.read_text()).get("quantization_config") or {}
    except (OSError, ValueError) as e:
        raise QuadsError(f"cannot read: {e}", where=str(file), do="give a checkpoint folder") from e
    rac = RacMetadata.from_block(block["rac"], where=str(file)) if "rac" in block else None
    ours = rac is not None or "quads" in block
    if ours and not served:
        refuse(f"the server does not report {'RAC' if rac else 'W4A4'}, which {folder} asks for: stock vLLM ignores it",
               "install megatron-quads where vLLM runs and do not exclude it in VLLM_PLUGINS")  # fmt: skip
    wanted = rac.content_hash if rac else ""
    # the metrics say what the server started with; a run that takes its selection anew changes it in the workers
    changed = bool(workers) and all((w["rac_hash"] or "") == wanted for w in workers)
    for engine, one in served.items():
        if one.rac_version != wanted and not (changed and one.rac_version):
            refuse(
                f"engine {engine} runs RAC {one.rac_version[:12] or 'none'}, {folder} asks for {wanted[:12] or 'none'}"
            )
        if rac is not None and one.ratio != rac.ratio:
            refuse(f"engine {engine} reports ratio {one.ratio}, the checkpoint {rac.ratio}")
    for i, worker in enumerate(workers):
        if (worker["rac_hash"] or "") != wanted:
            refuse(f"worker {i} runs RAC {str(worker['rac_hash'])[:12]}, {folder} asks for {wanted[:12] or 'none'}")
        if rac is not None and worker["rac_active_layers"] != sorted(rac.layers):
            refuse(f"worker {i} runs RAC in layers {worker['rac_active_layers']}, not in {sorted(rac.layers)}")
        kernels = {one.kernel for one in served.values()}
        if ours and worker["backend"] not in kernels:
            refuse(f"worker {i} computes with {worker['backend']}, the metrics say {', '.join(sorted(kernels))}",
                   "set QUADS_KERNEL alike for the server and its workers")  # fmt: skip


def _get(session: requests.Session, url: str, path: str) -> requests.Response:
    try:
        reply = session.get(url + path, timeout=TIMEOUT_S)
    except requests.RequestException as e:
        raise QuadsError(f"no answer ({type(e).__name__})", where=url + path, do="is the server up?") from e
    if reply.status_code != 200:
        raise QuadsError(f"answered {reply.status_code}", where=url + path, do="look at the server's log")
    return reply


def _workers(session: requests.Session, url: str) -> list[dict[str, Any]]:
    """What each worker holds; [] where the server has no route for it or no worker extension of ours."""
    body = {"method": "quads_call", "args": ["info", "{}"]}
    try:
        reply = session.post(url + "/collective_rpc", json=body, timeout=TIMEOUT_S)
    except requests.RequestException as e:
        raise QuadsError(f"no answer ({type(e).__name__})", where=url + "/collective_rpc", do="is it up?") from e
    if reply.status_code != 200:
        return []
    results = reply.json()["results"]
    for result in results:
        if "error" in result:
            what, where, do = result["error"]
            raise QuadsError(what, where=where, do=do)
    return [r["ok"] for r in results]
