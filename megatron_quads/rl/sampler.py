"""What is asked of the rollout: a step's prompts, their samples and rewards, and the held-out evaluation."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from ..checkpoint.hf import HFModel
from ..errors import QuadsError
from ..rollout.types import Rollout
from .config import RLConfig
from .data import encode_prompts, rollout_batch, score_samples, step_prompts
from .loss import group_advantages
from .metrics import rollout_metrics
from .runfolder import RunFolder
from .tasks import Problem, make_task
from .tokenizer import load_tokenizer

HELDOUT_SEED = 1 << 30  # sampling seeds of held-out evaluation never meet those of training steps
SAMPLES_KEPT = 4


class Sampler:
    """Task and tokenizer on every rank, so that a fault in the data shows everywhere; rank 0 samples."""

    def __init__(self, cfg: RLConfig, hf: HFModel, folder: RunFolder, *, multiple: int) -> None:
        """``multiple``: a batch's sequences are padded to a multiple of it. QuadsError when a prompt does not fit."""
        self.cfg, self.folder, self.multiple = cfg, folder, multiple
        self.context = cfg.context or hf.max_position
        self.task = make_task(cfg.task, cfg.task_config, seed=0)
        self.tokenizer = load_tokenizer(hf.path)
        self.heldout = self.task.heldout(cfg.heldout)
        self._encode([*self.heldout, *step_prompts(self.task, cfg.seed, 0, cfg.prompts_per_step)])

    def sample(self, rollout: Rollout, step: int) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Roll out step ``step`` (0-based) from weights of that version; batch and statistics."""
        version = rollout.info().version
        if version != step:
            raise QuadsError(
                f"the rollout holds weights of version {version}, the trainer of {step}",
                where="rollout",
                do="resume the run",
            )
        cfg = self.cfg
        problems = step_prompts(self.task, cfg.seed, step, cfg.prompts_per_step)
        prompts = self._encode(problems)
        started = time.monotonic()
        samples = self._generate(rollout, prompts, cfg.samples_per_prompt, cfg.seed * 1_000_003 + step)
        seconds = time.monotonic() - started
        batch = rollout_batch(prompts, samples, pad_id=self._pad_id(), multiple=self.multiple)
        rewards = score_samples(self.task, problems, samples, self._decode, self.tokenizer.eos_token_id)
        batch["advantages"] = group_advantages(rewards, cfg.samples_per_prompt)
        for problem, group in list(zip(problems, samples, strict=True))[:SAMPLES_KEPT]:
            text = self._decode(list(group[0].token_ids))
            self.folder.append(self.folder.samples, {"step": step + 1, "prompt": problem.prompt_text, "response": text})
        return batch, rollout_metrics(rewards, batch["mask"], seconds)

    def evaluate(self, rollout: Rollout, step: int) -> float:
        """Mean sampled reward on the held-out problems, one sample each, after ``step`` steps; adds a row to the evals."""
        prompts = self._encode(self.heldout)
        samples = self._generate(rollout, prompts, 1, HELDOUT_SEED + self.cfg.seed)
        rewards = score_samples(self.task, self.heldout, samples, self._decode, self.tokenizer.eos_token_id)
        self.folder.append(self.folder.evals, {"step": step, "rewards": rewards.tolist()})
        return float(rewards.double().mean().item())

    def _encode(self, problems: list[Problem]) -> list[list[int]]:
        return encode_prompts(
            problems, lambda t: self.tokenizer.encode(t), context=self.context, max_tokens=self.cfg.max_new_tokens
        )

    def _generate(self, rollout: Rollout, prompts: list[list[int]], n: int, seed: int) -> Any:
        return rollout.generate(
            prompts, n=n, max_tokens=self.cfg.max_new_tokens, temperature=self.cfg.temperature, seed=seed
        )

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _pad_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(self.tokenizer.eos_token_id if pad is None else pad)
