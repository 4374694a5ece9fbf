"""The patch registry, and every registered Megatron patch against the really installed packages."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from helpers import run_ranks

from megatron_quads.errors import QuadsError
from megatron_quads.patches import megatron_checkpoint, megatron_cpu, registry
from megatron_quads.patches.registry import Patch

REAL = (*megatron_cpu.PATCHES, *megatron_checkpoint.SYNCHRONOUS_SAVE, *megatron_checkpoint.TORCH_ADAM)
STUB = "quads_patch_stub"


@pytest.fixture
def stub() -> Iterator[ModuleType]:
    """An importable module with one function and one class method to patch."""
    module = ModuleType(STUB)
    source = (
        "def double(x: int) -> int:\n    return 2 * x\n"
        "class Thing:\n    @classmethod\n    def double(cls, x: int) -> int:\n        return 2 * x\n"
    )
    exec(compile(source, STUB, "exec", dont_inherit=True), module.__dict__)
    sys.modules[STUB] = module
    yield module
    del sys.modules[STUB]


def a_patch(**over: object) -> Patch:
    """A patch of the stub; ``torch`` stands for its distribution."""
    fields: dict = dict(
        target=f"{STUB}:double",
        package="torch",
        versions=">=2",
        signature="(x: int) -> int",
        why="doubling is not enough",
        upstream="https://example.org/issue/1",
        remove_when="upstream triples",
        make=lambda original: lambda x: original(x) + x,
    )
    return Patch(**(fields | over))


def test_applying_twice_is_the_same_as_once(stub: ModuleType) -> None:
    patch = a_patch()
    assert not registry.is_applied(patch)
    with pytest.raises(QuadsError, match="not applied"):
        registry.require_applied([patch])
    registry.apply([patch])
    once = stub.double
    registry.apply([patch])
    assert stub.double is once and stub.double(5) == 15
    registry.require_applied([patch])
    [status] = registry.status([patch])
    assert status.applied and status.target == f"{STUB}:double" and status.versions == ">=2"


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"versions": "<1"}, "is installed, the patch supports <1"),
        ({"package": "no-such-distribution"}, "is not installed"),
        ({"signature": "(x: float) -> int"}, "signature of quads_patch_stub:double is (x: int) -> int"),
        ({"target": f"{STUB}:triple"}, "does not exist"),
        ({"target": "no_such_module:double"}, "does not exist"),
        ({"target": f"{STUB}:Thing.triple"}, "does not exist"),
    ],
)
def test_a_patch_that_does_not_fit_raises_with_its_whole_record(stub: ModuleType, over: dict, said: str) -> None:
    before = stub.double
    with pytest.raises(QuadsError) as error:
        registry.apply([a_patch(target=f"{STUB}:Thing.double", signature="(cls, x: int) -> int"), a_patch(**over)])
    for part in (said, "doubling is not enough", "https://example.org/issue/1", "upstream triples"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    # nothing was touched, the patch that does fit neither
    assert stub.double is before and stub.Thing.double(5) == 10


@pytest.mark.parametrize("patch", REAL, ids=lambda p: p.target)
def test_fits_the_installed_package(patch: Patch) -> None:
    registry.check(patch)
    assert patch.why and patch.upstream.startswith("https://") and patch.remove_when
    changed = dataclasses.replace(patch, signature="(nothing, of, the, kind)")
    if not registry.is_applied(patch):
        with pytest.raises(QuadsError, match="was written for"):
            registry.check(changed)
    with pytest.raises(QuadsError, match="the patch supports"):
        registry.check(dataclasses.replace(patch, versions="<0.1"))


@pytest.mark.slow
def test_applied_in_a_real_process(tmp_path: Path) -> None:
    """In a process of its own: the patches replace torch.cuda functions for good."""
    run_ranks(1, Path(__file__).parent / "trainer_worker.py", ["patches", str(tmp_path)])
    found = json.loads((tmp_path / "patches.json").read_text())
    assert found["before"] == dict.fromkeys(found["before"], False)
    assert found["after"] == dict.fromkeys(found["before"], True) and found["same_objects"]
    assert set(found["after"]) == {p.target for p in REAL}
    assert found["device"] == "cpu"
