"""Another RAC selection brought by a weight update, on a real engine: together with the weights, announced, or not at all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import make_tiny_hf
from rollout_helpers import HFReference, dequantized, half_metadata, write_export
from safetensors.torch import load_file
from torch import Tensor

from megatron_quads.checkpoint.hf import SafetensorsFolder
from megatron_quads.errors import QuadsError
from megatron_quads.kernels import nvfp4, rac
from megatron_quads.rac.metadata import GemmSelection, LayerSelection, RacMetadata
from megatron_quads.rollout import LocalRollout
from megatron_quads.rollout.backends import ActivationPlan
from megatron_quads.rollout.flat import Chunk, chunks_of
from megatron_quads.rollout.prepared import PreparedPlan

TOKENS = torch.randint(3, 500, (12, 40), generator=torch.Generator().manual_seed(3))


def _chunks(export: Path) -> Iterator[Chunk]:
    reader = SafetensorsFolder(export)
    return chunks_of((n, reader.get(n)) for n in reader.names())


def _longer(metadata: RacMetadata) -> RacMetadata:
    """One block more in a layer."""
    more = LayerSelection(gate_up=GemmSelection(blocks=[0, 1, 2, 4, 6]), down=metadata.layers[1].down)
    return metadata.model_copy(update={"layers": {0: metadata.layers[0], 1: more}})


@pytest.mark.slow
def test_weights_and_selection_switch_together(tmp_path: Path) -> None:
    sources = [make_tiny_hf(tmp_path / f"hf{i}", seed=i) for i in range(2)]
    metadata = [half_metadata(sources[0], [0, 1], offset=i) for i in range(2)]
    other = _longer(metadata[0])
    exports = [write_export(sources[i], tmp_path / f"e{i}", metadata=metadata[i], version=i) for i in range(2)]
    longer = write_export(sources[1], tmp_path / "longer", metadata=other, version=1)
    weights = [dequantized(load_file(s / "model.safetensors")) for s in sources]
    hashes, blocks = [m.content_hash for m in metadata], [m.to_block() for m in metadata]
    flat = tmp_path / "flat.bin"

    with LocalRollout(exports[0], max_model_len=48, max_num_seqs=16, log=tmp_path / "rollout.log") as rollout:

        def require(weights_of: int, selection_of: int, version: int) -> Tensor:
            """The scores are those of these weights under this selection, and every worker says so."""
            info = rollout.info()
            assert (info.version, info.rac_hash) == (version, hashes[selection_of])
            rollout.assert_active()
            got = torch.tensor(rollout.score(TOKENS.tolist()))
            gaps = []
            for i in range(2):
                model = HFReference(sources[weights_of], weights[weights_of], metadata[i], tmp_path / "reference")
                model.mode = "rac"
                gaps.append((got - model.score(TOKENS)).abs())
            # rare rounding ties apart, against a selection that differs everywhere
            right, wrong = gaps[selection_of], gaps[1 - selection_of]
            print(f"right: median {right.median():.1e} mean {right.mean():.1e}; wrong: mean {wrong.mean():.1e}")
            assert right.median() < 2e-6 and right.mean() < 0.05 * wrong.mean()
            return got

        rollout.require_selection()
        first = require(0, 0, version=0)
        for folder, announced, text in (
            (exports[1], None, "differs from the running"),
            (exports[1], hashes[0], f"{hashes[1][:12]} differs from the announced {hashes[0][:12]}"),
            (longer, other.content_hash, "another number of blocks than the running one"),
        ):
            with pytest.raises(QuadsError, match=text):
                rollout.update_weights(folder, 1, rac_hash=announced)
        for block, announced, text in (
            (None, hashes[1], "not the running one"),
            (blocks[1], hashes[0], "other RAC metadata than it announces"),
            (other.to_block(), other.content_hash, "another number of blocks than the running one"),
            ({**blocks[1], "ratio": 0.25}, hashes[1], "does not match its content"),
        ):
            with pytest.raises(QuadsError, match=text):
                rollout.update_flat(_chunks(exports[1]), 1, rac_hash=announced, rac=block, file=flat)
        assert torch.equal(require(0, 0, version=0), first)  # refused before anything was touched

        rollout.update_weights(exports[1], 1, rac_hash=hashes[1])
        second = require(1, 1, version=1)
        assert rollout.update_flat(_chunks(exports[0]), 2, rac_hash=hashes[0], rac=blocks[0], file=flat).chunks == 3
        assert torch.equal(require(0, 0, version=2), first)
        rollout.update_flat(_chunks(exports[0]), 3, rac_hash=hashes[1], rac=blocks[1], file=flat)
        require(0, 1, version=3)
        rollout.update_flat(_chunks(exports[1]), 4, rac_hash=hashes[1], file=flat)  # the one that runs by now
        assert torch.equal(require(1, 1, version=4), second)

        def breaking() -> Iterator[Chunk]:
            yield from itertools.islice(_chunks(exports[0]), 2)  # one is sent when the next is there
            raise QuadsError("weight is not finite", where="here", do="lower the learning rate")

        with pytest.raises(QuadsError, match="weight is not finite"):
            rollout.update_flat(breaking(), 5, rac_hash=hashes[0], rac=blocks[0], file=flat)
        for use in (rollout.audit, lambda: rollout.score(TOKENS[:1].tolist())):
            with pytest.raises(QuadsError, match="the last weight update failed half-way"):
                use()


def _plan(blocks: list[int], amax: float, scale: str) -> ActivationPlan:
    index = {"gate_up": torch.tensor(blocks), "down": torch.arange(2)}
    return ActivationPlan("rac", scale, index, {"gate_up": amax, "down": amax}, listed=frozenset({"gate_up"}))


@pytest.mark.parametrize("scale", ["token", "static"])
def test_graphs_see_the_new_selection(scale: str) -> None:
    """In the tensors that they hold; a list stays a list where its blocks happen to be the leading ones."""
    width, cpu = {"gate_up": 96, "down": 80}, torch.device("cpu")
    made = PreparedPlan(_plan([0, 1, 2], 9.0, scale), width, cpu)
    assert made.blocks["gate_up"] is not None and made.blocks["gate_up"].listed
    assert made.blocks["down"] is not None and not made.blocks["down"].listed
    held = [t for t in made.scale.values() if t is not None]
    held += [t for b in made.blocks.values() if isinstance(b, rac.Blocks) for t in (b.index, b.order)]
    where = [t.data_ptr() for t in held]
    made.update(_plan([1, 4, 5], 3.0, scale))
    assert [t.data_ptr() for t in held] == where
    assert made.indices() == {"gate_up": [1, 4, 5], "down": [0, 1]}
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(0)) * 4
    top = nvfp4.row_scale(x) if scale == "token" else nvfp4.tensor_scale(torch.tensor(3.0))
    made.quantize("gate_up", x, out := torch.empty_like(x))
    assert torch.equal(out, rac.qdq_with_residual(x, top, torch.tensor([1, 4, 5])))
    for tensor in held:
        tensor.zero_()
    made.restore()  # after a level 2 sleep: the new one, not the first
    assert made.indices()["gate_up"] == [1, 4, 5]
    with pytest.raises(QuadsError, match="another form"):
        made.update(_plan([1, 4], 3.0, scale))
    assert made.indices()["gate_up"] == [1, 4, 5]
