"""The command line: help with examples, one line and exit code 2 on bad input, doctor, configuration, atomic output."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_quads import atomic, doctor, jobs
from megatron_quads.cli import app
from megatron_quads.config import QuadsConfig
from megatron_quads.errors import MismatchError, QuadsError
from megatron_quads.launch.local import run_ranks
from megatron_quads.proof.compare import compare, require_sound_audit, summarise
from megatron_quads.rac.metadata import SIDECAR, GemmSelection, LayerSelection, ModelShape, RacMetadata
from megatron_quads.rl.runfolder import RunFolder

COMMANDS = ("rl", "compare", "export", "calibrate", "verify", "analyze", "doctor", "demo")


def quads(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_quads.cli", *map(str, words)], capture_output=True, text=True, timeout=300
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a refusal."""
    assert done.returncode == 2, done
    lines = [x for x in done.stderr.strip().splitlines() if x.startswith("quads: error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    found = CliRunner().invoke(app, [command, "--help"])
    assert found.exit_code == 0
    assert f"Example:  quads {command}" in found.output


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"recipe": "int3"}, "unknown recipe 'int3' [--quads-recipe]; choose one of bf16"),
        ({"rac_ratio": 1.5}, "ratio 1.5 is outside 0..1 [--quads-rac-ratio]"),
        ({"keep_first_layers": -1}, "cannot be negative"),
        ({"static_headroom": 0.5}, "below 1"),
    ],
)
def test_configuration_is_checked(values: dict, said: str) -> None:
    with pytest.raises(QuadsError) as e:
        QuadsConfig(**values)
    assert said in str(e.value)


def test_boundary_layers_and_pattern_decide_what_is_quantised() -> None:
    assert QuadsConfig(keep_first_layers=1, keep_last_layers=2).quantized_layers(6) == [1, 2, 3]
    assert QuadsConfig(module_pattern="model.layers.[01].mlp.experts.*").quantized_layers(6) == [0, 1]
    with pytest.raises(QuadsError, match="matches no layer of 2"):
        QuadsConfig(keep_first_layers=2).quantized_layers(2)


@pytest.mark.slow
def test_refusals_of_rank_processes_reach_the_user(tiny_hf: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = refused(quads("export", "--model", tiny_hf, "--out", out, "--quads-recipe", "int3"))
    assert "unknown recipe 'int3'" in line
    line = refused(quads("export", "--model", tiny_hf, "--out", out, "--quads-recipe", "quads"))
    assert "recipe quads needs RAC metadata" in line and "quads calibrate" in line
    line = refused(
        quads(
            "export",
            "--model",
            tiny_hf,
            "--out",
            out,
            "--quads-recipe",
            "qat",
            "--nproc",
            "3",
            "--expert-model-parallel-size",
            "3",
        )
    )
    assert "8 experts cannot be divided over 3" in line
    assert not out.exists()


def test_prompt_files_are_checked_before_anything_starts(tiny_hf: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    words = ("calibrate", "--model", tiny_hf, "--prompts", prompts, "--out", tmp_path / "out")
    assert "cannot read" in refused(quads(*words))
    prompts.write_text("\n")
    assert f"no prompts [{prompts}]" in refused(quads(*words))
    prompts.write_text('{"prompt": "t5"}\nnonsense\n')
    assert f"{prompts}:2" in refused(quads(*words))
    prompts.write_text(json.dumps({"tokens": [5] * 10_000}))
    assert f"10000 tokens do not fit a context of 512 [{prompts}:1]" in refused(quads(*words))
    other = tmp_path / "llama"
    shutil.copytree(tiny_hf, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    line = refused(quads("calibrate", "--model", other, "--prompts", prompts, "--out", tmp_path / "out"))
    assert "model_type 'llama' is not supported" in line
    assert not (tmp_path / "out").exists()


def test_a_run_folder_belongs_to_one_process(tmp_path: Path) -> None:
    first = RunFolder(tmp_path / "run")
    first.acquire(resume=False)
    with pytest.raises(QuadsError, match="in use by another process"):
        RunFolder(tmp_path / "run").acquire(resume=False)
    first.release()
    with pytest.raises(QuadsError, match="nothing to resume"):
        RunFolder(tmp_path / "run").acquire(resume=True)
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(QuadsError, match="already holds a run"):
        RunFolder(tmp_path / "run").acquire(resume=False)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}')
    RunFolder(tmp_path / "run").abandon()  # a run that began is never forgotten
    assert (tmp_path / "run" / "run.json").exists()
    (tmp_path / "file").touch()
    with pytest.raises(QuadsError, match=r"cannot create folder: Not a directory"):
        RunFolder(tmp_path / "file" / "run").acquire(resume=False)


def metadata() -> RacMetadata:
    shape = ModelShape(model_type="qwen3_moe", num_layers=1, num_experts=2, hidden_size=32, moe_intermediate_size=32)
    layer = LayerSelection(gate_up=GemmSelection(blocks=[1]), down=GemmSelection(prefix=1))
    return RacMetadata(
        model=shape, activation_scale="token", policy="uniform", ratio=0.5, sorted=True, layers={0: layer}
    )


def checkpoint(folder: Path, config_block: dict | None, sidecar: dict | None) -> Path:
    folder.mkdir()
    quantization = {"quant_method": "modelopt", **({"rac": config_block} if config_block else {})}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    if sidecar:
        (folder / SIDECAR).write_text(json.dumps(sidecar))
    (folder / atomic.MARKER).write_text("{}")
    return folder


def test_doctor_sees_a_checkpoint_that_would_lose_its_rac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = metadata().to_block()
    assert doctor.report(checkpoint(tmp_path / "good", block, block))
    assert not doctor.report(checkpoint(tmp_path / "lost", None, block))
    assert not doctor.report(checkpoint(tmp_path / "edited", {**block, "ratio": 0.25}, block))
    assert not doctor.report(checkpoint(tmp_path / "bare", block, None))
    half = checkpoint(tmp_path / "half", block, block)
    (half / atomic.MARKER).unlink()
    assert not doctor.report(half)
    monkeypatch.setenv("VLLM_PLUGINS", "something_else")
    assert not doctor.report(tmp_path / "good")


def test_metadata_survives_a_round_trip_and_nothing_else_does() -> None:
    block = json.loads(json.dumps(metadata().to_block()))
    assert RacMetadata.from_block(block, where="x") == metadata()
    for change, said in (
        ({"schema_version": 2}, "schema version 2, this build reads 1"),
        ({"ratio": 0.25}, "does not match its content"),
        ({"ratio": 7}, "malformed at ratio"),
        ({"surprise": 1}, "malformed at surprise"),
    ):
        with pytest.raises(QuadsError, match=said):
            RacMetadata.from_block({**block, **change}, where="x")
    shape = metadata().model.model_copy(update={"num_experts": 4})
    with pytest.raises(QuadsError, match="made for num_experts=2, the checkpoint has 4"):
        metadata().require_model(shape, where="x")


def test_atomic_folder_keeps_the_old_one_on_any_fault(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with atomic.folder(target) as aside:
        (aside / "a").write_text("old")
    with pytest.raises(QuadsError, match="No space left"), atomic.folder(target) as aside:
        (aside / "a").write_text("new")
        raise OSError(28, "No space left on device")
    with pytest.raises(KeyboardInterrupt), atomic.folder(target) as aside:
        raise KeyboardInterrupt
    assert (target / "a").read_text() == "old" and atomic.is_committed(target)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with atomic.folder(target) as aside:
        (aside / "b").write_text("new")
    assert sorted(p.name for p in target.iterdir()) == [atomic.MARKER, "b"]


def test_launcher_keeps_the_failing_ranks_code_and_line(tmp_path: Path) -> None:
    program = "import os,sys,time\nif os.environ['RANK']=='1':\n print('quads: error: bad shard [x]; fetch it',file=sys.stderr); sys.exit({code})\ntime.sleep(60)"
    for code in (1, 2):
        with pytest.raises(QuadsError, match=r"^bad shard \[x\]; fetch it$") as e:
            run_ranks([sys.executable, "-c", program.format(code=code)], nproc=2, logs=tmp_path)
        assert e.value.exit_code == code
    with pytest.raises(QuadsError, match="cannot create folder: Not a directory"):
        run_ranks([sys.executable, "-c", ""], nproc=1, logs=Path(__file__) / "logs")
    crash = f"import os,time\nif os.environ['RANK']=='0': os.kill(os.getpid(), {int(signal.SIGKILL)})\ntime.sleep(60)"
    with pytest.raises(QuadsError, match=r"rank 0 was killed by SIGKILL \["):
        run_ranks([sys.executable, "-c", crash], nproc=2, logs=tmp_path)


def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    rank = "import os,time\nfrom megatron_quads.launch.local import end_with_launcher\nend_with_launcher()\nopen(os.environ['RANK'], 'w').write(str(os.getpid()))\ntime.sleep(120)"
    program = f"import sys\nfrom pathlib import Path\nfrom megatron_quads.launch.local import run_ranks\nrun_ranks([sys.executable, '-c', {rank!r}], nproc=2, logs=Path('logs'))"
    launcher = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    files = [tmp_path / "0", tmp_path / "1"]
    deadline = time.monotonic() + 60
    while not all(f.exists() and f.read_text() for f in files):
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    pids = [int(f.read_text()) for f in files]
    while any(Path(f"/proc/{p}/exe").exists() for p in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def fake_run(folder: Path, recipe: str, seed: int = 0) -> Path:
    """A finished run's records; numbers by hand."""
    folder.mkdir()
    rl = {
        "task": "t",
        "task_config": {},
        "seed": seed,
        "steps": 2,
        "prompts_per_step": 1,
        "samples_per_prompt": 2,
        "temperature": 1.0,
        "heldout": 4,
    }
    (folder / "run.json").write_text(json.dumps({"rl": rl, "quads": {"recipe": recipe}}))
    (folder / "status.json").write_text(
        json.dumps({"state": "done", "step": 2, "reward_before": 0.25, "reward_after": 0.5})
    )
    gap = "train_rollout_logprob_abs_diff"
    rows = [
        {"step": 1, f"{gap}/mean": 0.1, f"{gap}/max": 0.5, "tokens": 10, "tokens_per_s": 100.0, "reward": 0.3},
        {"step": 2, f"{gap}/mean": 0.4, f"{gap}/max": 0.4, "tokens": 30, "tokens_per_s": 50.0, "reward": 0.4},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    audit = [{"step": i, "tensors": 6, "bits_mismatched": 7} for i in range(3)]
    (folder / "audit.jsonl").write_text("".join(json.dumps(r) + "\n" for r in audit))
    return folder


def test_compare_weighs_tokens_and_refuses_unlike_runs(tmp_path: Path) -> None:
    a, b = fake_run(tmp_path / "a", "qat"), fake_run(tmp_path / "b", "quads")
    assert summarise(a) == pytest.approx(
        {
            "arm": "qat",
            "gap_mean": (0.1 * 10 + 0.4 * 30) / 40,
            "gap_max": 0.5,
            "weight_bits_mismatched": 21,
            "reward_before": 0.25,
            "reward_after": 0.5,
            "tokens_per_s": 40 / (10 / 100 + 30 / 50),
        }
    )
    compare([a, b], tmp_path / "table")
    assert [r["arm"] for r in json.loads((tmp_path / "table" / "compare.json").read_text())] == ["qat", "quads"]
    assert (tmp_path / "table" / "compare.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(QuadsError, match="seed is 1, the first run has 0"):
        compare([a, fake_run(tmp_path / "c", "quads", seed=1)], tmp_path / "table")
    (b / "status.json").write_text(json.dumps({"state": "failed", "step": 1}))
    with pytest.raises(QuadsError, match="the run is failed"):
        compare([a, b], tmp_path / "table")


def test_an_audit_must_be_whole_and_agree_with_itself(tmp_path: Path) -> None:
    good = [
        {"step": i, "tensors": 6, "tensors_differing": 0, "bits_mismatched": 0, "trainer": f"{i}", "rollout": f"{i}"}
        for i in range(3)
    ]
    require_sound_audit(good, 2, tmp_path, may_differ=False)
    differs = {**good[1], "tensors_differing": 1, "bits_mismatched": 9, "rollout": "x"}
    require_sound_audit([good[0], differs, good[2]], 2, tmp_path, may_differ=True)
    for rows, said in (
        (good[:2], "refit 2 is missing"),
        ([good[0], good[2]], "refit 1 is missing"),
        ([good[0], {**good[1], "trainer": "x"}, good[2]], "refit 1: digests and counts"),
        ([good[0], differs, good[2]], "refit 1 had 9 mismatched bits"),
    ):
        with pytest.raises(MismatchError, match=said):
            require_sound_audit(rows, 2, tmp_path, may_differ=False)


def test_outputs_are_not_replaced_unasked_and_flags_are_checked_first(tiny_hf: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").touch()
    assert "--out exists already" in refused(quads("export", "--model", tiny_hf, "--out", out))
    words = ("calibrate", "--model", tiny_hf, "--prompts", tmp_path / "p", "--out", out)
    assert "--out exists already" in refused(quads(*words))
    words = ("export", "--model", tiny_hf, "--out", tmp_path / "new")
    assert "invalid float value" in refused(quads(*words, "--quads-rac-ratio", "half"))
    assert "ratio nan is outside" in refused(quads(*words, "--quads-rac-ratio", "nan"))
    assert not (tmp_path / "new.logs").exists()  # no rank was started


def test_proofs_drop_the_layout_of_the_run() -> None:
    argv = [
        "--lr",
        "1",
        "--expert-model-parallel-size",
        "2",
        "--tensor-model-parallel-size=2",
        "--quads-recipe",
        "quads",
    ]
    assert jobs.without_layout(argv) == ["--lr", "1", "--quads-recipe", "quads"]


def test_jobs_run_in_place_under_a_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[jobs.Job] = []
    monkeypatch.setitem(jobs.JOBS, "export", seen.append)
    monkeypatch.setenv("RANK", "0")
    jobs.launch("export", {"a": 1}, ["--lr", "1"], nproc=8, logs=tmp_path)
    assert seen == [jobs.Job({"a": 1}, ["--lr", "1"])]
    assert os.environ["RANK"] == "0"
