"""One rank of the test_checkpoint_*.py tests: ``checkpoint_worker.py JOB HF OUT [MEGATRON FLAGS]``.

Rank 0 of job ``layout`` writes OUT/result.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from helpers import tiny_rac
from torch import nn

from megatron_quads.checkpoint.export import export_hf
from megatron_quads.checkpoint.gather import iter_hf_tensors
from megatron_quads.checkpoint.hf import HFModel, SafetensorsFolder, read_model_config
from megatron_quads.checkpoint.load import load_hf
from megatron_quads.checkpoint.stream import StreamWriter
from megatron_quads.config import QuadsConfig
from megatron_quads.errors import QuadsError
from megatron_quads.kernels import nvfp4
from megatron_quads.trainer import runtime
from megatron_quads.trainer.args import parse_args
from megatron_quads.trainer.logprobs import token_logprobs
from megatron_quads.trainer.model import build

QUADS = QuadsConfig(recipe="quads", rac_policy="uniform", rac_ratio=0.5)
BF16 = QuadsConfig(recipe="bf16")
SHARD_BYTES = 400_000  # several shards even for the tiny model


def start(
    hf_path: Path, flags: list[str], quads: QuadsConfig = QUADS
) -> tuple[HFModel, argparse.Namespace, list[nn.Module]]:
    """A running job and a freshly built, unloaded model."""
    hf = read_model_config(hf_path)
    args = parse_args(["--quads-recipe", quads.recipe, *flags], hf)
    runtime.initialize(args)
    return hf, args, build(args, hf, quads)


def layout(hf_path: Path, out: Path, flags: list[str]) -> None:
    """Load, go back, score, export in fp32 and BF16, compare the export with what the trainer multiplies with."""
    hf, args, chunks = start(hf_path, flags, BF16)
    load_hf(chunks, hf)
    source = SafetensorsFolder(hf_path)
    got = [(n, t.clone()) for n, t in iter_hf_tensors(chunks, hf)]
    result: dict = {"order": [n for n, _ in got]}
    result["differ"] = [n for n, t in got if not torch.equal(t, source.get(n))]
    logprobs, _ = token_logprobs(chunks, torch.load(out / "tokens.pt"), args)
    export_hf(chunks, hf, BF16, out / "plain", rac=None, dtype=torch.bfloat16, shard_bytes=SHARD_BYTES)
    result["early"] = stops_early(chunks, hf)

    chunks = build(args, hf, QUADS)
    load_hf(chunks, hf)
    report = export_hf(
        chunks,
        hf,
        QUADS,
        out / "packed",
        rac=tiny_rac(hf.shape),
        dtype=torch.float32,
        extra_marker={"version": 3},
        shard_bytes=SHARD_BYTES,
    )
    result["files"], result["packed"] = list(report.files), report.packed
    result["compute"], result["compute_differ"] = compare_compute(chunks, hf, out / "packed")
    if dist.get_rank() == 0:
        torch.save(logprobs, out / "logprobs.pt")
        (out / "result.json").write_text(json.dumps(result))


def stops_early(chunks: list[nn.Module], hf: HFModel) -> bool:
    """Rank 0 leaves the stream after one tensor; then all ranks must still be in step."""
    for _ in iter_hf_tensors(chunks, hf):
        break
    dist.barrier()
    return True


def compare_compute(chunks: list[nn.Module], hf: HFModel, folder: Path) -> tuple[int, list[str]]:
    """(quantised weights compared, those where the export does not dequantise to what the trainer multiplies with)."""
    count, differ = 0, []
    # not opened before rank 0's export ended: export_hf is collective
    reader = SafetensorsFolder(folder)
    for name, tensor in iter_hf_tensors(chunks, hf, weights="compute"):
        if ".experts." not in name:
            continue
        stem = name.removesuffix(".weight")
        parts = [reader.get(n) for n in (name, f"{stem}.weight_scale", f"{stem}.weight_scale_2")]
        value = nvfp4.dequantize(*parts, tensor.dtype)
        count += 1
        if not torch.equal(value.view(torch.int32), tensor.view(torch.int32)):
            differ.append(name)
    return count, differ


def bad_load(hf_path: Path, out: Path, flags: list[str]) -> None:
    """Load a broken checkpoint; the model is built from its (sound) config.json."""
    hf, _, chunks = start(hf_path, flags, BF16)
    load_hf(chunks, hf)


def full_disk(hf_path: Path, out: Path, flags: list[str]) -> None:
    """Export into ``out`` when no file may grow beyond 200 kB."""
    hf, _, chunks = start(hf_path, flags)
    load_hf(chunks, hf)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    export_hf(chunks, hf, QUADS, out, rac=tiny_rac(hf.shape), dtype=torch.float32)


def stall(hf_path: Path, out: Path, flags: list[str]) -> None:
    """Export into ``out``, stopping in the middle for the test to kill this process."""
    hf, _, chunks = start(hf_path, flags)
    load_hf(chunks, hf)
    write, left = StreamWriter.write, 100

    def slow(self: StreamWriter, name: str, tensor: torch.Tensor) -> None:
        nonlocal left
        left -= 1
        if not left:
            print("half-way", flush=True)
            time.sleep(600)
        write(self, name, tensor)

    StreamWriter.write = slow  # type: ignore[method-assign]
    export_hf(chunks, hf, QUADS, out, rac=tiny_rac(hf.shape), dtype=torch.float32)


def nan_export(hf_path: Path, out: Path, flags: list[str]) -> None:
    """Export a model whose last rank's last expert weight went NaN in training."""
    hf, _, chunks = start(hf_path, flags)
    load_hf(chunks, hf)
    if dist.get_rank() == dist.get_world_size() - 1:
        name, last = [(n, p) for n, p in chunks[0].named_parameters() if n.endswith("linear_fc2.weight")][-1]
        last.data[3, 5] = float("nan")
    export_hf(chunks, hf, QUADS, out, rac=tiny_rac(hf.shape), dtype=torch.float32)


def odd_k(hf_path: Path, out: Path, flags: list[str]) -> None:
    """NVFP4 export of a model whose moe_intermediate_size is no multiple of 16."""
    hf, _, chunks = start(hf_path, flags, BF16)
    load_hf(chunks, hf)
    export_hf(chunks, hf, BF16, out, rac=None, dtype=torch.float32)
    export_hf(chunks, hf, QuadsConfig(recipe="qat"), out, rac=None, dtype=torch.float32)


def refusals(hf_path: Path, out: Path, flags: list[str]) -> None:
    """Exports that must be refused before anything is written; rank 0 writes OUT/result.json."""
    hf, _, chunks = start(hf_path, flags, BF16)
    load_hf(chunks, hf)
    rac = tiny_rac(hf.shape)
    foreign = rac.model_copy(update={"model": hf.shape.model_copy(update={"num_experts": 16})})
    partial = rac.model_copy(update={"layers": {0: rac.layers[0]}})
    qat = QuadsConfig(recipe="qat")
    stranger = out / "stranger"
    stranger.mkdir()
    (stranger / "thesis.tex").write_text("do not delete")
    errors = {}
    for key, quads, meta, folder in (
        ("no rac", QUADS, None, out / "new"),
        ("rac without recipe", qat, rac, out / "new"),
        ("other model", QUADS, foreign, out / "new"),
        ("other layers", QUADS, partial, out / "new"),
        ("source", qat, None, hf_path),
        ("stranger", qat, None, stranger),
    ):
        try:
            export_hf(chunks, hf, quads, folder, rac=meta, dtype=torch.float32)
            errors[key] = "accepted"
        except QuadsError as e:
            errors[key] = str(e)
    kept = QuadsConfig(recipe="qat", keep_first_layers=1)
    export_hf(chunks, hf, kept, out / "kept", rac=None, dtype=torch.float32)
    (out / "result.json").write_text(json.dumps(errors))


if __name__ == "__main__":
    job, hf_path, out, *flags = sys.argv[1:]
    try:
        globals()[job](Path(hf_path), Path(out), flags)
    except QuadsError as e:
        print(f"QuadsError: {e}", file=sys.stderr)
        sys.exit(e.exit_code)
    finally:
        runtime.shutdown()
