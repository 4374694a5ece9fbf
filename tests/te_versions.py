"""The expert layers of a Transformer Engine that cannot run here, on a CPU: ``te_versions.py UNPACKED_WHEEL``. Run by hand.

    pip download --no-deps -d /tmp/te transformer-engine==2.16.0
    python -m zipfile -e /tmp/te/transformer_engine-2.16.0-py3-none-any.whl /tmp/te/2.16.0
    python tests/te_versions.py /tmp/te/2.16.0

The wheel holds all of its Python. That runs as it is, with a stub for the compiled part, torch's product for its GEMMs, and
two lines changed in a copy (they ask for CUDA tensors). GroupedLinear and Linear with substituted weights are compared with
the same layer holding the quantised ones: outputs and gradients of three micro-batches in flight, bit for bit.
"""

from __future__ import annotations

import enum
import importlib
import itertools
import os
import re
import shutil
import sys
import tempfile
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

# before any Transformer Engine can be found: Megatron looks for one
from megatron_quads.errors import QuadsError
from megatron_quads.kernels.nvfp4 import reference as nvfp4
from megatron_quads.patches import megatron_te, registry
from megatron_quads.te import arguments
from megatron_quads.te.cache import WeightGroup
from megatron_quads.te.install import ModuleWeights
from megatron_quads.te.scratch import Scratch, write_again

_ON_CPU = (("if not inp.is_cuda:", "if False:"), ('device="cuda",\n', 'device="cpu",\n'))
SPLITS = {"GroupedLinear": [6, 0, 10, 8], "Linear": [8]}
_numbers = itertools.count(1)


class _Name(type):
    """A class for whatever name the compiled part is asked for, and a number."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, _Name(name, (), {}))
        return getattr(cls, name)

    def __int__(cls) -> int:
        return next(_numbers)


class _Stub(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__file__ = name
        self.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _Name(name, (), {}))
        return getattr(self, name)


def load(wheel: Path, site: Path) -> Any:
    """``transformer_engine.pytorch`` of the unpacked wheel, copied to ``site``, as on a Hopper."""
    shutil.copytree(wheel, site, dirs_exist_ok=True)
    package = site / "transformer_engine"
    base = package / "pytorch" / "module" / "base.py"
    text = base.read_text()
    for old, new in _ON_CPU:
        assert old in text
        text = text.replace(old, new)
    base.write_text(text)
    fused = package / "pytorch" / "cpp_extensions" / "fused_attn.py"
    fused.write_text(
        fused.read_text().replace('assert {f"NVTE_', 'assert True or {f"NVTE_')
    )  # an enumeration of the stub
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its own word for: load no library
    sys.path.insert(0, str(site))
    root = types.ModuleType("transformer_engine")  # without its __init__, which loads the libraries
    root.__path__, root.__version__ = [str(package)], str(arguments.te_version())  # type: ignore[attr-defined]
    sys.modules["transformer_engine"] = root
    tex: Any = _Stub("transformer_engine_torch")
    listed = re.findall(r"^    (k\w+) = int\(tex", (package / "pytorch" / "constants.py").read_text(), re.M)
    older = "kByte kInt16 kInt32 kInt64 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat8E8M0 kFloat4E2M1"
    tex.DType = enum.IntEnum("DType", listed or older.split())  # type: ignore[misc]
    tex.get_cublasLt_version, tex.get_num_cublas_streams = lambda: 130300, lambda: 4
    tex.get_cudnn_version = lambda: 91900
    sys.modules["transformer_engine.pytorch.onnx_extensions"] = mock.MagicMock()
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="")
    cuda.get_device_capability, cuda.current_device = lambda *_: (9, 0), lambda: 0
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    importlib.import_module("transformer_engine.common").load_framework_extension = lambda *_: None  # type: ignore[attr-defined]
    made = importlib.import_module("transformer_engine.pytorch")
    cuda.is_available, cuda.is_current_stream_capturing = lambda: True, lambda: False
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    for name, function, gemm in (
        ("grouped_linear", "general_grouped_gemm", _grouped),
        ("linear", "general_gemm", _gemm),
    ):
        setattr(importlib.import_module(f"transformer_engine.pytorch.module.{name}"), function, gemm)
    return made


def _product(a: Tensor, b: Tensor, layout: str, out: Tensor | None, accumulate: bool) -> Tensor:
    with torch.no_grad():
        value = {"TN": lambda: b @ a.T, "NN": lambda: b @ a, "NT": lambda: b.T @ a}[layout]()
        if out is None:
            return value
        return out.add_(value) if accumulate else out.copy_(value)


def _gemm(
    a: Tensor, b: Tensor, *_: Any, layout: str = "TN", out: Tensor | None = None, accumulate: bool = False, **__: Any
) -> tuple[Any, ...]:
    return _product(a, b, layout, out, accumulate), None, None, None


def _grouped(
    a: list[Tensor], b: list[Tensor], out: list[Tensor], *_: Any, layout: str = "TN", single_output: bool = False,
    m_splits: Any = None, accumulate: bool = False, **__: Any,
) -> tuple[Any, ...]:  # fmt: skip
    parts = out[0].split(list(m_splits)) if single_output else out
    for x, y, o in zip(a, b, parts, strict=True):
        _product(x, y, layout, o, accumulate)
    return out, [None] * len(a), [None] * len(a)


def check(te: Any, kind: str, mode: Any, fused: bool) -> None:
    """Three steps of three micro-batches against the layer that holds the quantised weights; AssertionError."""
    torch.manual_seed(0)
    Scratch.release()
    splits = SPLITS[kind]
    first = (len(splits),) if kind == "GroupedLinear" else ()
    options = {"bias": False, "params_dtype": torch.float32, "fuse_wgrad_accumulation": fused, "device": "cpu"}
    layers = [getattr(te, kind)(*first, 32, 48, **options) for _ in range(2)]
    params, plain = ([*layer.parameters()] for layer in layers)
    group = WeightGroup(params, [str(i) for i in range(len(params))], mode=mode)
    layers[0].quads_weights = ModuleWeights(group, 0, len(params), fused=fused, substituted=True)
    if mode != "copy":
        write_again(layers[0], layers[0].quads_weights)
    for _ in range(3):
        with torch.no_grad():
            for p, q in zip(params, plain, strict=True):
                q.copy_(nvfp4.qdq(p, nvfp4.tensor_scale(nvfp4.amax(p))))
                for x in (p, q):
                    x.grad, x.main_grad, x.grad_added_to_main_grad = None, torch.zeros_like(x), False
        flying = []
        for number in range(3):
            x = torch.randn(sum(splits), 32)
            inputs = [x.clone().requires_grad_() for _ in layers]
            more = {"is_first_microbatch": None if fused else number == 0}
            outputs = [layer(x, *([splits] if first else []), **more) for layer, x in zip(layers, inputs, strict=True)]
            assert outputs[0].equal(outputs[1]), "forward"
            flying.append((inputs, outputs, torch.randn_like(outputs[0])))
        for inputs, outputs, dy in flying:
            for y in outputs:
                y.backward(dy)
            assert inputs[0].grad.equal(inputs[1].grad), "dgrad"
        for p, q in zip(params, plain, strict=True):
            got, expected = (p.main_grad, q.main_grad) if fused else (p.grad, q.grad)
            assert got.equal(expected) and p.grad_added_to_main_grad is fused, "wgrad"
            with torch.no_grad():
                p.add_(torch.randn_like(p) * 0.05)
        assert any((p.main_grad if fused else p.grad).abs().sum() > 0 for p in params)
    assert group.quantized == 3


def main() -> None:
    with tempfile.TemporaryDirectory() as site:
        run(load(Path(sys.argv[1]), Path(site)))


def run(te: Any) -> None:
    """All kinds of layers, caches and accumulation, and which hook the version is let through with."""
    version = arguments.require_te("substitute")
    try:
        arguments.require_te("recipe")
        assert version >= arguments.TE_CUSTOM_RECIPE
    except QuadsError as e:
        assert version < arguments.TE_CUSTOM_RECIPE and "use --quads-weight-hook substitute" in str(e)
    registry.apply((megatron_te.GROUPED, megatron_te.LINEAR))
    for kind, mode, fused in itertools.product(SPLITS, arguments.CACHES, (False, True)):
        check(te, kind, mode, fused)
    print(f"{version}: {len(SPLITS) * len(arguments.CACHES) * 2} cases equal")


if __name__ == "__main__":
    main()
