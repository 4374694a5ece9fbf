"""QuadsConfig: the single source that Megatron flags, checkpoint metadata and the rollout derive from."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import QuadsError

RECIPES = ("bf16", "fp8", "naive", "symmetric", "symmetric-rac", "qat", "quads")
ACTIVATION_SCALES = ("token", "tensor", "static")
RAC_POLICIES = ("uniform", "adaptive")


def _option(default: Any, text: str, **kwargs: Any) -> Any:
    return field(default=default, metadata={"help": text, **kwargs})


@dataclass(frozen=True)
class QuadsConfig:
    """What is quantised, how, and with how much compensation. Every field is a Megatron flag ``--quads-<field>``."""

    recipe: str = _option(
        "quads",
        "bf16: nothing quantised; fp8: BF16 trainer, W8A8 FP8 rollout; naive: BF16 trainer, W4A4 rollout; "
        "symmetric: W4A4 on both sides; symmetric-rac: W4A4 plus RAC on both; qat: W4A16 trainer, W4A4 rollout; quads: qat plus RAC in the rollout",
        choices=RECIPES,
    )
    keep_first_layers: int = _option(0, "routed experts of the first N layers stay unquantised")
    keep_last_layers: int = _option(0, "routed experts of the last N layers stay unquantised")
    module_pattern: str = _option(
        "model.layers.*.mlp.experts.*", "glob over HF module names; what it matches among routed experts is quantised"
    )
    rac_ratio: float = _option(
        0.5, "share of each expert GEMM's K (uniform), or of all expert FLOPs (adaptive), compensated"
    )
    rac_policy: str = _option(
        "adaptive",
        "uniform: the same ratio per GEMM; adaptive: greedy by KL under one FLOP budget",
        choices=RAC_POLICIES,
    )
    rac_sort: bool = _option(
        True, "reorder each expert's intermediate dimension by calibrated rms (function-preserving)"
    )
    activation_scale: str = _option(
        "token", "global scale of activations: per token, per tensor, or static (calibrated)", choices=ACTIVATION_SCALES
    )
    static_headroom: float = _option(1.25, "static activation scale = calibrated amax times this")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            choices = f.metadata.get("choices")
            value = getattr(self, f.name)
            if choices and value not in choices:
                raise QuadsError(
                    f"unknown {f.name} {value!r}", where=flag(f.name), do=f"choose one of {', '.join(choices)}"
                )
        if not 0.0 <= self.rac_ratio <= 1.0:
            raise QuadsError(
                f"ratio {self.rac_ratio} is outside 0..1", where=flag("rac_ratio"), do="give a share such as 0.5"
            )
        if self.keep_first_layers < 0 or self.keep_last_layers < 0:
            raise QuadsError(
                "a number of layers cannot be negative", where=flag("keep_first_layers"), do="give 0 or more"
            )
        if self.static_headroom < 1.0:
            raise QuadsError(
                f"headroom {self.static_headroom} is below 1", where=flag("static_headroom"), do="give 1 or more"
            )

    @property
    def quantized_trainer(self) -> bool:
        """The trainer multiplies with quantise-dequantised expert weights."""
        return self.recipe in ("symmetric", "symmetric-rac", "qat", "quads")

    @property
    def quantized_trainer_activations(self) -> bool:
        """The trainer also fake-quantises the experts' inputs (symmetric W4A4 QAT)."""
        return self.recipe in ("symmetric", "symmetric-rac")

    @property
    def quantized_rollout(self) -> bool:
        """The rollout loads packed NVFP4 experts and quantises their activations (W4A4)."""
        return self.recipe in ("naive", "symmetric", "symmetric-rac", "qat", "quads")

    @property
    def fp8_rollout(self) -> bool:
        """The rollout quantises the experts' weights to FP8 itself, and their activations (W8A8)."""
        return self.recipe == "fp8"

    @property
    def rac(self) -> bool:
        """The rollout compensates activation residuals (under symmetric-rac the trainer does, too)."""
        return self.recipe in ("quads", "symmetric-rac") and self.rac_ratio > 0

    def quantizes_layer(self, layer: int, num_layers: int) -> bool:
        """Whether the routed experts of global layer index ``layer`` (0-based, pipeline-independent) are quantised."""
        inside = self.keep_first_layers <= layer < num_layers - self.keep_last_layers
        return inside and fnmatch.fnmatchcase(f"model.layers.{layer}.mlp.experts.0.gate_proj", self.module_pattern)

    def quantized_layers(self, num_layers: int) -> list[int]:
        """Global indices of the layers whose routed experts are quantised; raises QuadsError when there is none."""
        layers = [i for i in range(num_layers) if self.quantizes_layer(i, num_layers)]
        if not layers and self.recipe != "bf16":
            raise QuadsError(
                f"recipe {self.recipe!r} matches no layer of {num_layers}",
                where=f"{flag('module_pattern')}={self.module_pattern}, first {self.keep_first_layers} and last {self.keep_last_layers} kept",
                do="widen the pattern or keep fewer layers",
            )
        return layers

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for run metadata."""
        return dataclasses.asdict(self)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> QuadsConfig:
        """Build from a namespace that ``add_arguments`` filled."""
        return cls(**{f.name: getattr(args, f"quads_{f.name}") for f in dataclasses.fields(cls)})


def check_flags(argv: Sequence[str]) -> None:
    """QuadsError when a ``--quads-*`` value of a command line is not usable. Other options are left to Megatron."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    try:
        found, _ = add_arguments(parser).parse_known_args(list(argv))
    except argparse.ArgumentError as e:
        raise QuadsError(e.message, where=e.argument_name or "command line", do="see README, Recipes and flags") from e
    QuadsConfig.from_args(found)


def from_flags(argv: Sequence[str]) -> QuadsConfig:
    """The recipe that a command line's ``--quads-*`` flags give; other options are skipped. QuadsError on a bad value."""
    check_flags(argv)
    found, _ = add_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False)).parse_known_args(list(argv))
    return QuadsConfig.from_args(found)


def flag(name: str) -> str:
    """Field name -> command line flag."""
    return "--quads-" + name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Megatron ``extra_args_provider``: one flag per QuadsConfig field. Values are checked by QuadsConfig itself."""
    group = parser.add_argument_group(title="quads")
    for f in dataclasses.fields(QuadsConfig):
        text = f.metadata["help"]
        if isinstance(f.default, bool):
            group.add_argument(flag(f.name), action=argparse.BooleanOptionalAction, default=f.default, help=text)
        else:
            if choices := f.metadata.get("choices"):
                text += f" ({', '.join(choices)})"
            group.add_argument(flag(f.name), type=type(f.default), default=f.default, help=text.replace("%", "%%"))
    return parser
