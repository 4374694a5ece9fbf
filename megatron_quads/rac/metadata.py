"""RAC metadata: which 16-blocks of each expert GEMM are compensated. Travels in config.json and as a sidecar file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import QuadsError

if TYPE_CHECKING:
    from ..checkpoint.hf import HFModel
    from ..config import QuadsConfig

SCHEMA_VERSION = 1
SIDECAR = "quads_rac.json"
BLOCK = 16


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelShape(_Strict):
    """What a checkpoint must have for this metadata to be about it."""

    model_type: str
    num_layers: Annotated[int, Field(gt=0)]
    num_experts: Annotated[int, Field(gt=0)]
    hidden_size: Annotated[int, Field(gt=0, multiple_of=BLOCK)]
    moe_intermediate_size: Annotated[int, Field(gt=0, multiple_of=BLOCK)]


class GemmSelection(_Strict):
    """Selected 16-blocks of one GEMM's K, the same for every expert of the layer; empty means RAC is off there.

    ``prefix`` counts leading blocks (down_proj of a sorted checkpoint: contiguous, no gather); ``blocks`` lists
    indices. ``static_amax`` is the calibrated input amax, headroom included; a static activation scale needs it.
    """

    prefix: Annotated[int, Field(ge=0)] | None = None
    blocks: list[Annotated[int, Field(ge=0)]] | None = None
    static_amax: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> GemmSelection:
        if (self.prefix is None) == (self.blocks is None):
            raise ValueError("give exactly one of prefix and blocks")
        if self.blocks is not None and self.blocks != sorted(set(self.blocks)):
            raise ValueError("blocks must be ascending and unique")
        return self

    def indices(self) -> list[int]:
        """Ascending block indices."""
        return list(range(self.prefix)) if self.prefix is not None else list(self.blocks or [])


class LayerSelection(_Strict):
    """Selections of one layer's two expert GEMMs (``gate_up``: K = hidden; ``down``: K = moe_intermediate)."""

    gate_up: GemmSelection
    down: GemmSelection


class RacMetadata(_Strict):
    """Versioned selection for a whole model. ``layers``: global layer index -> selection, quantised layers only."""

    schema_version: Literal[1] = 1
    model: ModelShape
    activation_scale: Literal["token", "tensor", "static"]
    policy: Literal["uniform", "adaptive"]
    ratio: Annotated[float, Field(ge=0, le=1)]
    sorted: bool
    layers: dict[int, LayerSelection]

    @model_validator(mode="after")
    def _inside(self) -> RacMetadata:
        for layer, sel in self.layers.items():
            if not 0 <= layer < self.model.num_layers:
                raise ValueError(f"layer {layer} is outside the model's {self.model.num_layers} layers")
            for name, gemm, k in (
                ("gate_up", sel.gate_up, self.model.hidden_size),
                ("down", sel.down, self.model.moe_intermediate_size),
            ):
                if any(b >= k // BLOCK for b in gemm.indices()):
                    raise ValueError(f"layer {layer} {name}: a block index is outside K/16 = {k // BLOCK}")
                if self.activation_scale == "static" and gemm.static_amax is None:
                    raise ValueError(f"layer {layer} {name}: a static activation scale needs static_amax")
        return self

    def without_blocks(self) -> RacMetadata:
        """The same model and scales with RAC off everywhere: plain W4A4."""

        def off(gemm: GemmSelection) -> GemmSelection:
            return GemmSelection(blocks=[], static_amax=gemm.static_amax)

        layers = {i: LayerSelection(gate_up=off(x.gate_up), down=off(x.down)) for i, x in self.layers.items()}
        return self.model_copy(update={"layers": layers, "ratio": 0.0})

    def require_same_form(self, other: RacMetadata, *, where: str) -> None:
        """Raise QuadsError unless ``other`` differs from this in which blocks it lists and in calibrated amax alone.

        Graphs and shapes made for this one then stay valid: as many blocks per GEMM, listed or leading as here.
        """

        def form(rac: RacMetadata) -> dict[str, Any]:
            layers = {
                i: [(s.prefix, len(s.indices())) for s in (x.gate_up, x.down)] for i, x in sorted(rac.layers.items())
            }
            return {**rac.model_dump(mode="json", exclude={"layers"}), "number of blocks": layers}

        mine, theirs = form(self), form(other)
        for name in mine:
            if mine[name] != theirs[name]:
                raise QuadsError(
                    f"the new RAC selection has another {name} than the running one",
                    where=where,
                    do="start the rollout anew from this export",
                )

    def blocks_not_in(self, other: RacMetadata) -> int:
        """Selected blocks, summed over layers and GEMMs, that ``other`` (of the same layers) does not select."""
        pairs = [(x, other.layers[i]) for i, x in self.layers.items()]
        return sum(
            len(set(getattr(x, gemm).indices()) - set(getattr(y, gemm).indices()))
            for x, y in pairs
            for gemm in ("gate_up", "down")
        )

    @property
    def content_hash(self) -> str:
        """sha256 over the canonical JSON, the hash itself excluded."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_block(self) -> dict:
        """The ``rac`` block of config.json's quantization_config, and the sidecar's content: fields plus ``hash``."""
        return {**self.model_dump(mode="json"), "hash": self.content_hash}

    @classmethod
    def from_block(cls, block: object, *, where: str) -> RacMetadata:
        """Parse and check a ``rac`` block; raises QuadsError naming version, schema or hash faults."""
        if not isinstance(block, dict):
            raise QuadsError("rac block is not a JSON object", where=where, do="export the checkpoint again")
        if block.get("schema_version") != SCHEMA_VERSION:
            raise QuadsError(
                f"RAC metadata has schema version {block.get('schema_version')!r}, this build reads {SCHEMA_VERSION}",
                where=where,
                do="calibrate and export again with this version of megatron-quads",
            )
        claimed = block.get("hash")
        try:
            parsed = cls.model_validate({k: v for k, v in block.items() if k != "hash"})
        except ValidationError as e:
            first = e.errors()[0]
            raise QuadsError(
                f"RAC metadata is malformed at {'.'.join(map(str, first['loc'])) or 'top'}: {first['msg']}",
                where=where,
                do="calibrate and export again",
            ) from e
        if claimed != parsed.content_hash:
            raise QuadsError(
                f"RAC metadata hash {str(claimed)[:12]} does not match its content {parsed.content_hash[:12]}",
                where=where,
                do="the metadata was changed after it was written: export again",
            )
        return parsed

    def require_model(self, shape: ModelShape, *, where: str) -> None:
        """Raise QuadsError when the metadata was made for another model."""
        for name in ModelShape.model_fields:
            mine, theirs = getattr(self.model, name), getattr(shape, name)
            if mine != theirs:
                raise QuadsError(
                    f"RAC metadata was made for {name}={mine}, the checkpoint has {theirs}",
                    where=where,
                    do="calibrate this model",
                )


def load_sidecar(folder: str | Path) -> RacMetadata | None:
    """Read ``quads_rac.json`` of a checkpoint folder; None when there is none."""
    path = Path(folder) / SIDECAR
    if not path.exists():
        return None
    try:
        block = json.loads(path.read_text())
    except ValueError as e:
        raise QuadsError(f"not JSON: {e}", where=str(path), do="export the checkpoint again") from e
    return RacMetadata.from_block(block, where=str(path))


SELECTION = "selection"  # key in the ``extra`` of a trainer checkpoint


def saved_selection(extra: dict[str, Any], *, where: str) -> RacMetadata | None:
    """The RAC metadata that a trainer checkpoint's ``extra`` holds; None: those of the checkpoint the run started from."""
    return RacMetadata.from_block(extra[SELECTION]["rac"], where=where) if SELECTION in extra else None


def required_rac(quads: QuadsConfig, hf: HFModel) -> RacMetadata | None:
    """The RAC metadata that the checkpoint brings; QuadsError when the recipe needs it and there is none."""
    if not quads.rac:
        return None
    rac = load_sidecar(hf.path)
    if rac is None:
        raise QuadsError(
            f"recipe {quads.recipe} needs RAC metadata",
            where=str(hf.path),
            do="run `quads calibrate` on the checkpoint first",
        )
    rac.require_model(hf.shape, where=str(hf.path))
    return rac
