"""A launch configuration from one YAML file, a site file and ``--set`` overrides.

Relative paths are taken from the folder the user submits from and stored absolute, so a job runs the same from anywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ..errors import QuadsError
from .config import HERE, LaunchConfig, absolute, check


def load(path: str | Path, sets: list[str], *, site: str | None = None) -> LaunchConfig:
    """Read ``path`` (or a shipped configuration's name), merge the site file and ``KEY.SUBKEY=VALUE`` overrides.

    Raises QuadsError naming the key on an unknown key, a wrong value, or a file that cannot be read.
    """
    file = _find(path, "configs")
    values = _read(file)
    site_name = site or values.get("site")
    if isinstance(site_name, str):
        values["site"] = _read(_find(site_name, "sites"))
    for assignment in sets:
        _assign(values, assignment)
    if isinstance(values.get("options"), dict):
        _absolute_options(values["options"])
    return check(values, where=str(file))


def _find(name: str | Path, kind: str) -> Path:
    given, shipped = Path(name), HERE / kind / f"{name}.yaml"
    if given.is_file():
        return given
    if shipped.is_file():
        return shipped
    stems = sorted(p.stem for p in (HERE / kind).glob("*.yaml"))
    known = ", ".join(stem for stem in stems if not stem.startswith("reproduce"))  # those are of `quads reproduce`
    raise QuadsError(f"no such {kind.rstrip('s')} file", where=str(name), do=f"give a YAML file or one of {known}")


def _read(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise QuadsError(f"cannot read: {' '.join(str(e).split())}", where=str(file), do="give a YAML file") from e
    if not isinstance(values, dict):
        raise QuadsError("not a mapping of keys", where=str(file), do="write key: value lines")
    return values


def _assign(values: dict[str, Any], assignment: str) -> None:
    key, equals, text = assignment.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise QuadsError(f"not KEY=VALUE: {assignment!r}", where="--set", do="write e.g. --set trainer.nodes=2")
    at = values
    for part in parts[:-1]:
        at = at.setdefault(part, {})
        if not isinstance(at, dict):
            raise QuadsError(f"{part} holds a value, not keys", where=f"--set {key}", do="set the whole key")
    try:
        at[parts[-1]] = yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise QuadsError(f"not a YAML value: {text!r}", where=f"--set {key}", do="quote it") from e


def _absolute_options(options: dict[str, Any]) -> None:
    """Files among the command's options, seen from the submitting folder."""
    for name, value in options.items():
        known = str(name).replace("_", "-") in ("model", "prompts", "out", "trainer-checkpoint", "task")
        if known and isinstance(value, str) and (name != "task" or value.endswith(".jsonl")):
            options[name] = str(absolute(Path(value)))
