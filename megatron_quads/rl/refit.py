"""From the trainer's weights to the rollout: export, load, prove. One path for refits and for the final checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from ..checkpoint.export import export_hf
from ..checkpoint.hf import HFModel
from ..config import QuadsConfig
from ..digest import require_same_form
from ..errors import MismatchError
from ..rac.metadata import SELECTION, required_rac, saved_selection
from ..rac.recalibrate import recalibrate
from ..rollout.process import EngineProcess
from ..rollout.types import Rollout
from ..trainer.trainer import Trainer
from .config import RLConfig
from .control import Control
from .held import gather
from .ranks import on_rank0
from .runfolder import RunFolder
from .transport import Transport, bf16_bytes, choose, send_flat


class Refitter:
    """Exports the trainer's weights for one run and holds the rollout to them."""

    def __init__(self, trainer: Trainer, hf: HFModel, quads: QuadsConfig, folder: RunFolder) -> None:
        self.trainer, self.hf, self.quads, self.folder = trainer, hf, quads, folder
        self.rac = required_rac(quads, hf)  # of the current version's weights
        self.rac_version = 0  # the steps after which it was taken; 0: the checkpoint's
        self.reselects = False
        self.dtype = trainer.dtype
        self.transport = Transport(False, "refit: export folders")

    @property
    def rac_hash(self) -> str | None:
        """Of the current version's selection; None for recipes without RAC."""
        return self.rac.content_hash if self.rac is not None else None

    def _announced(self) -> str | None:
        """The hash that a folder update names when the rollout may have to switch to it."""
        return self.rac_hash if self.reselects else None

    def recalibrate(self, version: int, sequences: Sequence[Sequence[int]]) -> int:
        """All ranks: the selection of ``version``'s weights, on ``sequences``; the number of blocks that are new in it.

        The next refit, export and checkpoint carry it.
        """
        assert self.rac is not None
        before = self.rac
        self.rac = recalibrate(
            self.trainer.chunks,
            self.hf,
            before,
            sequences,
            headroom=self.quads.static_headroom,
            args=self.trainer.args,
        )
        self.rac_version = version
        return self.rac.blocks_not_in(before)

    def selection_state(self) -> dict[str, Any]:
        """What a trainer checkpoint holds of the selection (JSON values); ``restore_selection`` reads it."""
        if self.rac is None:
            return {}
        return {SELECTION: {"rac_version": self.rac_version, "rac": self.rac.to_block()}}

    def restore_selection(self, extra: dict[str, Any], where: str) -> None:
        """Continue with the selection that a trainer checkpoint was saved with; an older one has the checkpoint's."""
        if (found := saved_selection(extra, where=where)) is not None and self.rac is not None:
            self.rac.require_same_form(found, where=where)
            self.rac, self.rac_version = found, extra[SELECTION]["rac_version"]

    def export(self, version: int) -> int:
        """Write the packed weights of ``version`` as a committed folder (all ranks take part); bytes of its tensors."""
        return export_hf(
            self.trainer.chunks,
            self.hf,
            self.quads,
            self.folder.refit(version),
            rac=self.rac,
            dtype=self.dtype,
            extra_marker={"version": version},
        ).nbytes

    def choose_transport(self, mode: str, rollout: Rollout | None) -> None:
        """Decide, on every rank alike, how later versions travel, and say so once. QuadsError: ``flat`` cannot be."""

        def decide() -> Transport:
            assert rollout is not None, "only rank 0 asks the rollout"
            device = next(self.trainer.chunks[0].parameters()).device
            found = choose(mode, rollout, self.rac_hash, device, self.folder.exports / "flat.bin")
            print(found.line, flush=True)
            return found

        self.transport = on_rank0(decide)

    def send(self, rollout: Rollout | None, version: int) -> dict[str, float]:
        """All ranks: bring ``version`` into the rollout. QuadsError when it broke; the rollout serves nothing then."""
        if self.transport.flat:
            rac, file = self.rac, self.transport.file
            sent = send_flat(self.trainer, self.hf, self.quads, rac, rollout, version, file)
        else:
            sent = self.export(version)

            def load() -> None:
                assert rollout is not None, "only rank 0 asks the rollout"
                rollout.update_weights(self.folder.refit(version), version, rac_hash=self._announced())

            on_rank0(load)
        return {"refit_bytes": float(sent), "bf16_refit_bytes": float(bf16_bytes(self.hf))}

    def keep(self, version: int, *, start: int) -> None:
        """The folder that belongs to a saved step, where no refit wrote one; older ones go. Not for the last step."""
        if self.transport.flat:
            self.export(version)
        self.prune(start)

    def prune(self, start: int) -> None:
        """Rank 0 removes the folders that nobody reads again; ``start``: the version that the engine started from."""
        if dist.get_rank() == 0:
            self.folder.prune_refits(keep=start)

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

    def start_rollout(
        self, cfg: RLConfig, version: int, *, context: int, control: Control, process: EngineProcess | None
    ) -> Rollout:
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
                process=process,
            )
        elif cfg.rollout == "launch":
            from ..rollout.pool import PoolRollout, require_servers

            servers = require_servers(control)
            control.offer(
                folder,
                version,
                rac_hash=self.rac_hash,
                reselects=self.reselects,
                dtype=str(self.dtype).removeprefix("torch."),
                max_model_len=min(context + 1, self.hf.max_position),
                max_num_seqs=min(sequences, 256),
                seed=cfg.seed,
            )
            rollout = PoolRollout(control, servers, rac_hash=self.rac_hash)
        else:
            from ..rollout.http import HttpRollout

            rollout = HttpRollout(cfg.rollout)
        if self.reselects:
            rollout.require_selection()
        if cfg.rollout != "local":
            rollout.update_weights(folder.resolve(), version, rac_hash=self._announced())
        rollout.assert_active()
        return rollout

    def prove(self, rollout: Rollout | None, version: int) -> int:
        """Compare, bit for bit, what the trainer multiplies with and what the rollout holds; bits that differ.

        Every rank takes part in gathering. Recipe fp8 compares the codes and row scales that its routine makes of the
        trainer's weights. Only recipe naive, whose sides differ by design, may have another count than 0, taken in the
        workers: MismatchError otherwise, under fp8 with the count in it and in audit.jsonl. StopRequested on every rank
        when the rollout is lost meanwhile.
        """
        by_design = self.quads.quantized_rollout and not self.quads.quantized_trainer
        wanted, held = gather(self.trainer, self.hf, self.quads, keep=by_design)
        found: dict[str, str] = {}

        def compare() -> list[str]:
            assert rollout is not None, "only rank 0 asks the rollout"
            found.update(self._audited(rollout, version, wanted))
            return sorted(n for n in wanted if wanted[n] != found[n])

        differing: list[str] = on_rank0(compare)
        if differing and self.quads.fp8_rollout:
            _, held = gather(self.trainer, self.hf, self.quads, keep=True)

        def settle() -> int:
            assert rollout is not None, "only rank 0 asks the rollout"
            bits = self._count(rollout, held) if differing and held else 0
            if bits or not differing:
                self._note(version, wanted, found, differing, bits)
            if differing and not by_design:
                count = f"{bits} bits in " if bits else ""
                raise MismatchError(
                    f"{differing[0]} differs between trainer and rollout ({count}{len(differing)} of {len(wanted)} tensors)",
                    where=f"weights of version {version}",
                    do="do not train on: run `quads verify`",
                )
            return bits

        return int(on_rank0(settle))

    def _audited(self, rollout: Rollout, version: int, wanted: dict[str, str]) -> dict[str, str]:
        """The rollout's digests; MismatchError unless it holds this version and the same tensors."""
        info = rollout.info()
        if (info.version, info.rac_hash) != (version, self.rac_hash):
            raise MismatchError(
                f"the rollout holds version {info.version} with RAC {info.rac_hash}, the trainer sent {self.rac_hash}",
                where=f"weights of version {version}",
                do="report this",
            )
        found = rollout.audit()
        if set(found) != set(wanted):
            odd = sorted(set(found) ^ set(wanted))[0]
            raise MismatchError(
                f"{odd} is held by one side only", where=f"weights of version {version}", do="report this"
            )
        require_same_form(found, where=f"weights of version {version}")
        return found

    def _count(self, rollout: Rollout, held: dict[str, Tensor]) -> int:
        file = self.folder.path / "compute_weights.safetensors"
        save_file(held, str(file))
        bits = sum(rollout.count_bits(file).values())
        file.unlink()
        return bits

    def _note(
        self, version: int, wanted: dict[str, str], found: dict[str, str], differing: list[str], bits: int
    ) -> None:
        self.folder.append(
            self.folder.audit,
            {
                "step": version,
                "tensors": len(wanted),
                "tensors_differing": len(differing),
                "bits_mismatched": bits,
                "trainer": combined(wanted),
                "rollout": combined(found),
                **({"rac": self.rac_hash} if self.rac_hash is not None else {}),
            },
        )


def combined(digests: dict[str, str]) -> str:
    """One digest of a table of digests."""
    return hashlib.sha256("".join(f"{k}={digests[k]}\n" for k in sorted(digests)).encode()).hexdigest()
