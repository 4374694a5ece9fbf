"""Weight-transfer engine "quads_file": vLLM's native init / start / update / finish flow from an export folder.

All checks run before the first weight is touched, so a refused update leaves the running weights intact. An update that
fails half-way (a shard that breaks while it is read) leaves the worker without a version: it serves nothing any more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

from .. import atomic
from ..checkpoint.hf import SafetensorsFolder
from ..errors import QuadsError
from ..rac.metadata import RacMetadata
from . import checks
from .flat_load import FlatUpdate, require_flat, selection_of
from .state import assert_active, bring_selection


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: the folder comes with each update."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """A committed export folder, or one chunk of a flat refit, and the version that it holds.

    ``rac_hash``: of the RAC metadata that the folder must bring; without it only the running one is taken.
    """

    folder: str
    version: int
    chunk: dict[str, Any] | None = None
    rac_hash: str | None = None


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """One per worker. ``version``: what the worker serves; None while, or after, an update is incomplete."""

    init_info_cls, update_info_cls = FileInitInfo, FileUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        from ..patches import vllm_cpu, vllm_sleep

        if device.type == "cpu":
            vllm_cpu.apply()
        vllm_sleep.apply(device.type)
        folder = Path(vllm_config.model_config.model)
        if not folder.is_dir():
            raise QuadsError("weight updates need a checkpoint in a local folder", where=str(folder), do="download it")
        self._tensors = _describe(SafetensorsFolder(folder))
        self._quantization = checks.read_quantization_config(folder)
        assert_active(model, vllm_config)
        self.version: int | None = marker_version(folder)
        self.discarded = False  # by a level 2 sleep, since when no update was acknowledged
        self._pending: int | None = None
        self._flat: FlatUpdate | None = None
        self.weights_hash: str | None = None

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Layers are prepared in ``update_weights``, after its checks."""
        self._pending = self._flat = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Check the folder, then reload layer by layer, derived tensors in place."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """See ``update_weights``; raises QuadsError with the old weights intact when a check fails."""
        if update_info.chunk is not None:
            self.version = None
            if self._flat is None:
                self._bring(selection_of(update_info.chunk))
                self._flat = FlatUpdate(self.model, self.vllm_config, self._tensors.keys())
            self._flat.take(update_info.chunk)
            self._pending = update_info.version
            return
        folder = Path(update_info.folder)
        reader = self.check(folder, update_info.version, update_info.rac_hash)
        self.version = None
        self._bring(checks.read_rac(folder))
        model: Any = self.model
        initialize_layerwise_reload(model)
        model.load_weights(_stream(reader))
        finalize_layerwise_reload(model, self.model_config)
        self._pending = update_info.version

    def finish_weight_update(self) -> None:
        """Adopt the version once every layer is loaded and active."""
        if self._pending is None:
            raise QuadsError("weight update without weights", where="rollout", do="send weights, then finish")
        assert_active(self.model, self.vllm_config, any_mode=True)
        self.weights_hash = self._flat.finish() if self._flat is not None else None
        self._flat = None
        self.version, self._pending, self.discarded = self._pending, None, False

    def discard(self) -> None:
        """The weights are gone: no version until an update is acknowledged."""
        self.version = self.weights_hash = self._pending = self._flat = None
        self.discarded = True

    def check_flat(self, rac_hash: str | None, rac: dict[str, Any] | None = None) -> None:
        """Raise QuadsError, before any weight is touched, unless a flat refit fits this worker.

        ``rac``: the metadata that it brings, where that is not the running one.
        """
        if (brought := selection_of({"rac_hash": rac_hash, "rac": rac})) is not None:
            self._require_form(brought, "flat refit")
            rac_hash = self.rac_hash
        require_flat(self.model, self._quantization, rac_hash)

    @property
    def rac_hash(self) -> str | None:
        """Of the RAC metadata that this worker computes with."""
        found: str | None = self._quantization.get("rac", {}).get("hash")
        return found

    def _require_form(self, rac: RacMetadata, where: str) -> None:
        if "rac" not in self._quantization:
            raise QuadsError(
                "the running checkpoint has no RAC", where=where, do="restart the rollout from this export"
            )
        RacMetadata.from_block(self._quantization["rac"], where="running").require_same_form(rac, where=where)

    def _bring(self, rac: RacMetadata | None) -> None:
        """Within an update, before its weights: the selection that belongs to them."""
        if rac is not None and rac.content_hash != self.rac_hash:
            bring_selection(self.vllm_config, rac)
            self._quantization = {**self._quantization, "rac": rac.to_block()}

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> None:
        """vLLM's own trainer side (0.26 makes it abstract): not used, ``flat.send`` and the exporter are."""
        raise QuadsError("weights are sent by LocalRollout", where="trainer_send_weights", do="use megatron_quads.rl")

    def shutdown(self) -> None:
        """Nothing is held open."""

    def check(self, folder: Path, version: int, rac_hash: str | None = None) -> SafetensorsFolder:
        """Raise QuadsError unless ``folder`` is complete and of the running model, metadata and version.

        With ``rac_hash`` its RAC metadata must be that, of the running one's form.
        """
        if not atomic.is_committed(folder):
            raise QuadsError("export has no commit marker", where=str(folder), do="wait for the export to finish")
        held = marker_version(folder, default=version)
        if held != version:
            raise QuadsError(f"export holds version {held}, not {version}", where=str(folder), do="export again")
        self._check_metadata(folder, rac_hash)
        reader = SafetensorsFolder(folder)
        new = _describe(reader)
        for name in sorted(self._tensors.keys() ^ new.keys()):
            what = "is missing" if name in self._tensors else "is not in the running model"
            raise QuadsError(f"tensor {name} {what}", where=str(folder), do=checks.REEXPORT)
        for name, (shape, packed) in new.items():
            if (shape, packed) != self._tensors[name]:
                raise QuadsError(
                    f"tensor {name} is {list(shape)} {packed or ''}, running {list(self._tensors[name][0])} "
                    f"{self._tensors[name][1] or ''}",
                    where=str(folder),
                    do=checks.REEXPORT,
                )
        return reader

    def _check_metadata(self, folder: Path, rac_hash: str | None) -> None:
        new = checks.read_quantization_config(folder)
        where = str(folder / "config.json")
        rac = checks.read_rac(folder)
        held = rac.content_hash if rac else None
        running = self.rac_hash if rac_hash is None else rac_hash
        if rac is not None and held == rac_hash:
            self._require_form(rac, where)
        if held != running:
            raise QuadsError(
                f"RAC metadata {_short(held)} differs from the {'running' if rac_hash is None else 'announced'} {_short(running)}",
                where=where,
                do="restart the rollout from this export",
            )
        checks.require_sidecar_match(rac, folder)
        for key in ("quant_method", "quant_algo", "ignore", "layers", checks.MARKER_KEY):
            if (given := new.get(key)) != (kept := self._quantization.get(key)):
                raise QuadsError(
                    f"quantization_config.{key} {given!r} differs from the running {kept!r}",
                    where=where,
                    do="restart the rollout from this export",
                )


def marker_version(folder: Path, default: int = 0) -> int:
    """``version`` of a folder's commit marker, ``default`` when there is none."""
    path = folder / atomic.MARKER
    if not path.is_file():
        return default
    try:
        return int(json.loads(path.read_text()).get("version", default))
    except (ValueError, TypeError, AttributeError) as e:
        raise QuadsError(f"commit marker is malformed: {e}", where=str(path), do=checks.REEXPORT) from e


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "(none)"


def _describe(reader: SafetensorsFolder) -> dict[str, tuple[tuple[int, ...], str | None]]:
    """name -> (shape, dtype of packed tensors; None for floats, which may differ in precision)."""
    out: dict[str, tuple[tuple[int, ...], str | None]] = {}
    for name in reader.names():
        dtype = reader.dtype(name)
        packed = dtype in (torch.uint8, torch.float8_e4m3fn)
        out[name] = (reader.shape(name), str(dtype) if packed else None)
    return out


def _stream(reader: SafetensorsFolder) -> Iterator[tuple[str, Tensor]]:
    """Tensors in name order, which keeps each layer's together (bounded buffering in vLLM)."""
    for name in reader.names():
        tensor = reader.get(name)
        if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) and not bool(torch.isfinite(tensor).all()):
            raise QuadsError("weight is not finite", where=name, do="do not export a diverged model")
        yield name, tensor
