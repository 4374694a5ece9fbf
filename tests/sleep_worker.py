"""Sleeps of an engine in this process, asked for as vLLM's own routes do: ``sleep_worker.py ROOT``; prints one JSON line.

A CPU worker keeps its memory, so what is checked here is who refuses what, and until when.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_quads.checkpoint.hf import SafetensorsFolder
from megatron_quads.errors import QuadsError
from megatron_quads.rollout import child
from megatron_quads.rollout.flat import chunks_of, send


def main(root: Path) -> None:
    """Level 1, level 2 with a flat refit, level 2 with a folder, each noted."""
    engine = child.Engine(str(root / "a"), "float32", 64, 4, 0, {})
    tokens = [[5, 6, 7, 8, 9], [11, 12, 13]]
    found: dict[str, Any] = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        try:
            found[name] = call()
        except QuadsError as e:
            found[name] = str(e)

    def look(name: str) -> None:
        note(f"{name} score", lambda: engine.score(tokens))
        note(f"{name} audit", lambda: len(engine.workers("audit", {})[0]))
        found[f"{name} info"] = engine.workers("info", {})[0]

    def flat(version: int) -> str:
        reader = SafetensorsFolder(root / "b")
        rac_hash = found["before info"]["rac_hash"]
        chunks = chunks_of((n, reader.get(n)) for n in reader.names())
        return send(engine.update_flat, chunks, version, rac_hash=rac_hash, file=root / "flat.bin").hash

    look("before")
    note("without the mode", lambda: engine.sleep(1))
    engine._llm.sleep(level=1)
    look("asleep 1")
    note("update asleep", lambda: engine.update_weights(str(root / "b"), 5))
    engine._llm.wake_up(tags=["weights"])
    look("half awake")
    engine._llm.wake_up(tags=["kv_cache"])
    look("after 1")
    engine._llm.sleep(level=2)
    note("flat asleep", lambda: flat(5))
    engine._llm.wake_up()
    look("after 2")
    found["hash"] = flat(5)
    look("flat")
    engine._llm.sleep(level=2)
    engine._llm.wake_up()
    look("after 2 again")
    engine.update_weights(str(root / "a"), 0)
    look("reloaded")
    engine._llm.sleep(level=2)
    engine._llm.wake_up()
    # last, past this project's own checks: the request that broke stays in the scheduler
    note("stock", lambda: len(engine._llm.generate([{"prompt_token_ids": [5, 6, 7]}], use_tqdm=False)))
    print("@@" + json.dumps(found), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
