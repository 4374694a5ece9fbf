"""From the trainer's weights to the rollout: export, load, prove. One path for refits and for the final checkpoint."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..checkpoint.export import export_hf
from ..checkpoint.gather import iter_hf_tensors
from ..checkpoint.hf import HFModel
from ..config import QuadsConfig
from ..errors import MismatchError
from ..rac.metadata import required_rac
from ..rollout.types import Rollout
from ..trainer.trainer import Trainer
from .config import RLConfig
from .control import Control
from .ranks import on_rank0
from .runfolder import RunFolder


def tensor_digest(tensor: Tensor) -> str:
    """sha256 of a tensor's contiguous bytes: what ``Rollout.audit`` computes on the other side."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def is_expert(name: str) -> bool:
    """Whether a HF tensor name is a routed expert's weight."""
    return ".mlp.experts." in name and name.endswith("_proj.weight")


class Refitter:
    """Exports the trainer's weights for one run and holds the rollout to them."""

    def __init__(self, trainer: Trainer, hf: HFModel, quads: QuadsConfig, folder: RunFolder) -> None:
        self.trainer, self.hf, self.quads, self.folder = trainer, hf, quads, folder
        self.rac = required_rac(quads, hf)
        self.dtype = trainer.dtype

    def export(self, version: int) -> Path:
        """Write the packed weights of ``version`` (all ranks take part); returns the committed folder."""
        out = self.folder.refit(version)
        export_hf(
            self.trainer.chunks,
            self.hf,
            self.quads,
            out,
            rac=self.rac,
            dtype=self.dtype,
            extra_marker={"version": version},
        )
        return out

    def export_final(self, version: int) -> None:
        """The checkpoint that users serve: the same bytes as the last refit, under ``export/``."""
        export_hf(
            self.trainer.chunks,
            self.hf,
            self.quads,
            self.folder.export,
            rac=self.rac,
            dtype=self.dtype,
            extra_marker={"version": version},
        )

    def start_rollout(self, cfg: RLConfig, version: int, *, context: int, control: Control) -> Rollout:
        """Rank 0: start (or connect to) vLLM on the exported folder and check that RAC is active in every worker."""
        from ..rollout.client import LocalRollout

        folder = self.folder.refit(version)
        sequences = cfg.prompts_per_step * cfg.samples_per_prompt
        rollout: Rollout
        if cfg.rollout == "local":
            rollout = LocalRollout(
                folder,
                dtype=str(self.dtype).removeprefix("torch."),
                max_model_len=context,
                max_num_seqs=min(sequences, 256),
                seed=cfg.seed,
                log=self.folder.logs / "rollout.log",
            )
        elif cfg.rollout == "launch":
            from ..rollout.pool import PoolRollout, require_servers

            servers = require_servers(control)
            rac_hash = self.rac.content_hash if self.rac is not None else None
            control.offer(
                folder,
                version,
                rac_hash=rac_hash,
                dtype=str(self.dtype).removeprefix("torch."),
                max_model_len=min(context + 1, self.hf.max_position),
                max_num_seqs=min(sequences, 256),
                seed=cfg.seed,
            )
            rollout = PoolRollout(control, servers, rac_hash=rac_hash)
            rollout.update_weights(folder.resolve(), version)
        else:
            from ..rollout.http import HttpRollout

            rollout = HttpRollout(cfg.rollout)
            rollout.update_weights(folder.resolve(), version)
        rollout.assert_active()
        return rollout

    def prove(self, rollout: Rollout | None, version: int) -> int:
        """Compare, bit for bit, what the trainer multiplies with and what the rollout holds; bits that differ.

        Every rank takes part in gathering. A recipe whose trainer is quantised must have 0: MismatchError otherwise.
        Where digests differ (recipe naive by design) the differing bits are counted in the workers. StopRequested on
        every rank when the rollout is lost meanwhile.
        """
        wanted: dict[str, str] = {}
        held: dict[str, Tensor] = {}
        for name, tensor in iter_hf_tensors(self.trainer.chunks, self.hf, weights="compute"):
            if is_expert(name):
                wanted[name] = tensor_digest(tensor)
                if self.quads.quantized_rollout and not self.quads.quantized_trainer:
                    held[name] = tensor.detach().cpu().contiguous()

        def compare() -> int:
            assert rollout is not None, "only rank 0 asks the rollout"
            return self._compare(rollout, version, wanted, held)

        return int(on_rank0(compare))

    def _compare(self, rollout: Rollout, version: int, wanted: dict[str, str], held: dict[str, Tensor]) -> int:
        bits, found = 0, rollout.audit()
        if set(found) != set(wanted):
            odd = sorted(set(found) ^ set(wanted))[0]
            raise MismatchError(
                f"{odd} is held by one side only", where=f"weights of version {version}", do="report this"
            )
        differing = sorted(n for n in wanted if wanted[n] != found[n])
        if differing and held:
            file = self.folder.path / "compute_weights.safetensors"
            save_file(held, str(file))
            bits = sum(rollout.count_bits(file).values())
            file.unlink()
        elif differing:
            raise MismatchError(
                f"{differing[0]} differs between trainer and rollout ({len(differing)} of {len(wanted)} tensors)",
                where=f"weights of version {version}",
                do="do not train on: run `quads verify`",
            )
        self.folder.append(
            self.folder.audit,
            {
                "step": version,
                "tensors": len(wanted),
                "tensors_differing": len(differing),
                "bits_mismatched": bits,
                "trainer": combined(wanted),
                "rollout": combined(found),
            },
        )
        return bits


def combined(digests: dict[str, str]) -> str:
    """One digest of a table of digests."""
    return hashlib.sha256("".join(f"{k}={digests[k]}\n" for k in sorted(digests)).encode()).hexdigest()
