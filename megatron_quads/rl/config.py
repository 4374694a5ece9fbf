"""RLConfig: what one ``quads rl`` run does. Megatron's own options (parallelism, lr, micro-batch) travel beside it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ..errors import QuadsError
from .loss import GRPOConfig


@dataclass(frozen=True)
class RLConfig:
    """Settings of a run; every rank gets the same."""

    model: str
    """HF folder of the policy; for recipe quads one that ``quads calibrate`` wrote."""
    out: str
    """Run folder."""
    task: str = "spell_backward"
    """reasoning-gym dataset, or a ``.jsonl`` file of prompts and answers."""
    task_config: dict[str, Any] = field(default_factory=dict)
    """Options of the reasoning-gym generator."""
    steps: int = 20
    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    max_new_tokens: int = 64
    temperature: float = 1.0
    seed: int = 0
    updates_per_step: int = 1
    """Optimizer steps per rollout: the step's samples are cut into that many mini-batches."""
    lr_ramp: int = 0
    """Steps over which the learning rate (Megatron's --lr) rises linearly."""
    heldout: int = 64
    """Held-out problems, sampled before the first and after the last step."""
    eval_every: int = 0
    """Held-out problems also after every N steps; 0: only before the first and after the last."""
    save_every: int = 0
    """Trainer checkpoint every N steps; the last step is always saved."""
    context: int | None = None
    """Longest prompt plus response; None takes the model's."""
    recalibrate_every: int = 0
    """RAC's selection anew every N steps, on the step's samples, with the next refit; 0: never."""
    rollout: str = "local"
    """``local`` (vLLM in a child process of rank 0), the URL of a vLLM server, or ``launch`` (``quads submit``'s)."""
    refit: str = "auto"
    """``flat`` (packed weights from memory into a local rollout), ``folder`` (exports), ``auto``: flat where it can be."""
    wandb_project: str | None = None
    grpo: GRPOConfig = field(default_factory=GRPOConfig)

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "samples_per_prompt", "max_new_tokens", "updates_per_step", "heldout"):
            if getattr(self, name) < 1:
                raise QuadsError(
                    f"{name} is {getattr(self, name)}", where=f"--{name.replace('_', '-')}", do="give 1 or more"
                )
        if min(self.steps, self.save_every, self.eval_every, self.recalibrate_every) < 0:
            raise QuadsError(
                "a number of steps cannot be negative",
                where="--steps, --save-every, --eval-every, --recalibrate-every",
                do="give 0 or more",
            )
        if self.refit not in ("auto", "flat", "folder"):
            raise QuadsError(f"unknown refit {self.refit!r}", where="--refit", do="give auto, flat or folder")
        if self.refit == "flat" and self.rollout != "local":
            raise QuadsError("only a local rollout takes flat refits", where="--refit", do="give --refit auto")
        if self.temperature <= 0:
            raise QuadsError(
                f"temperature {self.temperature} is not positive", where="--temperature", do="give e.g. 1.0"
            )
        if self.prompts_per_step * self.samples_per_prompt % self.updates_per_step:
            raise QuadsError(
                f"{self.prompts_per_step} x {self.samples_per_prompt} samples cannot be cut into {self.updates_per_step} equal parts",
                where="--updates-per-step",
                do="give a divisor",
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RLConfig:
        """Inverse of ``to_dict``."""
        return cls(**{**values, "grpo": GRPOConfig(**values["grpo"])})
