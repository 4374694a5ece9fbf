"""The unquantised arm: a weight update on CPU equals a fresh engine (stock vLLM's does not), and can be audited."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import make_tiny_hf
from rollout_helpers import HFReference, write_export
from safetensors.torch import load_file
from torch import Tensor

from megatron_quads.errors import QuadsError
from megatron_quads.rollout import LocalRollout

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two HF checkpoints. With a width that needs no padding, stock vLLM's fault after an update is silent."""
    root = tmp_path_factory.mktemp("plain")
    return [make_tiny_hf(root / f"hf{i}", seed=i) for i in range(2)]


@pytest.fixture(scope="module")
def rollout(folders: list[Path]) -> Iterator[LocalRollout]:
    with LocalRollout(folders[0], max_model_len=64, log=folders[0].parent / "rollout.log") as made:
        yield made


def _score(rollout: LocalRollout, tokens: Tensor) -> Tensor:
    return torch.tensor(rollout.score(tokens.tolist()))


def _require_served(rollout: LocalRollout, weights: dict[str, Tensor], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    experts = {n: w for n, w in weights.items() if ".experts." in n}
    save_file(experts, tmp_path / "w.safetensors")
    bits = rollout.count_bits(tmp_path / "w.safetensors")
    assert bits.keys() == experts.keys() and not any(bits.values())


def test_update_equals_a_fresh_engine(rollout: LocalRollout, folders: list[Path], tmp_path: Path) -> None:
    tokens = torch.randint(3, 500, (8, 40), generator=torch.Generator().manual_seed(0))
    weights = [load_file(f / "model.safetensors") for f in folders]
    fresh = _score(rollout, tokens)
    info = rollout.info()
    assert (info.version, info.activation, info.rac_active_layers) == (0, "unquantised", [])
    _require_served(rollout, weights[0], tmp_path)

    rollout.update_weights(write_export(folders[1], tmp_path / "e1", quantized=False, version=1), 1)
    reference = HFReference(folders[1], weights[1], None, tmp_path / "reference")
    assert (_score(rollout, tokens) - reference.score(tokens)).abs().max() <= 1e-4
    assert rollout.info().version == 1
    _require_served(rollout, weights[1], tmp_path)

    rollout.update_weights(write_export(folders[0], tmp_path / "e2", quantized=False, version=2), 2)
    assert torch.equal(_score(rollout, tokens), fresh)


def test_a_broken_off_update_serves_nothing(rollout: LocalRollout, folders: list[Path], tmp_path: Path) -> None:
    """Last: the engine has no whole set of weights afterwards."""

    def diverge(tensors: dict[str, Tensor], config: dict) -> None:
        tensors["model.layers.1.mlp.experts.2.up_proj.weight"][3, 5] = float("nan")

    bad = write_export(folders[1], tmp_path / "bad", quantized=False, version=3, mutate=diverge)
    with pytest.raises(QuadsError, match=r"not finite \[model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight"):
        rollout.update_weights(bad, 3)
    assert rollout.info().version is None
    for use in (lambda: rollout.score([[4, 5, 6]]), lambda: rollout.audit()):
        with pytest.raises(QuadsError, match="half-way"):
            use()
