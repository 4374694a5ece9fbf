"""Between torchrun and one trainer rank: torchrun turns every failure into exit code 1, this records the true one.

``python -m megatron_quads.launch.rank COMMAND...`` with torchrun's variables and the attempt's (``attempt.py``).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

from ..errors import QuadsError
from .attempt import Attempt, this_node
from .process import die_with_parent, exit_code

SAID = "quads: error: "


class LastError:
    """Passes a process's stderr on and remembers its last error line."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.text = ""
        self._stream = stream
        self._thread = threading.Thread(target=self._pump, daemon=True)
        self._thread.start()

    def _pump(self) -> None:
        for line in self._stream:
            text = line.decode(errors="replace").strip()
            if text.startswith(SAID) or (text and not self.text.startswith(SAID)):
                self.text = text[:1500]
            try:
                sys.stderr.buffer.write(line)
                sys.stderr.flush()
            except OSError:  # a full disk: the line still reaches the status file
                continue

    def get(self) -> str:
        """The last ``quads: error:`` line without its mark, else the last line."""
        self._thread.join(timeout=2)
        return self.text.removeprefix(SAID)


def refuse(error: QuadsError) -> int:
    """Say it as the command line does; the exit code."""
    with contextlib.suppress(OSError):  # a full disk: the exit code must do
        print(f"{SAID}{error}", file=sys.stderr, flush=True)
    return error.exit_code


def main() -> None:
    """Run the rank, write ``status/rank-R.json``, exit as the rank did."""
    die_with_parent()
    try:
        code = _run()
    except QuadsError as e:
        code = refuse(e)
    # a signal cannot be passed on as such by exiting: 128 + n, as shells do
    sys.exit(code)


def _run() -> int:
    attempt = Attempt.from_environment()
    if attempt is None:
        raise QuadsError("not inside a launch", where="QUADS_ATTEMPT_DIR", do="start it with `quads submit`")
    slot = attempt.slot(f"rank-{os.environ['RANK']}")
    about = {"role": "rank", "rank": int(os.environ["RANK"]), "node": this_node()}
    slot.reserve(state="running", pid=os.getpid(), **about)
    child = subprocess.Popen(sys.argv[1:], stderr=subprocess.PIPE)
    assert child.stderr is not None
    errors = LastError(child.stderr)
    code = exit_code(child.wait())
    slot.write(state="ended", code=code, **({"error": errors.get()} if code else {}), **about)
    return code


def failures(attempt: Attempt, node: str | None = None) -> list[dict[str, object]]:
    """Slots of ranks that failed, the likely culprit first.

    Peers of a dead rank fail of the broken connection a moment later; a rank that refused its input says so with exit
    code 2, which a broken connection never causes.
    """
    slots = [attempt.slot(p.stem).read() for p in Path(attempt.path, "status").glob("rank-*.json")]
    bad = [s for s in slots if s and s.get("code") and (node is None or s.get("node") == node)]
    return sorted(bad, key=lambda s: (s["code"] != 2, s["time"]))


if __name__ == "__main__":
    main()
