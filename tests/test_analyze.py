"""The gap's split into weight error, activation error and engine drift."""

import json

import pytest
import torch
from helpers import run_ranks

from megatron_quads.errors import QuadsError
from megatron_quads.proof.analyze import align, split


def test_rows_add_up_and_know_which_emulation_is_the_rollouts():
    raw, w4a16, w4a4, rac, rollout = (torch.full((8,), v) for v in (0.0, 1.0, 3.0, 1.5, 1.6))
    rows = {r.part: r for r in split(raw, w4a16, w4a4, rac, rollout, rollout_has_rac=True)}
    assert rows["weight error"].mean == 1.0 and rows["activation error"].mean == 2.0
    assert rows["activation error, RAC"].mean == 0.5
    assert rows["engine drift"].mean == pytest.approx(0.1, abs=1e-6) and rows["gap, naive"].bias > 0
    rows = {r.part: r for r in split(raw, w4a16, w4a4, rac, rollout, rollout_has_rac=False)}
    assert rows["engine drift"].mean == pytest.approx(1.4, abs=1e-6)
    assert "engine drift" not in {r.part for r in split(raw, w4a16, w4a4, None, None, rollout_has_rac=False)}


def test_logprobs_belong_to_the_last_tokens():
    where, values = align([[7, 8, 9], [5, 6]], [[-1.0], [-2.0]])
    assert where.tolist() == [[0, 1], [1, 0]] and values.tolist() == [-1.0, -2.0]
    with pytest.raises(QuadsError, match="sequence 0"):
        align([[7, 8]], [[-1.0, -2.0]])
    with pytest.raises(QuadsError, match="not finite"):
        align([[7, 8]], [[float("nan")]])
    with pytest.raises(QuadsError, match="1 sequences but 2"):
        align([[7, 8]], [[-1.0], [-1.0]])


@pytest.fixture(scope="module")
def outputs(tiny_hf, tmp_path_factory):
    """Folders and results with EP1 and EP2."""
    found = {}
    for ep in (1, 2):
        out = tmp_path_factory.mktemp(f"analyze{ep}")
        ranks = run_ranks(ep, __file__.replace("test_analyze", "analyze_worker"), [tiny_hf, out, ep], timeout=200)
        found[ep] = (out, json.loads((out / "analyze.json").read_text()), ranks[0].stdout)
    return found


@pytest.mark.slow
def test_the_trainer_is_split_from_the_rollout(outputs):
    out, result, printed = outputs[1]
    assert result["tokens"] == sum(range(5, 11)), "only sampled tokens count"
    rows = {r["part"]: r for r in result["rows"]}
    assert rows["engine drift"]["mean"] == pytest.approx(1e-3, rel=1e-2)
    assert rows["engine drift"]["max"] == pytest.approx(1e-3, rel=1e-2)
    assert rows["weight error"]["mean"] > 0.02
    assert 0.005 < rows["activation error, RAC"]["mean"] < rows["activation error"]["mean"]
    assert rows["gap, asymmetric QAT"]["mean"] < rows["gap, naive"]["mean"]
    assert len(result["layers"]) == 2
    for layer in result["layers"]:
        assert 0.02 < layer["activation_rac"] < layer["activation"] < 0.3
        assert 0.05 < layer["weight"] < 0.3
    assert "engine drift" in printed and (out / "analyze.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_two_ranks_find_the_same(outputs):
    for a, b in zip(outputs[1][1]["layers"], outputs[2][1]["layers"], strict=True):
        assert a == pytest.approx(b, rel=1e-3)
    for a, b in zip(outputs[1][1]["rows"], outputs[2][1]["rows"], strict=True):
        assert a["mean"] == pytest.approx(b["mean"], rel=1e-2)
