"""Logs that tables must not be made of: another run's, another configuration's, broken ones."""

from __future__ import annotations

import json
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
    done = CliRunner().invoke(app, ["status", "--root", str(tmp_path / "root")], env={"COLUMNS": "120"})
    lines = {tuple(line.split()[:2]): line for line in done.output.splitlines() if line.strip()}
    assert "running" in lines["naive", "1"] and "13/60" in lines["naive", "1"]
    assert "done" in lines["naive", "0"] and "60/60" in lines["naive", "0"]
    assert "not run" in lines["ours", "1"] and "unusable" in lines["qat", "0"]
    assert "unavailable" in done.output and "warm checkpoint: there" in done.output
