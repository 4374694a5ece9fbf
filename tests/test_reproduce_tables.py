"""``quads reproduce tables`` and ``status`` on logs with known contents: what holds, what fails, what is refused."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
from reproduce_helpers import (
    ARMS,
    GAP,
    GAPS,
    HELDOUT,
    STEPS,
    config,
    make_root,
    refit,
    rewards,
    rewrite,
    write_rows,
    write_run,
)
from typer.testing import CliRunner

from megatron_quads.reproduce.checks import Check, all_checks
from megatron_quads.reproduce.cli import app
from megatron_quads.reproduce.folder import Root
from megatron_quads.reproduce.logs import read_logs, role
from megatron_quads.reproduce.report import write_report
from megatron_quads.reproduce.tables import departure_table, gap_table, pass_table, ratio_table

NAIVE_QAT, QAT_OURS, OURS_ALL, ALL_BF16, UNIFORM_OURS, PASS, BITS = range(7)


def outcomes(root: Root) -> list[str]:
    """Of all checks, in order."""
    return [check.outcome for check in all_checks(read_logs(root))]


def one(root: Root, which: int) -> Check:
    """One check."""
    return all_checks(read_logs(root))[which]


def content(folder: Path) -> dict[str, bytes]:
    """All files of a report."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_every_order_holds_when_the_logs_say_so(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    assert outcomes(root) == ["holds"] * 7
    rows = {row[0]: row for row in gap_table(read_logs(root)).rows}
    found = rows["QUADS, ours"][2]
    assert found.low < GAPS["ours"] < found.high  # type: ignore[union-attr]
    assert rows["naive | NVFP4"][5:] == [1.3, 2 * 7 * (STEPS + 1)]
    assert rows["QUADS as in the paper"][5] == 0.86 and rows["QUADS, ours"][5] is None  # the paper has no such arm


def test_only_the_order_that_is_broken_fails(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", {**GAPS, "qat": 0.05})
    assert outcomes(root) == ["fails", *["holds"] * 6]


@pytest.mark.parametrize(
    ("arm", "gap", "which"),
    [
        ("ours", 0.025, QAT_OURS),
        ("all", 0.011, OURS_ALL),
        ("bf16", 0.008, ALL_BF16),
        ("uniform", 0.0099, UNIFORM_OURS),
    ],
)
def test_each_order_can_fail(tmp_path: Path, arm: str, gap: float, which: int) -> None:
    assert one(make_root(tmp_path / "root", {**GAPS, arm: gap}), which).outcome == "fails"


def test_means_in_order_with_overlapping_intervals_are_not_apart(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", {**GAPS, "naive": 0.0205}, noise=0.5)
    check = one(root, NAIVE_QAT)
    upper, lower = (float(part.split(" ")[0]) for part in check.detail.split(" against "))
    assert check.outcome == "fails" and upper > lower


def test_ours_below_uniform_by_noise_only_fails(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", {**GAPS, "uniform": 0.0104}, noise=0.5)
    check = one(root, UNIFORM_OURS)
    mean, low = check.detail.split("difference ")[1].split(",")[0].split(" [")
    assert check.outcome == "fails" and float(mean) > 0 > float(low)


def test_a_floor_above_by_noise_only_does_not_fail(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", {**GAPS, "bf16": 0.00605}, noise=0.5)
    assert one(root, ALL_BF16).outcome == "holds"


def test_a_missing_arm_leaves_its_checks_open_and_the_others_stand(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", {k: v for k, v in GAPS.items() if k != "qat"})
    assert outcomes(root) == ["not run", "not run", "holds", "holds", "holds", "holds", "not run"]
    assert "no run of QAT only" in one(root, NAIVE_QAT).detail
    assert one(root, BITS).detail.endswith("no run of qat")


def test_arms_compare_over_the_steps_that_both_have(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    shutil.rmtree(root.run("naive", 1))
    write_run(root, "naive", 1, GAPS["naive"], steps=30)
    for seed in (0, 1):  # far above naive, but only where naive has no step
        rewrite(
            root.run("qat", seed) / "metrics.jsonl",
            lambda row: row.update({f"{GAP}/mean": 9.0}) if row["step"] > 30 else None,
        )
    check = one(root, NAIVE_QAT)
    assert check.outcome == "holds"
    assert "steps 1..30" in check.detail and "unfinished: naive/seed-1 (30)" in check.detail
    assert "60, 30*" in gap_table(read_logs(root)).markdown()


def test_symmetric_is_shown_beside_asymmetric(tmp_path: Path) -> None:
    arms = {**ARMS, "both": {"title": "W4A4 QAT", "recipe": "symmetric"}}
    root = make_root(tmp_path / "root", {"qat": 0.02, "both": 0.03}, arms=arms)
    write_report(root, tmp_path / "out")
    assert "mean gap of symmetric W4A4 QAT is the larger" in (tmp_path / "out/reproduction.md").read_text()
    for seed in (0, 1):
        write_run(root, "both", seed, 0.01)
    write_report(root, tmp_path / "out")
    assert "mean gap of symmetric W4A4 QAT is the smaller" in (tmp_path / "out/reproduction.md").read_text()


def test_a_run_of_a_few_steps_is_not_compared(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", seeds=1)
    shutil.rmtree(root.run("naive", 0))
    write_run(root, "naive", 0, GAPS["naive"], steps=9)
    assert one(root, NAIVE_QAT).outcome == "not run"


def test_one_seed_is_enough_and_seeds_must_meet(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", seeds=1)
    assert outcomes(root) == ["holds"] * 7
    shutil.rmtree(root.run("naive", 0))
    write_run(root, "naive", 1, GAPS["naive"])
    assert "no seed in common" in one(root, NAIVE_QAT).detail


def test_a_torn_last_line_and_unknown_fields_change_nothing(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    write_report(root, tmp_path / "before")
    for file in root.run("ours", 0).glob("*.jsonl"):
        rewrite(file, lambda row: row.update(new_field="text"))
        file.write_text(file.read_text() + '{"step": 61, "rew')
    write_report(root, tmp_path / "after")
    assert content(tmp_path / "before") == content(tmp_path / "after")


def test_pass_at_1_is_compared_after_the_last_step_that_both_were_evaluated(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    for seed in (0, 1):
        run = root.run("ours", seed)
        write_rows(run / "evals.jsonl", [{"step": s, "rewards": rewards(n)} for s, n in ((0, 24), (40, 5), (40, 32))])
    check = one(root, PASS)
    assert check.outcome == "holds" and "0.5 against 0.5 [" in check.detail and "after step 40" in check.detail
    rows = {row[0]: row for row in pass_table(read_logs(root)).rows}
    assert rows["QUADS, ours"][2].mean == 24 / HELDOUT and rows["QUADS, ours"][3] == 40  # type: ignore[union-attr]
    assert rows["FP8"][1] == "unavailable" and rows["FP8"][5] == 72.88
    for seed in (0, 1):
        write_rows(root.run("ours", seed) / "evals.jsonl", [{"step": 40, "rewards": rewards(10)}])
    assert one(root, PASS).outcome == "fails"


@pytest.mark.parametrize("rows", [[refit(0, 3)], [refit(0) | {"rollout": "x"}], [refit(1)], []])
def test_an_audit_that_does_not_prove_equal_weights_fails(tmp_path: Path, rows: list[dict[str, object]]) -> None:
    root = make_root(tmp_path / "root", seeds=1)
    audit = root.run("uniform", 0) / "audit.jsonl"
    write_rows(audit, [*rows, *map(json.loads, audit.read_text().splitlines()[len(rows) or STEPS :])])
    check = one(root, BITS)
    assert check.outcome == "fails" and check.detail.startswith("uniform/seed-0: refit 0")


def test_the_collapse_of_naive_is_found_and_so_is_its_absence(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", seeds=1)
    (row,) = (r for r in departure_table(read_logs(root)).rows if r[0] == "naive | NVFP4")
    assert row[3:5] == ["no", 1]  # the reward stays, the gap is above from the start
    rewrite(root.run("naive", 0) / "metrics.jsonl", lambda row: row.update(reward=0.2) if row["step"] > 40 else None)
    (row,) = (r for r in departure_table(read_logs(root)).rows if r[0] == "naive | NVFP4")
    assert isinstance(row[3], int) and abs(row[3] - 41) <= 4
    write_report(root, tmp_path / "out")
    assert f"below the BF16 arm's band from step {row[3]} on" in (tmp_path / "out/reproduction.md").read_text()


def test_the_report_does_not_depend_on_where_and_when(tmp_path: Path) -> None:
    root = make_root(tmp_path / "here")
    write_report(root, tmp_path / "first")
    root.pack(tmp_path / "logs.tar.gz")
    other = Root.open(tmp_path / "there", config())
    assert len(other.merge(tmp_path / "logs.tar.gz")) == 2 * len(GAPS)
    write_report(other, tmp_path / "second")
    first = content(tmp_path / "first")
    assert first == content(tmp_path / "second")
    assert sum(name.endswith(".png") for name in first) == 6
    assert {name.replace("png", "csv") for name in first if name.endswith(".png")} < first.keys()
    assert all(name in first["reproduction.md"].decode() for name in first if name != "reproduction.md")


def test_a_figure_rests_on_its_csv(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    write_report(root, tmp_path / "out")
    with open(tmp_path / "out/figure_gap.csv", newline="") as f:
        rows = [row for row in csv.DictReader(f) if (row["arm"], row["seed"]) == ("ours", "1")]
    logged = [json.loads(line) for line in (root.run("ours", 1) / "metrics.jsonl").read_text().splitlines()]
    assert [float(row[f"{GAP}/mean"]) for row in rows] == [row[f"{GAP}/mean"] for row in logged]


def test_figures_without_data_go(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    write_report(root, tmp_path / "out")
    root.study.unlink()
    (tmp_path / "out/notes.txt").write_text("the user's own")
    write_report(root, tmp_path / "out")
    names = content(tmp_path / "out").keys()
    assert "figure_ratios.png" not in names and "figure_drift.csv" not in names and "notes.txt" in names


def test_the_study_stands_beside_the_paper(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    rows = ratio_table(read_logs(root)).rows
    assert [(row[1], row[5]) for row in rows if row[0] == "quads, uniform"] == [
        (25.0, 0.901),
        (50.0, 0.854),
        (100.0, 0.759),
    ]
    assert {row[5] for row in rows if row[0] != "quads, uniform"} == {None}
    write_report(root, tmp_path / "out")
    page = (tmp_path / "out/reproduction.md").read_text()
    assert "12 times as far apart as no quantisation of activations does, and further than asymmetric in 2 of 2" in page
    assert "mean gap falls with every RAC ratio, uniform, unsorted: 25 %: 0.0175" in page


def test_roles_follow_settings_not_names() -> None:
    arms = config().arms
    assert [role(arms[name]) for name in ("uniform", "ours", "all")] == ["paper-50", "ours-50", "quads-100"]
    assert role(arms["ours"].model_copy(update={"policy": "uniform"})) == "other"


def test_the_command_line_says_what_failed(tmp_path: Path) -> None:
    make_root(tmp_path / "good")
    words = ["tables", "--out", str(tmp_path / "out"), "--root"]
    done = CliRunner().invoke(app, [*words, str(tmp_path / "good"), "--strict"])
    assert done.exit_code == 0 and done.output.count("holds") == 7
    make_root(tmp_path / "open", {k: v for k, v in GAPS.items() if k != "qat"})
    assert CliRunner().invoke(app, [*words, str(tmp_path / "open")]).exit_code == 0
    strict = CliRunner().invoke(app, [*words, str(tmp_path / "open"), "--strict"])
    assert strict.exception is not None and "3 of 7 checks not met" in str(strict.exception)
    make_root(tmp_path / "bad", {**GAPS, "qat": 0.05})
    failed = CliRunner().invoke(app, [*words, str(tmp_path / "bad")])
    assert getattr(failed.exception, "exit_code", None) == 1
    assert "naive > QAT only" in str(failed.exception)
