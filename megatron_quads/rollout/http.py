"""HttpRollout: a vLLM OpenAI server that somebody started with ``server_command``, behind the same interface."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Self

import requests
import torch
from torch import Tensor

from ..errors import QuadsError
from .kernel_choice import choose_here
from .process import engine_environment
from .types import (
    TRANSFER_BACKEND,
    RolloutInfo,
    Sample,
    half_loaded,
    merge_infos,
    record_routes,
    require_acknowledged,
    require_fit,
    require_mode,
    sample_seed,
    unwrap,
)

WATCH_S = 2.0  # between looks at the server's health while it works on a request
_EXTENSION = "megatron_quads.rollout.worker.QuadsWorkerExtension"


def server_command(
    checkpoint: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    dtype: str = "float32",
    max_model_len: int = 256,
    max_num_seqs: int = 64,
    seed: int = 0,
) -> list[str]:
    """Command line of a server on this machine that HttpRollout can drive; run it with ``server_environment()``.

    CUDA graphs wherever the experts' kernel allows them (``kernel_choice``).
    """
    options: dict[str, Any] = {
        "model": checkpoint,
        "host": host,
        "port": port,
        "dtype": dtype,
        "max-model-len": max_model_len,
        "max-num-seqs": max_num_seqs,
        "seed": seed,
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
        "worker-extension-cls": _EXTENSION,
        "weight-transfer-config": json.dumps({"backend": TRANSFER_BACKEND}),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--no-enable-prefix-caching"]
    if not torch.cuda.is_available() or choose_here(dtype) == "emulation":
        command.append("--enforce-eager")
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    return command


def server_environment() -> dict[str, str]:
    """Environment of the server: worker calls and weight updates need vLLM's development mode."""
    return {"VLLM_CPU_KVCACHE_SPACE": "1", **engine_environment(), "VLLM_SERVER_DEV_MODE": "1"}


class ServerGone(QuadsError):
    """The server cannot be reached any more; a launcher may restart it."""


class HttpRollout:
    """Rollout through a running vLLM server (see ``types.Rollout``). ``timeout_s`` bounds every request.

    The server reads exports from its own file system: ``update_weights`` and ``count_bits`` need a shared folder.
    """

    def __init__(self, url: str, *, timeout_s: float = 600.0, concurrency: int = 64) -> None:
        self.url, self._timeout = url.rstrip("/"), timeout_s
        self._session = requests.Session()
        self._session.trust_env = False  # a site's proxy does not reach compute nodes
        self._session.mount("http", requests.adapters.HTTPAdapter(pool_maxsize=concurrency))
        self._pool = ThreadPoolExecutor(concurrency)
        card = self._request("GET", "/v1/models")["data"][0]
        self._whole = True
        self._model, self.max_model_len = card["id"], int(card["max_model_len"])
        self.assert_active()
        self._stop = self._workers("stop_tokens")[0]
        self._watched("/init_weight_transfer_engine", {"init_info": {}})

    def _request(self, method: str, path: str, body: Any = None, **params: str) -> Any:
        try:
            reply = self._session.request(
                method, self.url + path, json=body, params=params or None, timeout=(10, self._timeout)
            )
        except requests.RequestException as e:
            raise ServerGone(
                f"the rollout server does not answer ({type(e).__name__})", where=self.url, do="look at its log"
            ) from e
        if reply.status_code != 200:
            hint = "start it with VLLM_SERVER_DEV_MODE=1" if reply.status_code == 404 else "look at its log"
            said = f"{reply.status_code} to {path}: {reply.text[:300]}"
            kind = ServerGone if reply.status_code >= 500 else QuadsError  # 500: its engine died
            raise kind(f"the rollout server answered {said}", where=self.url, do=hint)
        return reply.json() if reply.content else None

    def _watched(self, path: str, body: Any = None, **params: str) -> Any:
        """A POST that the engine itself answers: when it dies the server waits for that answer for ever.

        So the server's health is asked for meanwhile; ServerGone as soon as it says that the engine died, or is gone.
        """
        reply: Future[Any] = Future()

        def post() -> None:
            try:
                reply.set_result(self._request("POST", path, body, **params))
            except BaseException as e:  # noqa: BLE001  raised below, in the caller
                reply.set_exception(e)

        threading.Thread(target=post, daemon=True).start()  # left alone with a server that never answers
        while not wait([reply], WATCH_S).done:
            try:
                if self._session.get(self.url + "/health", timeout=10).status_code == 200:
                    continue
            except requests.Timeout:
                continue  # busy
            except requests.ConnectionError:
                pass  # it takes no connections any more
            if not wait([reply], WATCH_S).done:
                raise ServerGone(f"the rollout server died in {path}", where=self.url, do="look at its log")
        return reply.result()

    def _workers(self, name: str, **arguments: Any) -> list[Any]:
        body = {"method": "quads_call", "args": [name, json.dumps(arguments)]}
        return unwrap(self._watched("/collective_rpc", body)["results"])

    def _require_serving(self) -> None:
        if not self._whole:
            raise half_loaded(self.url)
        self._workers("require_serving")  # another client may have put it to sleep

    def _complete(self, prompt: Sequence[int], **settings: Any) -> Any:
        body = {"model": self._model, "prompt": list(prompt), "return_token_ids": True, **settings}
        return self._request("POST", "/v1/completions", body)["choices"][0]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        max_tokens: int,
        temperature: float,
        seed: int,
        indices: Sequence[int] | None = None,
    ) -> list[list[Sample]]:
        """See Rollout.generate. ``indices``: the prompts' places in a larger set that several servers share."""
        require_fit(prompts, self.max_model_len, room=1)
        self._require_serving()
        places = range(len(prompts)) if indices is None else indices

        def one(at: tuple[int, int]) -> Sample:
            i, j = at
            done = self._complete(
                prompts[i],
                max_tokens=min(max_tokens, self.max_model_len - len(prompts[i])),
                temperature=temperature,
                seed=sample_seed(seed, places[i], j),
                logprobs=0,
                stop_token_ids=self._stop,
            )
            return Sample(done["token_ids"], done["logprobs"]["token_logprobs"], done["finish_reason"])

        samples = list(self._pool.map(one, [(i, j) for i in range(len(prompts)) for j in range(n)]))
        return [samples[i * n : (i + 1) * n] for i in range(len(prompts))]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See Rollout.score; the server's context must hold each sequence and one token more."""
        require_fit(sequences, self.max_model_len, room=1)
        self._require_serving()

        def one(sequence: Sequence[int]) -> list[float]:
            entries = self._complete(sequence, max_tokens=1, temperature=0.0, prompt_logprobs=0)["prompt_logprobs"]
            return [e[str(t)]["logprob"] for e, t in zip(entries[1:], sequence[1:], strict=True)]

        return list(self._pool.map(one, sequences))

    def record_routes(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """See Rollout.record_routes. Nobody else may use the server meanwhile."""
        return record_routes(self._workers, self.score, sequences)

    def require_selection(self) -> None:
        """See Rollout.require_selection."""
        self._workers("check_selection")

    def update_weights(self, folder: str | Path, version: int, *, rac_hash: str | None = None) -> None:
        """See Rollout.update_weights. Requests in flight finish first."""
        where = str(Path(folder).resolve())
        info: dict[str, Any] = {"folder": where, "version": version}
        if rac_hash is not None:
            info["rac_hash"] = rac_hash
        self._workers("check_update", **info)
        self._whole = False
        self._watched("/pause", mode="wait")
        self._watched("/start_weight_update")
        self._watched("/update_weights", {"update_info": info})
        self._watched("/finish_weight_update", {"weight_version": str(version)})
        require_acknowledged([RolloutInfo(**i) for i in self._workers("info")], version, rac_hash)
        self._watched("/resume")
        self._whole = True

    def audit(self) -> dict[str, str]:
        """See Rollout.audit."""
        return {k: v for part in self._workers("audit") for k, v in part.items()}

    def count_bits(self, file: str | Path) -> dict[str, int]:
        """See Rollout.count_bits."""
        return {k: v for part in self._workers("count_bits", file=str(Path(file).resolve())) for k, v in part.items()}

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
        """Drop the connections; the server belongs to whoever started it."""
        self._pool.shutdown(cancel_futures=True)
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
