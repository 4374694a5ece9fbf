"""What a reproduction is: model, task, warm-up, RL settings and arms, from one YAML file, and the hashes that guard its logs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..config import QuadsConfig
from ..errors import QuadsError
from ..launch.config import HERE
from ..rl.config import RLConfig
from ..rl.loss import GRPOConfig
from ..rl.tiny import TinyModel

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Flag = str | int | float | bool


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(_Strict):
    """Sizes of the Qwen3-MoE; hidden and expert sizes are what the rollout's GPU kernel takes."""

    layers: Positive = 6
    hidden: Annotated[int, Field(gt=0, multiple_of=128)] = 384
    heads: Positive = 6
    kv_heads: Positive = 2
    head_dim: Positive = 64
    experts: Positive = 16
    topk: Positive = 4
    moe_intermediate: Annotated[int, Field(gt=0, multiple_of=64)] = 192
    context: Positive = 128
    init_std: Annotated[float, Field(gt=0)] = 0.02

    def tiny(self) -> TinyModel:
        """As the checkpoint writer takes it."""
        return TinyModel(**self.model_dump())


class Warm(_Strict):
    """Supervised warm-up: until ``stop_at`` held-out pass@1, or ``steps``; accepted when it ends within low..high."""

    steps: Positive
    batch: Positive = 64
    lr: Annotated[float, Field(gt=0)]
    ramp: Positive = 30
    noise: Share
    """Share of wrong tokens in the demonstrations; what RL has to unlearn, and what bounds pass@1 here."""
    eval_every: Positive = 50
    stop_at: Share = 0.45
    low: Share = 0.3
    high: Share = 0.6

    @model_validator(mode="after")
    def _ordered(self) -> Warm:
        if not self.low <= self.stop_at <= self.high:
            raise ValueError("low <= stop_at <= high does not hold")
        return self


class RL(_Strict):
    """Settings of every arm's ``quads rl``."""

    steps: Positive
    prompts_per_step: Positive
    samples_per_prompt: Positive
    max_new_tokens: Positive
    temperature: Annotated[float, Field(gt=0)] = 1.0
    updates_per_step: Positive = 1
    lr: Annotated[float, Field(gt=0)]
    lr_ramp: int = 0
    heldout: Positive
    eval_every: Positive
    tis_cap: Annotated[float, Field(gt=0)] | None = None
    """None: no importance correction, so that a mismatch can do its harm."""


class Arm(_Strict):
    """One recipe. An arm with ``unavailable`` is listed with that reason and never run."""

    title: str
    recipe: Literal["bf16", "fp8", "naive", "symmetric", "symmetric-rac", "qat", "quads"]
    ratio: Share = 0.0
    policy: Literal["uniform", "adaptive"] = "uniform"
    sort: bool = False
    seeds: Positive = 2
    unavailable: str | None = None

    @model_validator(mode="after")
    def _compensated(self) -> Arm:
        if (self.recipe in ("quads", "symmetric-rac")) != (self.ratio > 0):
            raise ValueError("recipes quads and symmetric-rac need a ratio above 0, the others none")
        return self

    def quads(self) -> QuadsConfig:
        """As the trainer takes it; without RAC its defaults stay."""
        if not self.ratio:
            return QuadsConfig(recipe=self.recipe)
        return QuadsConfig(recipe=self.recipe, rac_ratio=self.ratio, rac_policy=self.policy, rac_sort=self.sort)

    @property
    def base(self) -> str | None:
        """Name of the calibrated checkpoint it starts from; None: the warm one."""
        return base_name(self.ratio, self.policy, self.sort) if self.ratio else None


class Study(_Strict):
    """Measurements on the fixed warm checkpoint."""

    ratios: list[Share] = [0.125, 0.25, 0.5, 0.75, 1.0]
    sequences: Positive = 256
    drifts: list[Annotated[float, Field(ge=0)]] = [0.0, 2**-9, 2**-7, 2**-5]
    """Relative size (standard deviation) of the noise that stands for what two engines' inputs differ by."""


# of a configuration: what no run's numbers depend on
SHARED_NOT = {"scale", "save_every", "kv_cache_gib", "study", "arms"}


class Config(_Strict):
    """The whole reproduction."""

    scale: str
    """One line for the report: what was run where."""
    seed: int = 0
    task: str
    task_config: dict[str, Any] = {}
    model: Model = Model()
    warm: Warm
    calibration_prompts: Positive = 128
    rl: RL
    megatron: dict[str, Flag] = {}
    """Megatron's own flags, such as ``bf16: true``."""
    nproc: Positive = 1
    save_every: Positive = 20
    kv_cache_gib: Annotated[float, Field(gt=0)] = 2.0
    """Cache of each rollout on a GPU, which it shares with its trainer and with other runs."""
    study: Study = Study()
    arms: dict[str, Arm]

    @property
    def shared_hash(self) -> str:
        """Of all that every arm's numbers depend on. Saving, memory, the study and the list of arms may change."""
        return _digest(self.model_dump(mode="json", exclude=SHARED_NOT))

    @property
    def warm_hash(self) -> str:
        """Of what the warm checkpoint depends on: another learning rate in RL does not ask for another warm-up."""
        values = self.model_dump(mode="json", include={"seed", "task", "task_config", "model", "warm", "megatron"})
        judged = self.rl.model_dump(mode="json", include={"heldout", "max_new_tokens", "temperature"})
        return _digest({**values, "judged": judged})

    def arm(self, name: str) -> Arm:
        """The arm; QuadsError when there is none of that name."""
        if name not in self.arms:
            raise QuadsError(f"unknown arm {name!r}", where="--arm", do=f"choose among {', '.join(self.arms)}")
        return self.arms[name]

    def arm_hash(self, name: str) -> str:
        """Of the shared settings and what the arm adds to them."""
        own = self.arm(name).model_dump(mode="json", exclude={"title", "seeds", "unavailable"})
        return _digest({"shared": self.shared_hash, "arm": own})

    def flags(self) -> list[str]:
        """Megatron's command line, without learning rate and recipe."""
        out: list[str] = []
        for name, value in self.megatron.items():
            if value is True:
                out.append(f"--{name}")
            elif value is not False:
                out += [f"--{name}", str(value)]
        return out

    def rl_config(self, model: Path, out: Path, seed: int) -> RLConfig:
        """The run of one arm and seed."""
        r = self.rl
        return RLConfig(
            model=str(model),
            out=str(out),
            task=self.task,
            task_config=self.task_config,
            seed=seed,
            save_every=self.save_every,
            grpo=GRPOConfig(tis_cap=r.tis_cap),
            **r.model_dump(exclude={"lr", "tis_cap"}),
        )


def first_difference(old: dict[str, Any], new: dict[str, Any], leave: Collection[str] = ()) -> str:
    """``rl.lr was 0.1 and is now 0.2``, of the first key in which two settings differ."""
    for key in sorted({*old, *new} - set(leave)):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict) and a != b:
            return f"{key}.{first_difference(a, b)}"
        if a != b:
            return f"{key} was {a} and is now {b}"
    return "nothing that this version knows of"


def base_name(ratio: float, policy: str, is_sorted: bool) -> str:
    """Folder of a calibrated checkpoint."""
    return f"{policy}{'-sorted' if is_sorted else ''}-{ratio:g}"


def load(path: str | Path) -> Config:
    """Read a YAML file, or a shipped one by name (``reproduce``, ``reproduce-cpu``); QuadsError naming the key at fault."""
    given, shipped = Path(path), HERE / "configs" / f"{path}.yaml"
    file = given if given.is_file() else shipped
    try:
        values = yaml.safe_load(file.read_text())
    except FileNotFoundError as e:
        known = ", ".join(sorted(p.stem for p in (HERE / "configs").glob("reproduce*.yaml")))
        raise QuadsError("no such configuration", where=str(path), do=f"give a YAML file or one of {known}") from e
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise QuadsError(f"cannot read: {' '.join(str(e).split())}", where=str(file), do="give a YAML file") from e
    return check(values, where=str(file))


def check(values: Any, *, where: str) -> Config:
    """Plain values -> Config; QuadsError naming the first key at fault."""
    try:
        return Config.model_validate(values)
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(map(str, first["loc"])) or "top"
        raise QuadsError(f"{key}: {first['msg']}", where=where, do="correct the configuration") from e


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
