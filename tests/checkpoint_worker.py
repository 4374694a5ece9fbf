"""One rank of the test_checkpoint_*.py tests: ``checkpoint_worker.py JOB HF OUT [MEGATRON FLAGS]``.

HF is a folder of checkpoints made by the test. Rank r writes OUT/result-r.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def loaded(hf_path: Path, flags: list[str], quads: QuadsConfig = QUADS) -> tuple[HFModel, list[nn.Module]]:
    """A model holding the checkpoint."""
    hf, _, chunks = start(hf_path, flags, quads)
    load_hf(chunks, hf)
    return hf, chunks


def refusal(action: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The QuadsError's line."""
    try:
        action(*args, **kwargs)
    except QuadsError as e:
        return str(e)
    return "accepted"


def layout(root: Path, out: Path, flags: list[str]) -> dict[str, Any]:
    """Load, go back, score, export in BF16 and packed, compare the export with what the trainer multiplies with."""
    result: dict[str, Any] = {"order": [], "differ": []}
    on_cpu_with_stages = "--pipeline-model-parallel-size" in flags and not torch.cuda.is_available()
    for name in ("tiny",) if on_cpu_with_stages else ("tiny", "tied"):
        hf, args, chunks = start(root / name, flags, BF16)
        load_hf(chunks, hf)
        source = SafetensorsFolder(root / name)
        for key, tensor in iter_hf_tensors(chunks, hf):
            result["order"].append(key)
            if not torch.equal(tensor, source.get(key)):
                result["differ"].append(f"{name} {key}")
        logprobs, _ = token_logprobs(chunks, torch.load(root / "tokens.pt"), args)
        if dist.get_rank() == 0:
            torch.save(logprobs, out / f"{name}.pt")
        export_hf(chunks, hf, BF16, out / f"{name}-bf16", rac=None, dtype=torch.bfloat16, shard_bytes=SHARD_BYTES)
    stops_early(chunks, hf)

    hf, chunks = loaded(root / "tiny", flags)
    rac = tiny_rac(hf.shape)
    report = export_hf(
        chunks,
        hf,
        QUADS,
        out / "packed",
        rac=rac,
        dtype=torch.float32,
        extra_marker={"version": 3},
        shard_bytes=SHARD_BYTES,
    )
    result |= {"files": list(report.files), "packed": report.packed}
    result["compared"], result["compute_differ"] = compare_compute(chunks, hf, out / "packed")
    return result


def stops_early(chunks: list[nn.Module], hf: HFModel) -> None:
    """Rank 0 leaves the stream after one tensor; all ranks must still be in step (else this hangs)."""
    for _ in iter_hf_tensors(chunks, hf):
        break
    dist.barrier()


def compare_compute(chunks: list[nn.Module], hf: HFModel, folder: Path) -> tuple[int, list[str]]:
    """(quantised weights compared, those where the export does not dequantise to what the trainer multiplies with)."""
    count, differ = 0, []
    reader = SafetensorsFolder(folder)
    for name, tensor in iter_hf_tensors(chunks, hf, weights="compute"):
        if ".experts." not in name:
            continue
        stem = name.removesuffix(".weight")
        codes, scales, scale = (reader.get(n) for n in (name, f"{stem}.weight_scale", f"{stem}.weight_scale_2"))
        value = nvfp4.dequantize(codes, scales, scale, tensor.dtype)
        count += 1
        if not torch.equal(value.view(torch.int32), tensor.view(torch.int32)):
            differ.append(name)
    return count, differ


def faults(root: Path, out: Path, flags: list[str]) -> dict[str, Any]:
    """Bad checkpoints, and exports that must be refused before anything is written."""
    said: dict[str, Any] = {}
    for name in ("nan", "missing", "truncated", "misshapen", "quantised"):
        said[name] = refusal(loaded, root / name, flags, BF16)
    hf, chunks = loaded(root / "odd", flags, BF16)
    export_hf(chunks, hf, BF16, out / "odd", rac=None, dtype=torch.float32)
    qat = QuadsConfig(recipe="qat")
    said["odd"] = refusal(export_hf, chunks, hf, qat, out / "odd", rac=None, dtype=torch.float32)

    hf, chunks = loaded(root / "tiny", flags)
    rac = tiny_rac(hf.shape)
    foreign = rac.model_copy(update={"model": hf.shape.model_copy(update={"num_experts": 16})})
    partial = rac.model_copy(update={"layers": {0: rac.layers[0]}})
    stranger = out / "stranger"
    stranger.mkdir()
    (stranger / "thesis.tex").write_text("do not delete")
    for name, quads, meta, folder in (
        ("no rac", QUADS, None, out / "new"),
        ("rac without recipe", qat, rac, out / "new"),
        ("other model", QUADS, foreign, out / "new"),
        ("other layers", QUADS, partial, out / "new"),
        ("source", qat, None, root / "tiny"),
        ("stranger", qat, None, stranger),
    ):
        said[name] = refusal(export_hf, chunks, hf, quads, folder, rac=meta, dtype=torch.float32)
    kept = QuadsConfig(recipe="qat", keep_first_layers=1, activation_scale="tensor")
    export_hf(chunks, hf, kept, out / "kept", rac=None, dtype=torch.bfloat16)
    return said


def interrupted(root: Path, out: Path, flags: list[str]) -> dict[str, Any]:
    """With several ranks, after a good export: an expert gone NaN on the last rank, then a full disk on rank 0."""
    hf, chunks = loaded(root / "tiny", flags)
    rac = tiny_rac(hf.shape)
    export_hf(chunks, hf, QUADS, out / "export", rac=rac, dtype=torch.float32)
    weight = [p for n, p in chunks[0].named_parameters() if n.endswith("linear_fc2.weight")][-1]
    was = weight.data[3, 5].item()
    if dist.get_rank() == dist.get_world_size() - 1:
        weight.data[3, 5] = float("nan")
    said = {"nan": refusal(export_hf, chunks, hf, QUADS, out / "export", rac=rac, dtype=torch.float32)}
    weight.data[3, 5] = was
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    said["full"] = refusal(export_hf, chunks, hf, QUADS, out / "export", rac=rac, dtype=torch.float32)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return said


def stall(root: Path, out: Path, flags: list[str]) -> dict[str, Any]:
    """Export into ``out``, stopping in the middle of the second time for the test to kill this process."""
    hf, chunks = loaded(root / "tiny", flags)
    rac = tiny_rac(hf.shape)
    export_hf(chunks, hf, QUADS, out / "export", rac=rac, dtype=torch.float32)
    write, left = StreamWriter.write, 100

    def slow(self: StreamWriter, name: str, tensor: torch.Tensor) -> None:
        nonlocal left
        left -= 1
        if not left:
            (out / "half-way").touch()
            time.sleep(600)
        write(self, name, tensor)

    StreamWriter.write = slow  # type: ignore[method-assign]
    export_hf(chunks, hf, QUADS, out / "export", rac=rac, dtype=torch.float32)
    return {}


if __name__ == "__main__":
    job, root_arg, out_arg, *rest = sys.argv[1:]
    try:
        answer = globals()[job](Path(root_arg), Path(out_arg), rest)
        (Path(out_arg) / f"result-{dist.get_rank()}.json").write_text(json.dumps(answer))
    finally:
        runtime.shutdown()
