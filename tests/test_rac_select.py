"""Selection: ranking, uniform and adaptive counts, budget, metadata."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_quads.errors import QuadsError
from megatron_quads.rac import budget, select
from megatron_quads.rac.metadata import ModelShape

SHAPE = ModelShape(model_type="qwen3_moe", num_layers=3, num_experts=4, hidden_size=128, moe_intermediate_size=64)
BLOCKS = select.num_blocks(SHAPE)
COST = select.block_cost(SHAPE)
UNITS = {(layer, gemm): BLOCKS[gemm] for layer in range(3) for gemm in select.GEMMS}


def energies(seed: int = 0) -> dict:
    g = torch.Generator().manual_seed(seed)
    return {unit: torch.rand(n, generator=g, dtype=torch.float64) for unit, n in UNITS.items()}


def metadata(counts, **over):
    kwargs = dict(ratio=0.5, policy="uniform", activation_scale="token", is_sorted=False)
    return select.build_metadata(SHAPE, counts, energies(), **{**kwargs, **over})


def test_rank_is_by_energy_and_ties_keep_index_order():
    assert select.rank_blocks(torch.tensor([1.0, 5.0, 1.0, 5.0, 9.0])) == [4, 1, 3, 0, 2]


def test_cost_is_the_gemm_flops():
    # one whole gate_up is 2 * I * H multiply-adds, one whole down is H * I
    assert COST["gate_up"] * BLOCKS["gate_up"] == 2 * 64 * 128
    assert COST["down"] * BLOCKS["down"] == 64 * 128
    half = select.uniform(UNITS, 0.5)
    assert select.flop_share(half, SHAPE) == pytest.approx(0.5)


@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.3, 0.5, 0.99, 1.0])
def test_uniform_never_exceeds_its_ratio(ratio):
    counts = select.uniform(UNITS, ratio)
    assert all(count <= UNITS[unit] * ratio + 1e-9 for unit, count in counts.items())
    if ratio == 1.0:
        assert counts == UNITS


def test_ratio_zero_selects_nothing():
    kl = {unit: {0: 1.0, n: 0.0} for unit, n in UNITS.items()}
    for counts in (select.uniform(UNITS, 0.0), select.adaptive(kl, COST, 0.0)):
        rac = metadata(counts, ratio=0.0)
        assert all(not gemm.indices() for layer in rac.layers.values() for gemm in (layer.gate_up, layer.down))


def test_adaptive_spends_where_kl_falls_most_per_flop():
    # down of layer 1 is as sensitive as gate_up of layer 0 at half the cost; all else is insensitive
    kl = {unit: {0: 1e-9, n // 2: 5e-10, n: 0.0} for unit, n in UNITS.items()}
    kl[0, "gate_up"] = {0: 1.0, 4: 0.5, 8: 0.0}
    kl[1, "down"] = {0: 1.0, 2: 0.5, 4: 0.0}
    assert select.adaptive(kl, COST, 1 / 9)[1, "down"] == 4
    counts = select.adaptive(kl, COST, 1 / 3)
    assert counts[1, "down"] == 4 and counts[0, "gate_up"] == 8


def test_adaptive_looks_past_a_level_that_hurts():
    kl = {unit: {0: 0.0, n: 0.0} for unit, n in UNITS.items()}
    kl[2, "down"] = {0: 1.0, 1: 1.2, 2: 1.1, 3: 0.1, 4: 0.2}
    counts = select.adaptive(kl, COST, 0.5)
    assert counts.pop((2, "down")) == 3
    assert not any(counts.values()), "units without gain stay off"


tables = st.fixed_dictionaries(
    {
        unit: st.lists(
            st.floats(-1e-6, 1.0), min_size=len(select.level_counts(n)), max_size=len(select.level_counts(n))
        )
        for unit, n in UNITS.items()
    }
)


@settings(max_examples=60, deadline=None)
@given(tables, st.floats(0.0, 1.0))
def test_adaptive_never_exceeds_the_budget_and_never_hurts(values, ratio):
    kl = {unit: dict(zip(select.level_counts(UNITS[unit]), v, strict=True)) for unit, v in values.items()}
    counts = select.adaptive(kl, COST, ratio)
    assert select.flop_share(counts, SHAPE) <= ratio + 1e-6
    assert sum(kl[u][n] for u, n in counts.items()) <= sum(table[0] for table in kl.values())
    assert all(counts[u] in kl[u] for u in kl)


def test_adaptive_is_close_to_the_exact_optimum():
    units = {(layer, gemm): BLOCKS[gemm] for layer in range(2) for gemm in select.GEMMS}
    for seed in range(10):
        g = torch.Generator().manual_seed(seed)
        kl = {}
        for unit, n in units.items():
            levels = select.level_counts(n)
            drops = torch.rand(len(levels) - 1, generator=g).cumsum(0) * float(torch.rand((), generator=g)) ** 2
            kl[unit] = {0: 4.0, **{c: 4.0 - float(d) for c, d in zip(levels[1:], drops, strict=True)}}
        budget = 0.5 * sum(n * COST[u[1]] for u, n in units.items())
        options = itertools.product(*(kl[u] for u in units))
        fits = [c for c in options if sum(n * COST[u[1]] for u, n in zip(units, c, strict=True)) <= budget]
        best = max(sum(kl[u][0] - kl[u][n] for u, n in zip(units, c, strict=True)) for c in fits)
        mine = sum(kl[u][0] - kl[u][n] for u, n in select.adaptive(kl, COST, 0.5).items())
        assert mine >= 0.85 * best


def test_non_finite_sensitivity_is_refused():
    kl = {unit: {0: 1.0, n: float("nan")} for unit, n in UNITS.items()}
    with pytest.raises(QuadsError, match="layer 0 gate_up"):
        select.adaptive(kl, COST, 0.5)


def test_metadata_takes_top_blocks_and_a_prefix_when_sorted():
    counts = select.uniform(UNITS, 0.5)
    plain, leading = metadata(counts), metadata(counts, is_sorted=True)
    for layer in range(3):
        top = energies()[layer, "gate_up"].topk(4).indices.sort().values.tolist()
        assert plain.layers[layer].gate_up.blocks == leading.layers[layer].gate_up.blocks == top
        assert plain.layers[layer].down.blocks == energies()[layer, "down"].topk(2).indices.sort().values.tolist()
        assert leading.layers[layer].down.prefix == 2
    assert leading.sorted and not plain.sorted and plain.content_hash != leading.content_hash


def test_static_scale_without_amax_is_refused():
    counts = select.uniform(UNITS, 0.5)
    with pytest.raises(QuadsError, match="no static scale"):
        metadata(counts, activation_scale="static", static_amax={(0, "gate_up"): 1.0})
    rac = metadata(counts, activation_scale="static", static_amax=dict.fromkeys(UNITS, 2.5))
    assert rac.layers[2].down.static_amax == 2.5


def test_budget_becomes_flags_and_is_said_once():
    assert budget.with_budget(["--bf16"], 0.3) == [
        "--bf16",
        "--quads-rac-ratio",
        "0.3",
        "--quads-rac-policy",
        "adaptive",
    ]
    for argv, value, said in (
        (["--quads-rac-ratio", "0.5"], 0.5, "--quads-rac-ratio"),
        (["--quads-rac-policy=uniform"], 0.5, "--quads-rac-policy"),
        ([], 0.0, r"outside \(0, 1\]"),
        ([], float("nan"), "outside"),
    ):
        with pytest.raises(QuadsError, match=said):
            budget.with_budget(argv, value)
