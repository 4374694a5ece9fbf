"""LocalRollout: a child process that holds vLLM's in-process engine. The trainer's process never imports vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from ..checkpoint.hf import read_model_config
from ..errors import QuadsError
from ..rac.select import Unit
from ..rac.statistics import Moments, ResidualEnergy
from .collect import collect
from .flat import Chunk, Sent, send
from .process import EngineProcess
from .types import RolloutInfo, Sample, merge_infos, record_routes, require_fit, require_mode


class LocalRollout:
    """Rollout in a child process of this one (see ``types.Rollout``).

    The child logs to ``log``. When it dies every call raises QuadsError at once; when this process dies the child ends.
    ``max_model_len`` counts prompt plus response. ``engine_args`` go to ``vllm.LLM`` as they are. ``process``: one that
    was started before, so that it has imported vLLM by now; ``log`` is its own then.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        dtype: str = "float32",
        max_model_len: int = 256,
        max_num_seqs: int = 64,
        seed: int = 0,
        log: str | Path | None = None,
        engine_args: dict[str, Any] | None = None,
        process: EngineProcess | None = None,
    ) -> None:
        limit = read_model_config(checkpoint).max_position
        if max_model_len > limit:
            raise QuadsError(
                f"a context of {max_model_len} exceeds the model's {limit}", where="max_model_len", do="lower it"
            )
        self.max_model_len = max_model_len
        # scoring generates one token more than it is given
        self._context = min(max_model_len + 1, limit)
        self._process = process or EngineProcess(log)
        self.log = self._process.log
        settings = {
            "checkpoint": str(checkpoint),
            "dtype": dtype,
            "context": self._context,
            "max_num_seqs": max_num_seqs,
            "seed": seed,
            "extra": engine_args or {},
        }
        try:
            self._process.exchange(settings)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._process.exchange((method, arguments))

    def _workers(self, name: str, **arguments: Any) -> list[Any]:
        return self._call("workers", name=name, arguments=arguments)

    def generate(
        self, prompts: Sequence[Sequence[int]], *, n: int, max_tokens: int, temperature: float, seed: int
    ) -> list[list[Sample]]:
        """See Rollout.generate."""
        require_fit(prompts, self.max_model_len, room=1)
        return self._call("generate", prompts=prompts, n=n, max_tokens=max_tokens, temperature=temperature, seed=seed)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See Rollout.score; a sequence may fill the context unless the model's own limit is as short."""
        require_fit(sequences, self._context, room=1)
        return self._call("score", sequences=sequences)

    def record_routes(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """See Rollout.record_routes. Scores one sequence at a time."""
        return record_routes(self._workers, self.score, sequences)

    def require_selection(self) -> None:
        """See Rollout.require_selection."""
        self._workers("check_selection")

    def statistics(
        self,
        statistic: Moments | ResidualEnergy,
        sequences: Sequence[Sequence[int]],
        scratch: Path,
        *,
        static_amax: Mapping[Unit, float] | None = None,
    ) -> dict[int, int]:
        """Add to calibration's ``statistic`` what the experts see while the engine runs ``sequences``, over all workers.

        Returns the (token, expert) pairs that were seen in each layer. The engine must be eager (on a CPU: any) and in
        mode w4a16. ``static_amax``: of a static activation scale.
        """
        return collect(self._workers, self.score, statistic, sequences, scratch, static_amax)

    def update_weights(self, folder: str | Path, version: int, *, rac_hash: str | None = None) -> None:
        """See Rollout.update_weights."""
        self._call("update_weights", folder=str(folder), version=version, rac_hash=rac_hash)

    def flat_device(self, rac_hash: str | None) -> str | None:
        """UUID of the GPU that all workers hold their weights on; None when there is not one.

        QuadsError when they take no flat refit with this RAC metadata.
        """
        found = set(self._workers("check_flat", rac_hash=rac_hash))
        return found.pop() if len(found) == 1 else None

    def update_flat(
        self,
        chunks: Iterable[Chunk],
        version: int,
        *,
        rac_hash: str | None,
        rac: dict[str, Any] | None = None,
        file: str | Path | None = None,
    ) -> Sent:
        """Refit from packed tensors in memory (``flat.py``): CUDA IPC, or a shared file.

        Every worker acknowledges version and hash; QuadsError otherwise, after which it serves nothing.
        """
        sent = send(
            partial(self._call, "update_flat"),
            chunks,
            version,
            rac_hash=rac_hash,
            rac=rac,
            file=Path(file) if file else None,
        )
        for rank, held in enumerate(self._workers("weights_hash")):
            if held != sent.hash:
                raise QuadsError(f"worker {rank} acknowledges weights {held}, not {sent.hash}", where="flat refit",
                                 do="restart the rollout")  # fmt: skip
        return sent

    def sleep(self, level: int = 1) -> None:
        """Give GPU memory back (vLLM's sleep mode): level 1 keeps the weights on the host, level 2 discards them.

        QuadsError unless the engine was started with ``enable_sleep_mode``. Asleep it serves nothing; after level 2 not
        before a refit, either.
        """
        if level not in (1, 2):
            raise QuadsError(f"sleep level {level}", where="sleep", do="give 1 or 2")
        self._call("sleep", level=level)

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again: all, or of ``weights`` and ``kv_cache`` what ``tags`` names."""
        self._call("wake", tags=None if tags is None else list(tags))

    def audit(self) -> dict[str, str]:
        """See Rollout.audit."""
        return {k: v for part in self._workers("audit") for k, v in part.items()}

    def count_bits(self, file: str | Path) -> dict[str, int]:
        """See Rollout.count_bits."""
        return {k: v for part in self._workers("count_bits", file=str(file)) for k, v in part.items()}

    def info(self) -> RolloutInfo:
        """See Rollout.info."""
        return merge_infos([RolloutInfo(**i) for i in self._workers("info")])

    def set_activation(self, mode: str) -> None:
        """See Rollout.set_activation."""
        require_mode(mode)
        self._workers("set_activation", mode=mode)

    def assert_active(self) -> None:
        """See Rollout.assert_active."""
        self._workers("assert_active")

    def close(self) -> None:
        """End the child. Harmless when already closed."""
        self._process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
