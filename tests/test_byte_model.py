"""The byte and FLOP model against hand-made sums and against what the H200 did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_quads.byte_model import (
    B200,
    BLACKWELL,
    H200,
    HOPPER,
    Arm,
    Model,
    check,
    experts_hit,
    saved_by_fp8,
    step_s,
)
from megatron_quads.errors import QuadsError

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "rollout_h200.json"


def test_a_step_is_the_sum_of_its_bytes() -> None:
    """One token of a one-layer model on a machine without FLOP limits."""
    model = Model(layers=1)
    expert = 3 * 2048 * 768
    assert experts_hit(model, 1) == pytest.approx(8) and experts_hit(model, 256) == pytest.approx(128, rel=1e-4)
    attention = 2048 * (32 * 128 * 2 + 2 * 4 * 128 + 128)  # q and o, k and v, router
    cache = 100 * 2 * 4 * 128
    total = 8 * expert * 0.5625 + 2 * (attention + cache + 151936 * 2048)
    assert step_s(H200, model, HOPPER["w4a16"], 1, 100, 1) == pytest.approx(total / 4.44e12)
    more = step_s(B200, model, BLACKWELL["quads-0.5, W_S from memory"], 1, 100, 1)
    assert more - step_s(B200, model, BLACKWELL["w4a4"], 1, 100, 1) == pytest.approx(8 * expert * 0.28125 / 7.7e12)


def test_many_tokens_are_bound_by_flops() -> None:
    model = Model(layers=1, vocab=0)
    both = [step_s(B200, model, Arm(0.5625, "fp4", ratio), 1 << 20, 0, 0) for ratio in (0.0, 0.5)]
    flops = 2 * (1 << 20) * 8 * 3 * 2048 * 768
    assert both[1] - both[0] == pytest.approx(0.5 * flops / 9e15)


def test_what_the_h200_did() -> None:
    rows = check(RESULTS)
    assert len(rows) == 21 and all(0.2 < r.explained < 1 for r in rows), "a bound that is beaten is wrong"
    saved = saved_by_fp8(rows)
    for batch in (16, 64):  # bound by bytes: their difference is predicted within a fifth
        assert saved[batch][1] == pytest.approx(saved[batch][0], rel=0.2)
    assert saved[256][1] > 2 * saved[256][0]  # not at 256, as the documentation says


def test_other_results_are_refused(tmp_path: Path) -> None:
    for text, said in (("{}", "not a rollout benchmark"), ('{"rows": [], "layers": 1, "tokens_in": 1, "tokens_out": 1, "device": "A100"}', "A100")):  # fmt: skip
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(QuadsError, match=said):
            check(tmp_path / "x.json")
    assert json.loads(RESULTS.read_text())["rows"]
