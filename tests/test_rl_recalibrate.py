"""``quads rl --recalibrate-every``: the selection taken anew travels with the weights, survives a stop, and is proven."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import TIMES, quads
from test_rl_loop import rl

from megatron_quads import atomic
from megatron_quads.checkpoint.hf import read_model_config
from megatron_quads.config import QuadsConfig
from megatron_quads.errors import QuadsError
from megatron_quads.rac.metadata import SIDECAR, GemmSelection, LayerSelection, RacMetadata, load_sidecar
from megatron_quads.rac.refresh import require_selectable, reselect
from megatron_quads.rl.config import RLConfig
from megatron_quads.rl.data import rollout_batch, whole_sequences
from megatron_quads.rl.metrics import read_rows
from megatron_quads.rl.tasks import make_task
from megatron_quads.rl.tiny import TinyModel, make_tiny_checkpoint
from megatron_quads.rollout.types import Sample


@dataclass
class Runs:
    """A run through flat refits, and the same from its first step's checkpoint on through folders."""

    base: Path
    flat: Path
    resumed: Path
    verified: subprocess.CompletedProcess[str]


def _base(root: Path) -> Path:
    """A tiny model with a selection that nobody measured: the four leading blocks of gate/up's eight."""
    task = make_task("spell_backward", {"min_word_len": 4, "max_word_len": 6})
    base = make_tiny_checkpoint(
        root / "base", 0, task=task, model=TinyModel(hidden=128, moe_intermediate=64, experts=4)
    )
    chosen = LayerSelection(gate_up=GemmSelection(blocks=[0, 1, 2, 3]), down=GemmSelection(prefix=2))
    rac = RacMetadata(
        model=read_model_config(base).shape,
        activation_scale="token",
        policy="uniform",
        ratio=0.5,
        sorted=True,
        layers={0: chosen, 1: chosen},
    )
    atomic.write_json(base / SIDECAR, rac.to_block())
    return base


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Two ranks with half of the experts each; a new selection after steps 1 and 3."""
    root = tmp_path_factory.mktemp("recalibrate")
    base, flat, resumed = _base(root), root / "flat", root / "resumed"
    words = ["--recalibrate-every", "2", "--save-every", "1", "--steps", "4"]
    done = quads(*rl(base, flat, *words, "--refit", "flat"))
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.copytree(flat, resumed)
    for step in (3, 4):
        shutil.rmtree(resumed / "checkpoints" / f"step_{step:06d}")
    shutil.rmtree(resumed / "export")
    done = quads(*rl(base, resumed, *words, "--refit", "folder", "--resume"))
    assert done.returncode == 0, done.stdout + done.stderr
    export = resumed / "export"
    (export / SIDECAR).write_text((base / SIDECAR).read_text())
    return Runs(base, flat, resumed, quads("verify", resumed, "--no-engine"))


def _hash(folder: Path) -> str:
    rac = load_sidecar(folder)
    assert rac is not None
    return rac.content_hash


@pytest.mark.slow
def test_each_version_has_its_selection(runs: Runs) -> None:
    rows, audit = read_rows(runs.flat / "metrics.jsonl"), read_rows(runs.flat / "audit.jsonl")
    assert [r["rac_version"] for r in rows] == [0, 2, 2, 4]
    changed = [r["rac_blocks_changed"] for r in rows]
    assert changed[0] == changed[2] == 0 and changed[1] > 0
    first, second, third, fourth, fifth = (a["rac"] for a in audit)
    assert first == second == _hash(runs.base)
    assert third == fourth and len({second, third, fifth}) == 3
    assert all(a["trainer"] == a["rollout"] for a in audit)
    # what is on the disk of a version holds that version's: saved steps, and what is served
    assert _hash(runs.flat / "refit" / "v000003") == third and _hash(runs.flat / "export") == fifth
    extra = json.loads((runs.flat / "checkpoints" / "step_000002" / "extra.json").read_text())
    assert extra["selection"]["rac"]["hash"] == third and extra["selection"]["rac_version"] == 2
    old, new = load_sidecar(runs.base), load_sidecar(runs.flat / "export")
    assert old is not None and new is not None
    old.require_same_form(new, where="here")
    assert new.blocks_not_in(old) > 0 and all(x.down.prefix == 2 for x in new.layers.values())


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_selection_it_had(runs: Runs) -> None:
    """And through folders the same as from memory: the numbers depend on the selection, so they would differ."""
    rows = [
        [
            {k: v for k, v in r.items() if k not in TIMES and k != "refit_bytes"}
            for r in read_rows(run / "metrics.jsonl")
        ]
        for run in (runs.flat, runs.resumed)
    ]
    assert rows[0] == rows[1]
    assert read_rows(runs.flat / "audit.jsonl") == read_rows(runs.resumed / "audit.jsonl")
    assert _hash(runs.resumed / "refit" / "v000004") == _hash(runs.flat / "export")


@pytest.mark.slow
def test_verify_names_an_export_with_another_selection(runs: Runs) -> None:
    assert runs.verified.returncode == 1
    said = runs.verified.stderr.strip().splitlines()[-1]
    assert said.startswith(f"quads: error: the export's RAC is {_hash(runs.base)[:12]}, that of the trainer's weights")


def _metadata(blocks: list[int], *, sort: bool = True, scale: str = "token", amax: float | None = None) -> RacMetadata:
    shape = {"model_type": "m", "num_layers": 1, "num_experts": 2, "hidden_size": 64, "moe_intermediate_size": 48}
    down = GemmSelection(prefix=1, static_amax=amax) if sort else GemmSelection(blocks=[1], static_amax=amax)
    return RacMetadata.model_validate(
        {
            "model": shape,
            "activation_scale": scale,
            "policy": "adaptive",
            "ratio": 0.5,
            "sorted": sort,
            "layers": {0: LayerSelection(gate_up=GemmSelection(blocks=blocks, static_amax=amax), down=down)},
        }
    )


@pytest.mark.parametrize("scale", ["token", "static"])
@pytest.mark.parametrize("sort", [True, False])
def test_counts_and_form_stay_blocks_follow_the_energy(sort: bool, scale: str) -> None:
    old = _metadata([0, 2], sort=sort, scale=scale, amax=3.0)
    energy = {(0, "gate_up"): torch.tensor([1.0, 5.0, 2.0, 4.0]), (0, "down"): torch.tensor([1.0, 2.0, 9.0])}
    new = reselect(old, energy, {(0, "gate_up"): 2.0, (0, "down"): 8.0}, headroom=1.25)  # type: ignore[arg-type]
    old.require_same_form(new, where="here")
    assert new.layers[0].gate_up.blocks == [1, 3] and new.layers[0].gate_up.static_amax == 2.5
    assert new.layers[0].down == GemmSelection(prefix=1 if sort else None, blocks=None if sort else [2], static_amax=10)
    assert new.blocks_not_in(old) == (2 if sort else 3) and new.content_hash != old.content_hash


def test_other_forms_are_named() -> None:
    old = _metadata([0, 2])
    for other, name in (
        (_metadata([0, 1, 2]), "number of blocks"),
        (_metadata([0, 2], sort=False), "sorted"),
        (_metadata([0, 2], scale="static", amax=2.0), "activation_scale"),
        (old.model_copy(update={"layers": {}}), "number of blocks"),
    ):
        with pytest.raises(QuadsError, match=f"the new RAC selection has another {name} than the running one"):
            old.require_same_form(other, where="here")


def test_sequences_end_where_the_response_does() -> None:
    samples = [[Sample([7, 8], [-1.0, -2.0], "stop")], [Sample([9], [-1.0], "length")]]
    batch = rollout_batch([[1, 2, 3], [4]], samples, pad_id=0, multiple=4)
    assert batch["tokens"].shape == (2, 8)
    assert whole_sequences(batch) == [[1, 2, 3, 7, 8], [4, 9]]


def test_what_has_no_selection_is_refused(tmp_path: Path) -> None:
    base = _base(tmp_path)
    hf = read_model_config(base)
    require_selectable(QuadsConfig(recipe="quads"), hf)
    for recipe, text in (("qat", "recipe qat has no RAC selection"), ("symmetric-rac", "trains with the checkpoint's")):
        with pytest.raises(QuadsError, match=text):
            require_selectable(QuadsConfig(recipe=recipe), hf)
    found = load_sidecar(base)
    assert found is not None
    atomic.write_json(base / SIDECAR, found.without_blocks().to_block())
    with pytest.raises(QuadsError, match="compensates no block"):
        require_selectable(QuadsConfig(recipe="quads"), hf)
    with pytest.raises(QuadsError, match="cannot be negative"):
        RLConfig(model="m", out="o", recalibrate_every=-1)
