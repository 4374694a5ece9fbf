"""Calibration on the real Megatron model: sorted and plain, one rank and two, bad input."""

import json

import pytest
import torch
from helpers import run_ranks
from safetensors.torch import load_file

from megatron_quads import atomic
from megatron_quads.rac import sort
from megatron_quads.rac.budget import REPORT, curve, show
from megatron_quads.rac.metadata import load_sidecar

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tiny_hf, tmp_path_factory):
    """Results and folders with EP1 and EP2."""
    found = {}
    for ep in (1, 2):
        out = tmp_path_factory.mktemp(f"ep{ep}")
        run_ranks(ep, __file__.replace("test_rac_calibrate", "calibrate_worker"), [tiny_hf, out, ep], timeout=400)
        found[ep] = (out, json.loads((out / "result.json").read_text()))
    return found


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_two_expert_parallel_ranks_choose_the_same(runs):
    for name in ("sorted", "plain"):
        one, two = (runs[ep][0] / name for ep in (1, 2))
        assert load_sidecar(one) == load_sidecar(two)
        assert load_sidecar(one).content_hash == load_sidecar(two).content_hash
        a, b = weights(one), weights(two)
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
        first, second = (runs[ep][1]["reports"][name] for ep in (1, 2))
        assert first["expert_tokens"] == second["expert_tokens"]
        assert first["energy"]["0.down"] == pytest.approx(second["energy"]["0.down"], rel=1e-4)


def test_every_token_is_counted_topk_times(runs):
    report = runs[1][1]["reports"]["sorted"]
    assert report["tokens"] == 3 * (12 + 20 + 33)
    assert all(sum(tokens) == 2 * report["tokens"] for tokens in report["expert_tokens"].values())


def test_sorting_keeps_the_function_and_the_weights(runs, tiny_hf):
    out, result = runs[1]
    assert result["gaps"]["sort"][1] < 1e-4
    assert atomic.is_committed(out / "sorted") and sort.read_calibration(out / "sorted")["sorted"] is True
    before, after, plain = weights(tiny_hf), weights(out / "sorted"), weights(out / "plain")
    assert all(torch.equal(before[k], plain[k]) for k in before), "unsorted mode leaves the weights alone"
    changed = [k for k in before if not torch.equal(before[k], after[k])]
    assert changed and all(".experts." in k for k in changed)
    for k in changed:
        assert torch.equal(before[k].flatten().sort().values, after[k].flatten().sort().values), k


def test_selection_follows_policy_and_budget(runs):
    out, result = runs[1]
    leading, plain = load_sidecar(out / "sorted"), load_sidecar(out / "plain")
    assert leading.sorted and leading.policy == "adaptive" and 0 < result["reports"]["sorted"]["flop_share"] <= 0.5
    assert all(layer.down.prefix is not None for layer in leading.layers.values())
    for number, layer in plain.layers.items():
        assert len(layer.gate_up.blocks) == 4 and len(layer.down.blocks) == 2  # half of 128/16 and 64/16
        energy = torch.tensor(result["reports"]["plain"]["energy"][f"{number}.gate_up"])
        assert layer.gate_up.blocks == energy.topk(4).indices.sort().values.tolist()
        amax = result["reports"]["plain"]["amax"][f"{number}.down"]
        assert layer.down.static_amax == pytest.approx(1.25 * amax)
    assert json.loads((out / "plain" / REPORT).read_text())["rac_hash"] == plain.content_hash


def test_the_budget_and_what_other_budgets_would_buy(runs, capsys):
    out, result = runs[1]
    report, rac = result["reports"]["sorted"], load_sidecar(out / "sorted")
    kl = {}
    for name, table in report["kl"].items():
        layer, gemm = name.split(".")
        kl[int(layer), gemm] = {int(n): v for n, v in table.items()}
    points = curve(kl, rac)
    assert all(p.spent <= p.budget + 1e-9 for p in points)
    assert points[0].kl_left > points[-1].kl_left and points[-1].kl_left < 0.2
    (half,) = (p for p in points if p.budget == 0.5)
    assert half.spent == pytest.approx(report["flop_share"])
    chosen = sum(kl[int(n.split(".")[0]), n.split(".")[1]][count] for n, count in report["counts"].items())
    assert half.kl_left == pytest.approx(chosen / sum(t[0] for t in kl.values()))
    show(out / "sorted")
    said = capsys.readouterr().out
    assert f"spent {report['flop_share']:.3f}" in said and f"leaves {half.kl_left:.1%}" in said
    show(out / "plain")  # uniform: nothing was measured
    assert not capsys.readouterr().out


def test_sensitivity_falls_as_blocks_are_compensated(runs):
    for table in runs[1][1]["reports"]["sorted"]["kl"].values():
        kl = {int(count): value for count, value in table.items()}
        assert kl[0] > 10 * kl[max(kl)] > 0


def test_sorted_residual_energy_is_in_the_leading_blocks(runs):
    reports = runs[1][1]["reports"]
    for layer in (0, 1):
        leading = torch.tensor(reports["sorted"]["energy"][f"{layer}.down"])
        assert torch.equal(leading, leading.sort(descending=True).values)
        plain = torch.tensor(reports["plain"]["energy"][f"{layer}.down"])
        top = plain.topk(2).values.sum() / plain.sum()
        assert leading[:2].sum() / leading.sum() > top + 0.05


def test_rac_closes_part_of_the_gap(runs):
    gaps = runs[1][1]["gaps"]
    print({name: [f"{v:.2e}" for v in pair] for name, pair in gaps.items()})
    assert gaps["plain rac"][0] < gaps["plain none"][0]
    assert gaps["sorted rac"][0] < gaps["sorted none"][0]
    assert gaps["sorted rac"][0] < gaps["plain rac"][0]


def test_ratio_zero_switches_rac_off_and_does_not_sort(runs, tiny_hf):
    rac = load_sidecar(runs[1][0] / "off")
    assert not rac.sorted and all(not g.indices() for x in rac.layers.values() for g in (x.gate_up, x.down))
    assert all(torch.equal(v, weights(runs[1][0] / "off")[k]) for k, v in weights(tiny_hf).items())


def test_bad_input_is_one_line_and_leaves_nothing(runs):
    out, result = runs[1]
    assert set(result["errors"]) == {"none", "long", "bf16", "small"}
    for name, text in (("none", "no prompts"), ("long", "longer than the context"), ("small", "no whole 16-block")):
        assert text in result["errors"][name] and "\n" not in result["errors"][name]
    assert [p.name for p in out.iterdir() if "bad" in p.name] == []
