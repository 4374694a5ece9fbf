"""Is that server ours? Asked of a rollout server before every use: another job's server may answer on our port."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Any

from ..errors import QuadsError
from .attempt import JOB, NUMBER

# a site's proxy cannot reach compute nodes
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class NoAnswer(Exception):
    """Nobody answers (yet)."""


def identity() -> dict[str, Any]:
    """Job and attempt of this process, as a server's worker reports them; None outside a launch."""
    number = os.environ.get(NUMBER)
    return {"job": os.environ.get(JOB), "attempt": int(number) if number else None}


def ask(url: str, *, timeout_s: float = 10.0) -> dict[str, Any]:
    """What the server's first worker holds: job, attempt, version, rac_hash, ... Raises NoAnswer."""
    body = json.dumps({"method": "quads_call", "args": ["info", "{}"]}).encode()
    request = urllib.request.Request(f"{url}/collective_rpc", body, {"Content-Type": "application/json"})
    try:
        with _OPENER.open(request, timeout=timeout_s) as reply:
            return dict(json.load(reply)["results"][0]["ok"])
    except (OSError, ValueError, LookupError, TypeError) as e:
        raise NoAnswer(f"{type(e).__name__}: {e}") from e


def require_ours(
    info: dict[str, Any], *, job: str, attempt: int, where: str, rac_hash: str | bool | None = False
) -> None:
    """Raise QuadsError unless the reply comes from ``job`` and ``attempt`` (and, when given, has this RAC hash)."""
    theirs = info.get("job"), info.get("attempt")
    if theirs != (job, attempt):
        owner = f"job {theirs[0]}, attempt {theirs[1]}" if theirs[0] else "nobody's launch"
        raise QuadsError(
            f"a stale server answers: it belongs to {owner}, not to job {job}, attempt {attempt}",
            where=where,
            do="end it on its node; it is not used",
        )
    if rac_hash is not False and info.get("rac_hash") != rac_hash:
        raise QuadsError(
            f"the server runs RAC metadata {info.get('rac_hash')}, the run has {rac_hash}",
            where=where,
            do="restart it from the run's export",
        )
