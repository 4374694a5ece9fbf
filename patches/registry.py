"""Registered patches of upstream packages.

A patch is a record. Applying it checks that the target exists, that the installed version is one the patch was written
for and that the target's signature has not changed; anything else raises with the whole record in the message. Applying
twice is the same as applying once. Nothing here swallows an error: a patch that no longer fits must be looked at.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet

from ..errors import QuadsError

_MARK = "__quads_patch__"


@dataclass(frozen=True)
class Patch:
    """One change of one upstream attribute.

    ``target``: ``module.path:Attribute.path``. ``package`` and ``versions``: distribution and PEP 440 specifier that it
    was written for. ``signature``: the ``str(inspect.signature(target))`` to find. ``make``: original -> replacement.
    """

    target: str
    package: str
    versions: str
    signature: str
    why: str
    upstream: str
    remove_when: str
    make: Callable[[Any], Any]

    @property
    def name(self) -> str:
        """The target: unique among patches."""
        return self.target

    def describe(self) -> str:
        """Everything a reader of a failure needs, in one line."""
        return (
            f"patch of {self.target} ({self.package} {self.versions}); why: {self.why}; upstream: {self.upstream}; "
            f"remove when: {self.remove_when}"
        )


@dataclass(frozen=True)
class PatchStatus:
    """What ``status`` reports for one patch."""

    target: str
    package: str
    installed: str
    versions: str
    applied: bool


def _fail(patch: Patch, what: str) -> QuadsError:
    return QuadsError(what, where=patch.describe(), do=f"install {patch.package}{patch.versions} or update the patch")


def _installed(patch: Patch) -> str:
    try:
        return importlib.metadata.version(patch.package)
    except importlib.metadata.PackageNotFoundError as e:
        raise _fail(patch, f"{patch.package} is not installed") from e


def _locate(patch: Patch) -> tuple[Any, str, Any]:
    """(holder, attribute name, current value) of the target."""
    module, _, path = patch.target.partition(":")
    try:
        holder: Any = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            holder = getattr(holder, parent)
        # a method is taken from the class itself, so that class methods and inherited names are told apart
        value = holder.__dict__[name] if inspect.isclass(holder) else getattr(holder, name)
    except (ImportError, AttributeError, KeyError) as e:
        raise _fail(patch, f"patch target {patch.target} does not exist") from e
    return holder, name, value


def _signature(value: Any) -> str:
    text = str(inspect.signature(value.__func__ if isinstance(value, classmethod | staticmethod) else value))
    return re.sub(r" at 0x[0-9a-f]+", "", text)  # annotations may hold objects with an address


def is_applied(patch: Patch) -> bool:
    """Whether the target holds this patch's replacement; raises QuadsError when the target is gone."""
    return getattr(_locate(patch)[2], _MARK, None) == patch.name


def check(patch: Patch) -> None:
    """Raise QuadsError unless the patch fits the installed package. A patch in place is taken to fit."""
    version = _installed(patch)
    if not SpecifierSet(patch.versions).contains(version.split("+")[0], prereleases=True):
        raise _fail(patch, f"{patch.package} {version} is installed, the patch supports {patch.versions}")
    value = _locate(patch)[2]
    if getattr(value, _MARK, None) == patch.name:
        return
    if (found := _signature(value)) != patch.signature:
        raise _fail(patch, f"signature of {patch.target} is {found}, the patch was written for {patch.signature}")


def apply(patches: Iterable[Patch]) -> None:
    """Check all, then apply all: either every patch is in place or, on a fault, none was touched."""
    patches = list(patches)
    for patch in patches:
        check(patch)
    for patch in patches:
        holder, name, value = _locate(patch)
        if getattr(value, _MARK, None) == patch.name:
            continue
        replacement = patch.make(value)
        setattr(replacement, _MARK, patch.name)
        replacement.__quads_original__ = value
        setattr(holder, name, replacement)


def status(patches: Iterable[Patch]) -> list[PatchStatus]:
    """State of each patch, to be logged and asserted in every worker; raises QuadsError when a target is gone."""
    return [PatchStatus(p.target, p.package, _installed(p), p.versions, is_applied(p)) for p in patches]


def require_applied(patches: Iterable[Patch]) -> None:
    """Raise QuadsError naming the first patch that is not in place."""
    for patch in patches:
        if not is_applied(patch):
            raise _fail(patch, "patch is not applied")
