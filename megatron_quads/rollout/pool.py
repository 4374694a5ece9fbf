"""PoolRollout: the rollout servers of a launch as one Rollout. A server that died is awaited, refitted and asked again.

Which server samples a prompt does not matter: every sample has its own seed, and all servers hold the same version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from ..errors import MismatchError, QuadsError
from ..launch.health import require_ours
from ..rl.control import Control, StopRequested
from .http import HttpRollout, ServerGone
from .types import RolloutInfo, Sample, merge_infos

WAIT_S = 0.5


class PoolRollout:
    """``servers`` servers of this attempt (see ``types.Rollout``), found through its endpoint files.

    Waiting ends when the launcher wants the run to stop (StopRequested); the launcher bounds the restarts. A server of
    another job, attempt or RAC metadata is refused with QuadsError.
    """

    def __init__(self, control: Control, servers: int, *, rac_hash: str | None, timeout_s: float = 600.0) -> None:
        self._control, self._attempt = control, control.launched
        self._rac_hash, self._timeout = rac_hash, timeout_s
        self._current: tuple[Path, int, str | None] | None = None
        self._incarnations = [-1] * servers
        self._servers: list[HttpRollout | None] = [None] * servers
        self._threads = ThreadPoolExecutor(servers)

    def _check_stop(self) -> None:
        if reason := self._control.stop_reason():
            raise StopRequested(reason)

    def _endpoint(self, k: int) -> dict[str, Any]:
        """The published address of server ``k`` that is not the one that died."""
        while True:
            found = self._attempt.endpoint(k)
            if found is not None and (self._servers[k] is not None or found["incarnation"] > self._incarnations[k]):
                return found
            self._check_stop()  # only who waits stops here: with living servers a step is finished
            time.sleep(WAIT_S)

    def _connect(self, k: int) -> HttpRollout:
        """Server ``k`` with the current weights: the connected one, or its successor."""
        found = self._endpoint(k)
        server = self._servers[k]
        if server is not None and found["incarnation"] == self._incarnations[k]:
            return server
        self._incarnations[k] = found["incarnation"]
        if server is not None:
            server.close()
        self._servers[k] = None
        server = HttpRollout(found["url"], timeout_s=self._timeout)
        info = server.info()
        expected = {"job": self._attempt.job, "attempt": self._attempt.number, "where": found["url"]}
        require_ours(vars(info), **expected, rac_hash=self._rac_hash)
        if self._current is not None:
            folder, version, selection = self._current
            server.update_weights(folder, version, rac_hash=selection)
        self._servers[k] = server
        return server

    def _on(self, k: int, use: Callable[[HttpRollout], Any]) -> Any:
        """``use`` server ``k``; again on its successor when it is gone."""
        while True:
            try:
                return use(self._connect(k))
            except ServerGone as gone:
                self._check_stop()
                # it may only hang: the launcher ends this one, and starts its successor
                self._attempt.tell(f"stop-rollout-{k}-{self._incarnations[k]}", str(gone))
                dead, self._servers[k] = self._servers[k], None
                if dead is not None:
                    dead.close()

    def _each(self, use: Callable[[HttpRollout], Any]) -> list[Any]:
        return list(self._threads.map(lambda k: self._on(k, use), range(len(self._servers))))

    def _spread(self, rows: Sequence[Any], use: Callable[[HttpRollout, list[int]], list[Any]]) -> list[Any]:
        """``use(server, its row indices)`` on all servers at once; results in the order of ``rows``."""
        n = len(self._servers)
        shares = [list(range(k, len(rows), n)) for k in range(n)]
        parts = self._threads.map(
            lambda k: self._on(k, lambda server: use(server, shares[k])) if shares[k] else [], range(n)
        )
        out: list[Any] = [None] * len(rows)
        for share, part in zip(shares, parts, strict=True):
            for i, value in zip(share, part, strict=True):
                out[i] = value
        return out

    def generate(
        self, prompts: Sequence[Sequence[int]], *, n: int, max_tokens: int, temperature: float, seed: int
    ) -> list[list[Sample]]:
        """See Rollout.generate."""

        def use(server: HttpRollout, share: list[int]) -> list[Any]:
            return server.generate(
                [prompts[i] for i in share],
                n=n,
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                indices=share,
            )

        return self._spread(prompts, use)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See Rollout.score."""
        return self._spread(sequences, lambda server, share: server.score([sequences[i] for i in share]))

    def record_routes(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """See Rollout.record_routes."""
        return self._on(0, lambda server: server.record_routes(sequences))

    def require_selection(self) -> None:
        """See Rollout.require_selection."""
        self._each(lambda server: server.require_selection())

    def update_weights(self, folder: str | Path, version: int, *, rac_hash: str | None = None) -> None:
        """See Rollout.update_weights; a server that dies in it gets these weights when it is back."""
        self._each(lambda server: server.update_weights(folder, version, rac_hash=rac_hash))
        self._current = (Path(folder), version, rac_hash)

    def audit(self) -> dict[str, str]:
        """See Rollout.audit; MismatchError when two servers hold different weights."""
        first, *others = self._each(lambda server: server.audit())
        for k, other in enumerate(others, 1):
            if other != first:
                name = next(n for n in sorted({*first, *other}) if first.get(n) != other.get(n))
                raise MismatchError(
                    f"{name} differs between rollout servers 0 and {k}", where="rollout", do="restart the run"
                )
        return dict(first)

    def count_bits(self, file: str | Path) -> dict[str, int]:
        """See Rollout.count_bits."""
        return dict(self._on(0, lambda server: server.count_bits(file)))

    def info(self) -> RolloutInfo:
        """See Rollout.info."""
        return merge_infos(self._each(lambda server: server.info()))

    def set_activation(self, mode: str) -> None:
        """See Rollout.set_activation."""
        self._each(lambda server: server.set_activation(mode))

    def assert_active(self) -> None:
        """See Rollout.assert_active."""
        self._each(lambda server: server.assert_active())

    def close(self) -> None:
        """Drop the connections; the servers belong to the launcher."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for server in self._servers:
            if server is not None:
                server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def require_servers(control: Control) -> int:
    """Number of servers of this launch; QuadsError when there is none."""
    if control.servers < 1:
        raise QuadsError("this launch has no rollout servers", where="rollout.servers", do="set it to 1 or more")
    return control.servers
