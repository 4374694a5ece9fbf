"""vLLM method for routed experts: NVFP4 weights, NVFP4 activations, residual activation compensation."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE
from vllm.platforms import current_platform

from ..errors import QuadsError
from . import checks
from .backends import GEMMS, ActivationPlan, EmulationBackend, ExpertBackend, PackedExperts
from .opaque import emulated_experts

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    from ..rac.metadata import GemmSelection
    from .quant_config import ModelOptQuadsConfig

KINDS = ("weight", "weight_scale", "weight_scale_2", "input_scale")


class ModelOptQuadsMoEMethod(ModelOptNvFp4FusedMoE):
    """One quantised layer's method. vLLM's loader keys on "ModelOpt" in the class name.

    ``ModelOptNvFp4FusedMoE`` gives the parameters and their loading; its backend oracle (no CPU, no RAC) is not run.
    """

    supports_pre_processed_weights = False

    def __init__(self, quant_config: ModelOptQuadsConfig, layer: RoutedExperts, index: int) -> None:
        FusedMoEMethodBase.__init__(self, layer.moe_config)
        self.quant_config: ModelOptQuadsConfig = quant_config
        self.use_a16 = self.use_global_sf = self.per_token_activation = False
        self.nvfp4_backend = NvFp4MoeBackend.EMULATION
        self.experts_cls = None  # type: ignore[assignment]
        self.index = index
        self.backend: ExpertBackend | None = self._make_backend()
        self.ready = False
        self.plan: ActivationPlan | None = None
        self.observer: Callable[[Any, Any, Tensor, Tensor], None] | None = None  # calibration's (``observe.py``)
        self._layer = weakref.ref(layer)
        self._loaded: set[tuple[str, int]] = set()
        self._shapes: dict[tuple[str, str], tuple[int, ...]] = {}
        self._vllm_loader: Callable[..., Any] | None = None
        config = get_current_vllm_config()
        self.eager = config.model_config.enforce_eager
        self.dummy = config.load_config.load_format == "dummy"
        require_supported(layer, index)
        self._require_kernel(layer)

    kernel = "emulation"

    def _make_backend(self) -> ExpertBackend | None:
        return EmulationBackend()

    def _require_kernel(self, layer: RoutedExperts) -> None:
        if not current_platform.is_cpu() and not self.eager:
            raise QuadsError(
                "the emulated experts cannot run in CUDA graphs",
                where=checks.experts_prefix(self.index),
                do="set --enforce-eager",
            )

    @property
    def is_monolithic(self) -> bool:
        """Routing is vLLM's, not the method's."""
        return False

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> Any:
        """No modular kernel: inputs arrive unquantised."""
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def create_weights(  # type: ignore[override]
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """ModelOpt's parameters, behind a loader that checks shapes and notes what arrived."""
        self._vllm_loader = extra_weight_attrs["weight_loader"]
        self._shapes = checks.packed_shapes(hidden_size, intermediate_size_per_partition)
        extra_weight_attrs["weight_loader"] = self._load_checked
        super().create_weights(
            layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
        )

    def _load_checked(
        self,
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> Any:
        """vLLM's loader narrows a parameter to a smaller tensor silently; a checkpoint's shape must be exact."""
        layer = self._layer()
        assert layer is not None and self._vllm_loader is not None
        kind = weight_name.rsplit(".", 1)[-1].removeprefix("w13_").removeprefix("w2_")
        key = f"{checks.experts_prefix(self.index)}.{expert_id}.{checks.PROJECTIONS[shard_id]}.{kind}"
        expected = self._shapes[shard_id, kind]
        # scalars are also written as shape [1]
        if tuple(loaded_weight.shape) != expected and not (expected == () and loaded_weight.numel() == 1):
            raise QuadsError(
                f"tensor has shape {list(loaded_weight.shape)}, layer {self.index} needs {list(expected)}",
                where=key,
                do=checks.REEXPORT,
            )
        if loaded_weight.dtype != param.dtype:
            raise QuadsError(
                f"tensor is {loaded_weight.dtype}, layer {self.index} needs {param.dtype}",
                where=key,
                do=checks.REEXPORT,
            )
        done = self._vllm_loader(param, loaded_weight, weight_name, shard_id, expert_id, return_success=True)
        if done:
            self._loaded.add((f"{checks.PROJECTIONS[shard_id]}.{kind}", expert_id))
        return done if return_success else None

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:  # type: ignore[override]
        """Check that all of it arrived and is sane, then hand it to the backend. Runs after each (re)load."""
        self.ready = False
        experts = global_experts(layer)
        for expert in [] if self.dummy else experts:
            for projection in checks.PROJECTIONS.values():
                for kind in KINDS:
                    if (f"{projection}.{kind}", expert) not in self._loaded:
                        raise QuadsError(
                            f"{kind} of layer {self.index} is missing in the checkpoint",
                            where=f"{checks.experts_prefix(self.index)}.{expert}.{projection}.{kind}",
                            do=checks.REEXPORT,
                        )
        self._loaded.clear()
        tensors = {f"{stem}_{kind}": getattr(layer, f"{stem}_{kind}").data for stem in ("w13", "w2") for kind in KINDS}
        if self.dummy:
            checks.fill_dummy(tensors)
        checks.require_finite_experts(self.index, experts, tensors)
        packed = PackedExperts(
            w13=tensors["w13_weight"],
            w13_scale=tensors["w13_weight_scale"],
            w13_scale_2=tensors["w13_weight_scale_2"][:, 0],
            w2=tensors["w2_weight"],
            w2_scale=tensors["w2_weight_scale"],
            w2_scale_2=tensors["w2_weight_scale_2"],
        )
        self._make_plan(tensors)
        self._adopt(layer, packed)
        self.ready = True

    def _adopt(self, layer: RoutedExperts, packed: PackedExperts) -> None:
        """Hand checked weights to what computes."""
        assert self.backend is not None
        self.backend.load(packed, layer.params_dtype)

    def refit(self, layer: RoutedExperts, packed: PackedExperts) -> None:
        """New weights into the tensors in use, past vLLM's reload. ``packed`` holds this worker's experts."""
        assert self.backend is not None and self.plan is not None
        self.ready = False
        getattr(layer, "w13_weight_scale_2").data.copy_(packed.w13_scale_2[:, None])  # noqa: B009 - a parameter to mypy
        for name in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale", "w2_weight_scale_2"):
            getattr(layer, name).data.copy_(getattr(packed, name.replace("_weight", "", 1)))
        self.backend.load(packed, layer.params_dtype)
        self._renew_plan(packed.w13.device)
        self.ready = True

    def _renew_plan(self, device: torch.device) -> None:
        """The running metadata's selection and scales; a level 2 sleep discards the old tensors, too."""
        assert self.plan is not None
        self.plan.blocks = self._selected(device)
        for gemm, selection in self._gemms().items():
            self.plan.static_amax[gemm] = selection.static_amax or 0.0

    def selection(self) -> dict[str, list[int]]:
        """The residual blocks that each GEMM computes with under mode ``rac``, ascending."""
        assert self.plan is not None
        return {gemm: blocks.tolist() for gemm, blocks in self.plan.blocks.items()}

    def observe(self, layer: RoutedExperts, x: Tensor, topk_ids: Tensor) -> None:
        """Show a call's input and routing to whom it may concern."""
        if self.observer is not None:
            self.observer(layer, self, x, topk_ids)

    def weights(self) -> tuple[Tensor, Tensor]:
        """The dequantised (w13 [E, 2I, H], w2 [E, H, I]) in compute dtype, of what the GEMMs read."""
        assert self.backend is not None
        return self.backend.weights()

    def set_mode(self, mode: str) -> None:
        """Switch how activations are quantised; QuadsError without RAC metadata or where graphs hold a mode."""
        if self.plan is None or (mode == "rac" and self.quant_config.rac is None):
            raise QuadsError(
                f"layer {self.index} has no RAC metadata", where=checks.experts_prefix(self.index), do="export with RAC"
            )
        self.plan.mode = mode

    def _gemms(self) -> dict[str, GemmSelection]:
        rac = self.quant_config.rac
        return {"gate_up": rac.layers[self.index].gate_up, "down": rac.layers[self.index].down} if rac else {}

    def _selected(self, device: torch.device) -> dict[str, Tensor]:
        return {g: torch.tensor(s.indices(), dtype=torch.int64, device=device) for g, s in self._gemms().items()}

    def _make_plan(self, tensors: dict[str, Tensor]) -> None:
        config, gemms = self.quant_config, self._gemms()
        blocks = self._selected(tensors["w13_weight"].device)
        # without RAC a static scale is the checkpoint's own: input_scale = amax / (6 * 448)
        amax = {"gate_up": tensors["w13_input_scale"], "down": tensors["w2_input_scale"]}
        static = {g: (gemms[g].static_amax if g in gemms else float(amax[g].max()) * 6 * 448) or 0.0 for g in GEMMS}
        mode = self.plan.mode if self.plan else ("rac" if config.rac else "w4a4")
        saturated = self.plan.saturated if self.plan else {}
        listed = frozenset(g for g, selection in gemms.items() if selection.prefix is None)
        self.plan = ActivationPlan(mode, config.activation_scale, blocks, static, saturated, listed)

    def apply(  # type: ignore[override]
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """x [tokens, H], topk_weights and topk_ids [tokens, k] (global ids) -> [tokens, H]; shared experts: vLLM's."""
        if torch.compiler.is_compiling():
            return emulated_experts(x, topk_weights, topk_ids, layer.layer_name)
        return self.compute(layer, x, topk_weights, topk_ids)

    def compute(self, layer: RoutedExperts, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """``apply`` itself; QuadsError while the weights are not whole."""
        if not self.ready or self.plan is None:
            raise QuadsError(f"layer {self.index} has no complete weights", where="rollout", do="restart the rollout")
        assert self.backend is not None
        self.observe(layer, x, topk_ids)
        local = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]
        return self.backend.forward(x, topk_weights, local, self.plan)


def global_experts(layer: RoutedExperts) -> list[int]:
    """Global expert id of each local slot, in slot order."""
    if layer.expert_map is None:
        return list(range(layer.local_num_experts))
    slots = layer.expert_map.tolist()
    return [slots.index(local) for local in range(layer.local_num_experts)]


def require_supported(layer: RoutedExperts, index: int) -> None:
    """QuadsError for what no method of this project computes: split experts, another activation, scaled inputs."""
    where = checks.experts_prefix(index)
    if layer.moe_config.moe_parallel_config.tp_size > 1:
        # a rank that holds part of K would scale its activations by its own part
        raise QuadsError("expert tensor parallelism is not supported", where=where, do="use --enable-expert-parallel")
    if layer.moe_config.activation != MoEActivation.SILU:
        raise QuadsError(f"activation {layer.moe_config.activation} is not supported", where=where, do="use SwiGLU")
    if layer.apply_router_weight_on_input:
        raise QuadsError("router weights on the input are not supported", where=where, do="use a Qwen3-MoE model")
