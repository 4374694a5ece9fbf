"""Flat refits that break in the middle, on a real engine: by the sender, by what is sent, by SIGKILL."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import make_tiny_hf
from rollout_helpers import dequantized, half_metadata, write_export
from safetensors.torch import load_file

from megatron_quads.checkpoint.hf import SafetensorsFolder
from megatron_quads.digest import tensor_digest as digest
from megatron_quads.errors import QuadsError
from megatron_quads.rollout import LocalRollout
from megatron_quads.rollout.flat import Chunk, chunks_of

pytestmark = pytest.mark.slow
TOKENS = torch.randint(3, 500, (4, 24), generator=torch.Generator().manual_seed(3)).tolist()
KEEP = (2,)  # experts of the last layer travel unquantised


def _chunks(export: Path) -> Iterator[Chunk]:
    reader = SafetensorsFolder(export)
    return chunks_of((n, reader.get(n)) for n in reader.names())


def test_refits_that_break(tmp_path: Path) -> None:
    sources = [make_tiny_hf(tmp_path / f"hf{i}", seed=i, num_hidden_layers=3) for i in range(2)]
    metadata = half_metadata(sources[0], [0, 1])
    exports = [
        write_export(s, tmp_path / f"export{i}", metadata=metadata, keep=KEEP, version=i) for i, s in enumerate(sources)
    ]
    weights = [dequantized(load_file(s / "model.safetensors"), KEEP) for s in sources]
    want = [{n: digest(w) for n, w in held.items() if ".experts." in n} for held in weights]
    settings = {"rac_hash": metadata.content_hash, "file": tmp_path / "flat.bin"}

    def start(i: int) -> LocalRollout:
        return LocalRollout(exports[i], max_model_len=32, max_num_seqs=8, log=tmp_path / f"rollout{i}.log")

    with start(0) as rollout:
        before = rollout.score(TOKENS)
        with pytest.raises(QuadsError, match="not the running one"):
            rollout.update_flat(_chunks(exports[1]), 1, rac_hash="0" * 64, file=tmp_path / "flat.bin")
        # refused before anything was touched: the old version goes on
        assert rollout.info().version == 0 and rollout.score(TOKENS) == before and rollout.audit() == want[0]

        assert rollout.update_flat(_chunks(exports[1]), 1, **settings).chunks == 3
        assert rollout.info().version == 1 and rollout.audit() == want[1]
        after = rollout.score(TOKENS)
        assert rollout.update_flat(_chunks(exports[0]), 2, **settings).bytes > 0
        assert rollout.score(TOKENS) == before and rollout.audit() == want[0]

        def killing() -> Iterator[Chunk]:
            for i, chunk in enumerate(_chunks(exports[1])):
                if i == 2:  # one chunk is in the engine, the next is on its way
                    os.kill(rollout.pid, signal.SIGKILL)
                yield chunk

        with pytest.raises(QuadsError, match=r"^rollout process died \(signal SIGKILL\) \[.*rollout0\.log\]; [^\n]*$"):
            rollout.update_flat(killing(), 3, **settings)
        with pytest.raises(QuadsError, match="rollout process died"):
            rollout.score(TOKENS)

    with start(1) as rollout:
        assert rollout.info().version == 1 and rollout.score(TOKENS) == after and rollout.audit() == want[1]

        def diverging() -> Iterator[Chunk]:
            chunks = _chunks(exports[0])
            yield next(chunks)
            yield next(chunks)
            raise QuadsError("weight is not finite", where="model.norm.weight", do="lower the learning rate")

        with pytest.raises(QuadsError, match="weight is not finite"):
            rollout.update_flat(diverging(), 4, **settings)
        for use in (lambda: rollout.score(TOKENS), rollout.audit):
            with pytest.raises(QuadsError, match="the last weight update failed half-way"):
                use()
        assert rollout.info().version is None
