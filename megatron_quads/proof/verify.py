"""``quads verify``: every expert weight that the rollout holds is, bit for bit, the weight the trainer multiplies with.

Three readings of each expert weight: the trainer's (its checkpoint, through the layers' own quantiser), the exported
file's (dequantised here) and, with the engine, what vLLM holds after loading that file (of recipe fp8, whose file is in
high precision, the FP8 codes and row scales that it makes of it). All other weights of the file
are compared with the trainer's as stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ..checkpoint.gather import iter_hf_tensors
from ..checkpoint.hf import HFModel, SafetensorsFolder, read_model_config
from ..checkpoint.quantization_config import fp8_layers
from ..digest import differing_bits, require_same_form, tensor_digest
from ..errors import MismatchError, QuadsError
from ..kernels.nvfp4 import reference as nvfp4
from ..rac.metadata import RacMetadata, load_sidecar
from ..rl.held import is_expert, rollout_tensors
from ..rollout.checks import read_quantization_config

EXPERTS_IN_FILE, REST_IN_FILE = "experts: trainer and exported file", "all else: trainer and exported file"
EXPERTS_IN_VLLM = "experts: trainer and vLLM"


def stored_weight(reader: SafetensorsFolder, name: str, dtype: torch.dtype) -> Tensor:
    """The weight that an exported tensor stands for: dequantised when it is packed, else as stored."""
    weight = reader.get(name)
    if weight.dtype != torch.uint8:
        return weight.to(dtype)
    return nvfp4.dequantize(weight, reader.get(name + "_scale"), reader.get(name + "_scale_2"), dtype)


def require_selection(rac: RacMetadata | None, export: Path) -> None:
    """MismatchError unless ``export`` holds the RAC metadata of the trainer checkpoint; None: it says nothing of them."""
    if rac is None:
        return
    found = load_sidecar(export)
    if found != rac:
        held = found.content_hash[:12] if found is not None else "no selection"
        raise MismatchError(
            f"the export's RAC is {held}, that of the trainer's weights {rac.content_hash[:12]}",
            where=str(export),
            do="do not serve it: export the checkpoint again",
        )


def verify_export(
    chunks: Sequence[nn.Module], hf: HFModel, export: Path, *, dtype: torch.dtype, engine: bool, logs: Path
) -> None:
    """Compare the compute weights of the trainer's model with ``export`` and, if asked, with a vLLM engine that loaded it.

    Collective. Rank 0 prints counts; raises MismatchError (exit code 1) on every rank naming the first differing tensor.
    Recipe naive is expected to differ: it is counted and reported, and still an error (the mismatch is the finding).
    """
    rows = {EXPERTS_IN_FILE: [0, 0, 0], REST_IN_FILE: [0, 0, 0]}
    first: str | None = None
    wanted: dict[str, str] = {}
    reader = SafetensorsFolder(export) if dist.get_rank() == 0 else None
    layers = (reader is not None and fp8_layers(read_quantization_config(export), where=str(export))) or []
    fault: QuadsError | None = None
    for name, tensor in iter_hf_tensors(chunks, hf, weights="compute"):
        if reader is None or fault is not None:
            continue
        mine, expert = tensor.detach().cpu(), is_expert(name)
        try:
            if expert:
                wanted |= {key: tensor_digest(t) for key, t in rollout_tensors(name, mine, layers)}
                bits = differing_bits(mine, stored_weight(reader, name, mine.dtype))
            else:
                stored = reader.get(name)
                bits = differing_bits(mine.to(stored.dtype), stored)
        except (QuadsError, ValueError) as e:
            fault = (
                e if isinstance(e, QuadsError) else MismatchError(f"{name}: {e}", where=str(export), do="export again")
            )
            continue
        row = rows[EXPERTS_IN_FILE if expert else REST_IN_FILE]
        row[0], row[1], row[2] = row[0] + 1, row[1] + (bits > 0), row[2] + bits
        if bits and first is None:
            first = name
    if reader is not None and fault is None and engine:
        row, differing = _ask_engine(export, wanted, dtype, logs)
        rows[EXPERTS_IN_VLLM] = row
        first = first or differing
    if reader is not None and fault is None:
        _print(rows)
        if first is not None:
            fault = MismatchError(
                f"{first} differs", where=str(export), do="do not serve it: export the checkpoint again"
            )
    box = [fault]
    dist.broadcast_object_list(box, src=0)
    if box[0] is not None:
        raise box[0]


def _ask_engine(export: Path, wanted: dict[str, str], dtype: torch.dtype, logs: Path) -> tuple[list[int], str | None]:
    from ..rollout.client import LocalRollout

    context = min(read_model_config(export).max_position, 64)
    name = str(dtype).removeprefix("torch.")
    with LocalRollout(
        export, dtype=name, max_model_len=context, max_num_seqs=4, seed=0, log=logs / "verify_rollout.log"
    ) as rollout:
        rollout.assert_active()
        found = rollout.audit()
    if odd := sorted(set(found) ^ set(wanted)):
        raise MismatchError(f"{odd[0]} is held by one side only", where=str(export), do="export the checkpoint again")
    require_same_form(found, where=str(export))
    differing = sorted(n for n in wanted if wanted[n] != found[n])
    return [len(found), len(differing), -1 if differing else 0], differing[0] if differing else None


def _print(rows: dict[str, list[int]]) -> None:
    table = Table("compared", "tensors", "differ", "mismatched bits")
    for name, (tensors, differ, bits) in rows.items():
        table.add_row(name, str(tensors), str(differ), "by digest" if bits < 0 else str(bits))
    Console().print(table)
