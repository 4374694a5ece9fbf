"""What a launcher and a run tell each other, through the attempt's files. Without a launcher nothing ever stops a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..errors import QuadsError
from ..launch.attempt import Attempt

SERVERS = "QUADS_ROLLOUT_SERVERS"


class StopRequested(Exception):
    """The launcher wants the run saved and ended. Raised on every rank at the same point."""


class Control:
    """Rank 0's view of its attempt."""

    def __init__(self, attempt: Attempt | None) -> None:
        self.attempt = attempt

    @classmethod
    def from_environment(cls) -> Control:
        """The launch that this process belongs to, if any."""
        return cls(Attempt.from_environment())

    @property
    def launched(self) -> Attempt:
        """The attempt; QuadsError outside a launch."""
        if self.attempt is None:
            raise QuadsError("`launch` names the servers of a launch", where="--rollout", do="use `quads submit`")
        return self.attempt

    @property
    def servers(self) -> int:
        """Number of rollout servers."""
        return int(os.environ.get(SERVERS, "0"))

    def stop_reason(self) -> str | None:
        """Why to save and end now; None to go on."""
        order = self.attempt.told("save_and_exit") if self.attempt is not None else None
        return None if order is None else str(order["reason"])

    def saved(self, step: int) -> None:
        """Tell the launcher that the run ended on purpose, with ``step`` steps in its newest checkpoint."""
        if self.attempt is not None:
            self.attempt.tell("saved", "save_and_exit", step=step)

    def offer(self, checkpoint: Path, version: int, **settings: Any) -> None:
        """Tell the rollout servers what to serve; they wait for it."""
        self.launched.offer(checkpoint=str(checkpoint.resolve()), version=version, **settings)
