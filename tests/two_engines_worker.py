"""Two checkpoints in one process: ``two_engines_worker.py ROOT``. Prints one JSON line of what each engine scored.

The engines run in this process (no engine child), A on the emulation and B on the native path, whose GEMMs are the
reference on a CPU; then B alone takes new weights, from a folder and then,
experts only, from flat buffers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from megatron_quads.checkpoint.hf import SafetensorsFolder
from megatron_quads.rollout import child, quant_config
from megatron_quads.rollout.flat import chunks_of
from megatron_quads.rollout.flat_load import FlatUpdate


def main(root: Path) -> None:
    """A and B live at once and answer in turns."""
    tokens = json.loads((root / "tokens.json").read_text())
    kernels = iter(["emulation"] * 2 + ["native"] * 2)  # two layers each
    quant_config.choose_here = lambda *_: next(kernels)
    engines = {name: child.Engine(str(root / name), "float32", 64, 4, 0, {"enforce_eager": True}) for name in "ab"}
    found: dict[str, object] = {}
    for turn in (1, 2):
        for name, engine in engines.items():
            found[f"{name}{turn}"] = engine.score(tokens)
    found["info"] = {name: engine.workers("info", {})[0] for name, engine in engines.items()}
    engines["b"].update_weights(str(root / "b2"), 5)
    found["b3"], found["a3"] = engines["b"].score(tokens), engines["a"].score(tokens)
    found["audit"] = engines["b"].workers("audit", {})[0]
    engines["b"].workers("set_activation", {"mode": "w4a4"})
    found["b4"], found["a4"] = engines["b"].score(tokens), engines["a"].score(tokens)
    engines["b"].workers("set_activation", {"mode": "rac"})
    (model,) = engines["b"]._llm.apply_model(lambda m: m)
    held = [p.data_ptr() for name, p in model.named_parameters() if ".experts." in name]
    reader = SafetensorsFolder(root / "b")
    update = FlatUpdate(model, None, [])
    for chunk in chunks_of((n, reader.get(n)) for n in reader.names()):
        if chunk.layer is not None:  # vLLM on a CPU repacks dense weights once for all
            update._take_experts(chunk.layer, chunk.first_expert, chunk.tensors)
    found["b5"] = engines["b"].score(tokens)
    found["kept"] = held == [p.data_ptr() for name, p in model.named_parameters() if ".experts." in name]
    print("@@" + json.dumps(found), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
