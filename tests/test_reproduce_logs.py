"""Logs that tables must not be made of: another run's, another configuration's, broken ones."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from reproduce_helpers import config, make_root, write_run
from typer.testing import CliRunner

from megatron_quads.errors import QuadsError
from megatron_quads.reproduce.cli import app
from megatron_quads.reproduce.folder import Root
from megatron_quads.reproduce.logs import read_logs
from megatron_quads.reproduce.report import write_report


def test_logs_of_something_else_are_refused(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    bound = root.run("ours", 0) / "arm.json"
    kept = bound.read_text()
    for change, what in (
        ({"config": "feed"}, "config is 'feed'"),
        ({"seed": 1}, "seed is 1"),
        ({"arm": "qat"}, "arm is 'qat'"),
        ({"warm": "feed"}, "warm checkpoint feed"),
    ):
        bound.write_text(json.dumps({**json.loads(kept), **change}))
        with pytest.raises(QuadsError, match=what):
            write_report(root, tmp_path / "out")
    bound.unlink()
    with pytest.raises(QuadsError, match=r"without arm\.json"):
        write_report(root, tmp_path / "out")
    bound.write_text(kept)
    study = json.loads(root.study.read_text())
    root.study.write_text(json.dumps({**study, "config": "feed"}))
    with pytest.raises(QuadsError, match="study of configuration feed"):
        write_report(root, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_broken_logs_are_refused_by_name_of_file_and_step(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", seeds=1)
    metrics = root.run("ours", 0) / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    for broken, what in (
        (lines[:4] + lines[5:], "step 5 is missing"),
        ([*lines[:4], lines[4].replace('"reward": 0.', '"reward": NaN, "x": 0.'), *lines[5:]], "step 5: reward is nan"),
        (["{\n", *lines], "line is not JSON"),
        (lines[:-1], "59 steps logged"),
    ):
        metrics.write_text("".join(broken))
        with pytest.raises(QuadsError, match=what) as caught:
            read_logs(root)
        assert str(metrics) in str(caught.value)


def test_merge_refuses_logs_of_another_configuration(tmp_path: Path) -> None:
    make_root(tmp_path / "here", seeds=1).pack(tmp_path / "logs.tar.gz")
    other = Root.open(tmp_path / "there", config(seed=1))
    with pytest.raises(QuadsError, match="logs of configuration"):
        other.merge(tmp_path / "logs.tar.gz")


def test_status_shows_progress_and_what_cannot_be_used(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", seeds=1)
    write_run(root, "naive", 1, 0.03, steps=13)
    bound = root.run("qat", 0) / "arm.json"
    bound.write_text(bound.read_text().replace(root.config.arm_hash("qat"), "feed"))
    command = ["status", "--root", str(tmp_path / "root")]
    with root.run_lock("naive", 1):
        done = CliRunner().invoke(app, command, env={"COLUMNS": "120"})
    lines = {tuple(line.split()[:2]): line for line in done.output.splitlines() if line.strip()}
    assert "killed; goes on" in CliRunner().invoke(app, command, env={"COLUMNS": "120"}).output
    assert "running" in lines["naive", "1"] and "killed" not in done.output and "13/60" in lines["naive", "1"]
    assert "done" in lines["naive", "0"] and "60/60" in lines["naive", "0"]
    assert "not run" in lines["ours", "1"] and "unusable" in lines["qat", "0"]
    assert "unavailable" in done.output and "warm checkpoint: there" in done.output


def test_an_archive_that_was_cut_off_is_named(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    whole, cut = tmp_path / "logs.tar.gz", tmp_path / "cut.tar.gz"
    root.pack(whole)
    for size in (whole.stat().st_size // 2, 40, 5):
        cut.write_bytes(whole.read_bytes()[:size])
        done = CliRunner().invoke(app, ["merge", str(cut), "--root", str(tmp_path / "new")])
        assert isinstance(done.exception, QuadsError) and "cannot read" in str(done.exception), done.output
    assert not (tmp_path / "new" / "reproduce.json").exists()


def test_a_new_folder_gets_the_archives_configuration(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    root.pack(tmp_path / "logs.tar.gz")
    done = CliRunner().invoke(app, ["merge", str(tmp_path / "logs.tar.gz"), "--root", str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    new = Root.read(tmp_path / "new")
    assert new.config == root.config
    assert [new.state(*run) for run in new.runs()] == [root.state(*run) for run in root.runs()]


def test_a_command_on_no_reproduction_makes_none(tmp_path: Path) -> None:
    for command in (["run", "--arm", "naive"], ["study"], ["status"], ["pack", "--out", str(tmp_path / "x.tar.gz")]):
        done = CliRunner().invoke(app, [*command, "--root", str(tmp_path / "typo")])
        assert "no reproduction here" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_settings_that_changed_and_seeds_that_no_table_has_are_named(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    changed = root.config.model_copy(update={"rl": root.config.rl.model_copy(update={"lr": 0.125})})
    with pytest.raises(QuadsError, match=rf"rl\.lr was {root.config.rl.lr} and is now 0\.125"):
        Root.open(root.path, changed)
    arm, count = next((n, a.seeds) for n, a in root.config.arms.items() if a.unavailable is None)
    done = CliRunner().invoke(app, ["run", "--root", str(root.path), "--arm", arm, "--seed", str(count)])
    assert f"arm {arm} has seeds 0 to {count - 1}" in str(done.exception)


def test_an_archive_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, out = make_root(tmp_path / "root"), tmp_path / "out"
    out.mkdir()
    with pytest.raises(QuadsError, match="is a folder"):
        root.pack(out)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(QuadsError, match="No space left"):
        root.pack(out / "logs.tar.gz")
    assert list(out.iterdir()) == []


def test_an_archive_tells_nothing_of_where_it_was_made(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", seeds=1)
    for arm in ("bf16", "ours"):
        settings = {"rl": {"model": f"{tmp_path}/m", "out": f"{tmp_path}/o", "steps": 3}, "version": "1"}
        (root.run(arm, 0) / "run.json").write_text(json.dumps(settings))
    root.pack(tmp_path / "logs.tar.gz")
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        archive.extractall(tmp_path / "there", filter="data")
    for arm, model in (("bf16", "warm"), ("ours", "bases/adaptive-sorted-0.5")):
        held = json.loads((tmp_path / "there" / "arms" / arm / "seed-0" / "run.json").read_text())
        assert held == {"rl": {"model": model, "out": f"arms/{arm}/seed-0", "steps": 3}, "version": "1"}
    files = [f for f in (tmp_path / "there").rglob("*") if f.is_file()]
    assert files and not any(str(tmp_path).encode() in f.read_bytes() for f in files)
    assert str(tmp_path) in (root.run("ours", 0) / "run.json").read_text()  # the run itself stays as it is


def test_a_damaged_run_is_not_done_and_an_archive_mends_it(tmp_path: Path) -> None:
    root, archive = make_root(tmp_path / "root"), tmp_path / "logs.tar.gz"
    root.pack(archive)
    arm, seed = next(iter(root.runs()))
    log = root.run(arm, seed) / "metrics.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole[:-40])
    with pytest.raises(QuadsError, match="steps logged"):
        read_logs(root)
    assert f"{arm}/seed-{seed}" in root.merge(archive)
    assert log.read_bytes() == whole and root.merge(archive) == []
