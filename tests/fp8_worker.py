"""``fp8_worker.py VERSION WORDS``: the ``quads`` command as the only rank, whose refit VERSION is followed by a damaged one.

One weight of layer 1 is doubled beyond its tensor's maximum, in a copy of the export that the rollout is then given.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

from safetensors.torch import load_file, save_file

from megatron_quads.launch.local import free_port
from megatron_quads.rl.refit import Refitter

NAME = "model.layers.1.mlp.experts.2.down_proj.weight"


def main() -> None:
    """Damage the refit, then be the command line."""
    bad_version = int(sys.argv.pop(1))
    send = Refitter.send

    def send_then_damage(self: Refitter, rollout: Any, version: int) -> dict[str, float]:
        sent = send(self, rollout, version)
        if version == bad_version:
            bad = self.folder.path / "bad"
            shutil.copytree(self.folder.refit(version), bad)
            tensors = load_file(bad / "model.safetensors")
            tensors[NAME][3, 5] = 2 * tensors[NAME].abs().max()
            save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
            rollout.update_weights(bad, version)
        return sent

    Refitter.send = send_then_damage  # type: ignore[method-assign]
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    from megatron_quads.cli import main as quads

    quads()


if __name__ == "__main__":
    main()
