"""Child process of LocalRollout: holds vLLM's in-process engine, serves calls over an inherited socket."""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..errors import QuadsError
from .checks import preflight
from .kernel_choice import choose_here
from .types import (
    TRANSFER_BACKEND,
    RolloutInfo,
    Sample,
    half_loaded,
    require_acknowledged,
    sample_seed,
    stop_tokens,
    unwrap,
)

FRACTION = "QUADS_GPU_MEMORY_FRACTION"
CACHE = "QUADS_KV_CACHE_GIB"


class Engine:
    """vLLM's ``LLM`` with the project's settings. Only token ids go in and out, so no tokenizer is loaded."""

    def __init__(self, checkpoint: str, dtype: str, context: int, max_num_seqs: int, seed: int, extra: dict) -> None:
        preflight(Path(checkpoint))
        from vllm import LLM
        from vllm.platforms import current_platform

        from .plugin import require_registered
        from .worker import EXTENSION

        require_registered()

        settings: dict[str, Any] = {
            "dtype": dtype,
            # graphs need every layer's kernel to be free of host syncs
            "enforce_eager": choose_here(dtype) == "emulation",
            "max_model_len": context,
            "max_num_seqs": max_num_seqs,
            "enable_prefix_caching": False,
            "seed": seed,
            "logprobs_mode": "processed_logprobs",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "worker_extension_cls": EXTENSION,
            "weight_transfer_config": {"backend": TRANSFER_BACKEND},
        }
        if current_platform.is_cpu():
            settings["kv_cache_memory_bytes"] = 1 << 30
        else:
            settings |= _memory()
        self._sleeps = bool(extra.get("enable_sleep_mode"))
        self._llm = LLM(model=checkpoint, **{**settings, **extra})
        self._stop = stop_tokens(Path(checkpoint))
        self._whole = True
        self.workers("assert_active", {})
        self._llm.init_weight_transfer_engine({"init_info": {}})

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, max_tokens: int, temperature: float, seed: int
    ) -> list[list[Sample]]:
        """See Rollout.generate."""
        self._require_whole()
        from vllm import SamplingParams

        requests = [{"prompt_token_ids": list(p)} for p in prompts for _ in range(n)]
        params = [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                seed=sample_seed(seed, i, j),
                logprobs=0,
                stop_token_ids=self._stop,
                detokenize=False,
            )
            for i in range(len(prompts))
            for j in range(n)
        ]
        outputs = self._llm.generate(requests, params, use_tqdm=False)  # type: ignore[arg-type]
        samples = []
        for out in outputs:
            done = out.outputs[0]
            ids = list(done.token_ids)
            assert done.logprobs is not None
            values = [entry[t].logprob for entry, t in zip(done.logprobs, ids, strict=True) if entry is not None]
            samples.append(Sample(ids, values, str(done.finish_reason)))
        return [samples[i * n : (i + 1) * n] for i in range(len(prompts))]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See Rollout.score."""
        self._require_whole()
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        requests = [{"prompt_token_ids": list(s)} for s in sequences]
        outputs = self._llm.generate(requests, params, use_tqdm=False)  # type: ignore[arg-type]
        scores = []
        for sequence, out in zip(sequences, outputs, strict=True):
            assert out.prompt_logprobs is not None
            pairs = zip(out.prompt_logprobs[1:], sequence[1:], strict=True)
            scores.append([entry[t].logprob for entry, t in pairs if entry is not None])
        return scores

    def workers(self, name: str, arguments: dict[str, Any]) -> list[Any]:
        """One call in every worker; raises QuadsError when a worker refuses."""
        return unwrap(self._llm.collective_rpc("quads_call", args=(name, json.dumps(arguments))))

    def update_weights(self, folder: str, version: int, rac_hash: str | None = None) -> None:
        """The native flow. Every worker checks the folder before any of them starts."""
        info = {"folder": folder, "version": version, "rac_hash": rac_hash}
        self.workers("check_update", info)
        self._whole = False
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": info})
        self._finish(version, rac_hash)

    def update_flat(self, chunk: dict[str, Any], version: int, first: bool, last: bool) -> None:
        """One chunk of a flat refit (``flat.py``), through the same flow."""
        if first:
            self.workers("check_flat", {"rac_hash": chunk["rac_hash"], "rac": chunk["rac"]})
            self._whole = False
            self._llm.start_weight_update()
        self._llm.update_weights({"update_info": {"folder": "", "version": version, "chunk": chunk}})
        if last:
            self._finish(version, chunk["rac_hash"])

    def _finish(self, version: int, rac_hash: str | None) -> None:
        """``rac_hash`` None: not asked for."""
        named = "weight_version" in inspect.signature(self._llm.finish_weight_update).parameters
        self._llm.finish_weight_update(**({"weight_version": str(version)} if named else {}))
        self._llm.reset_prefix_cache()
        require_acknowledged([RolloutInfo(**i) for i in self.workers("info", {})], version, rac_hash)
        self._whole = True

    def sleep(self, level: int) -> None:
        """See LocalRollout.sleep."""
        if not self._sleeps:
            raise QuadsError("the engine was started without sleep mode", where="sleep",
                             do='start it on a GPU with engine_args={"enable_sleep_mode": True}')  # fmt: skip
        self._llm.sleep(level=level)

    def wake(self, tags: list[str] | None) -> None:
        """See LocalRollout.wake."""
        self._llm.wake_up(tags)

    def _require_whole(self) -> None:
        if not self._whole:
            raise half_loaded("rollout")
        self.workers("require_serving", {})


def _memory() -> dict[str, Any]:
    """vLLM's settings from QUADS_GPU_MEMORY_FRACTION, a share of the GPU, or QUADS_KV_CACHE_GIB, the cache alone.

    With a share vLLM measures what is free, which fails while other processes on the GPU grow; a cache of a fixed size
    does not depend on them.
    """
    fraction, cache = os.environ.get(FRACTION), os.environ.get(CACHE)
    if fraction and cache:
        raise QuadsError("both memory settings are given", where=f"{FRACTION}, {CACHE}", do="keep one")
    if fraction:
        value = _number(fraction)
        if not 0 < value <= 1:
            raise QuadsError(f"{fraction!r} is not a share of GPU memory", where=FRACTION, do="give a number in (0, 1]")
        return {"gpu_memory_utilization": value}
    if cache:
        value = _number(cache)
        if not 0 < value < 1024:
            raise QuadsError(f"{cache!r} is not a size in GiB", where=CACHE, do="give a number such as 2")
        # vLLM only checks that this little is free
        return {"gpu_memory_utilization": 0.01, "kv_cache_memory_bytes": int(value * 2**30)}
    return {}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _exit_with_parent(fd: int) -> None:
    """The parent holds the other end open and never writes: reading ends when it is gone, however it died."""
    os.read(fd, 1)
    os._exit(0)


def _serve(connection: Connection, start: dict[str, Any]) -> None:
    engine: Engine | None = None

    def begin(**settings: Any) -> None:
        nonlocal engine
        engine = Engine(**settings)

    name, arguments = "start", start
    while True:
        try:
            call = begin if name == "start" else getattr(engine, name)
            reply: tuple[str, Any] = ("ok", call(**arguments))
        except QuadsError as e:
            reply = ("refused", (e.what, e.where, e.do))
        except Exception as e:  # noqa: BLE001  reported to the parent, which raises; the traceback is in the log
            traceback.print_exc()
            reply = ("failed", f"{type(e).__name__}: {e}")
        sys.stdout.flush()
        connection.send(reply)
        if engine is None:
            return  # it never started
        try:
            name, arguments = connection.recv()
        except EOFError:
            return


def main() -> None:
    """``python -m megatron_quads.rollout.child SOCKET_FD LIFELINE_FD``: the first message holds the settings."""
    sock, lifeline = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(sock, False)
    os.set_inheritable(lifeline, False)
    threading.Thread(target=_exit_with_parent, args=(lifeline,), daemon=True).start()
    connection = Connection(sock)
    if not connection.poll(0):  # the trainer is still being built; settings that are there may be refused without vLLM
        try:
            from vllm import LLM  # noqa: F401
        except Exception:  # noqa: BLE001  Engine imports it again, and its reply tells the parent
            traceback.print_exc()
    _serve(connection, connection.recv())


if __name__ == "__main__":
    main()
