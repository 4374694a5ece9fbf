"""A GPT with routed experts, its DDP, optimizer and schedule in one process, on a GPU or a CPU: for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@dataclass(frozen=True)
class Shape:
    """Of the model. ``tokens``: of a micro-batch, in sequences of ``sequence``."""

    layers: int = 2
    hidden: int = 256
    heads: int = 4
    groups: int = 2
    head_dim: int = 64
    experts: int = 8
    topk: int = 2
    inner: int = 128
    vocab: int = 512
    sequence: int = 128
    tokens: int = 256


def start() -> None:
    """Process group of one and Megatron's parallel state, once."""
    from megatron.core import parallel_state

    from ..trainer.runtime import apply_patches

    if parallel_state.model_parallel_is_initialized():
        return
    apply_patches()
    if ON_GPU:
        torch.cuda.set_device(0)
    if not dist.is_initialized():
        store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
        dist.init_process_group("nccl" if ON_GPU else "gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=True)


def build(
    shape: Shape, *, seed: int = 0, te: bool = True, grouped: bool = True, hybrid: bool = False,
    vp_stage: int | None = None, **settings: Any,
) -> nn.Module:  # fmt: skip
    """A GPTModel in BF16 on the GPU, not wrapped. ``settings`` override the TransformerConfig.

    ``hybrid``: a HybridModel of as many attention and as many MoE layers. ``vp_stage``: only that virtual pipeline stage.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    model_parallel_cuda_manual_seed(7 + seed, inference_rng_tracker=not ON_GPU, force_reset_rng=True)
    torch.manual_seed(seed)
    dtype = settings.pop("dtype", torch.bfloat16)
    values: dict[str, Any] = {
        "num_layers": shape.layers * (2 if hybrid else 1),
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.groups,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": 4 * shape.inner,
        "num_moe_experts": shape.experts,
        "moe_ffn_hidden_size": shape.inner,
        "moe_router_topk": shape.topk,
        "moe_grouped_gemm": grouped,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": not ON_GPU,
    }
    config = TransformerConfig(**{**values, **settings})
    common: dict[str, Any] = {
        "vocab_size": shape.vocab, "max_sequence_length": shape.sequence, "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
    }  # fmt: skip
    if hybrid:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        made = HybridModel(config, hybrid_stack_spec, hybrid_layer_pattern="*E" * shape.layers, **common)
        return made.to(DEVICE, dtype)
    make = get_gpt_layer_with_transformer_engine_spec if te else get_gpt_layer_local_spec
    spec = make(num_experts=shape.experts, moe_grouped_gemm=grouped, qk_layernorm=True)
    model = GPTModel(
        config, spec, vp_stage=vp_stage,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage), **common,
    )  # fmt: skip
    return model.to(DEVICE, dtype)


class Training:
    """One model with Megatron's DDP, distributed optimizer and schedule."""

    def __init__(self, model: Any, shape: Shape, *, lr: float = 1e-3, overlap: bool = False) -> None:
        from megatron.core.distributed import DistributedDataParallel as DDP
        from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.shape, config = shape, model.config
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
        )  # fmt: skip
        self.model: Any = DDP(config, ddp, model)
        options = OptimizerConfig(optimizer="adam", lr=lr, bf16=config.bf16, params_dtype=config.params_dtype,
                                  use_distributed_optimizer=True, overlap_param_gather=overlap, clip_grad=1.0)  # fmt: skip
        self.optimizer = get_megatron_optimizer(options, [self.model])
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        if overlap:
            config.no_sync_func = self.model.no_sync
        self.config = config

    def batch(self, seed: int) -> Tensor:
        """Token ids [sequences, length] of one micro-batch."""
        generator = torch.Generator(DEVICE).manual_seed(seed)
        size = (self.shape.tokens // self.shape.sequence, self.shape.sequence)
        return torch.randint(0, self.shape.vocab, size, device=DEVICE, generator=generator)

    def run(self, seeds: list[int], *, forward_only: bool = False) -> list[float]:
        """Forward (and backward) of one micro-batch for each seed, through Megatron's schedule: the losses."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward(iterator: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
            return losses(model, next(iterator)), lambda out: (out.mean(), {"loss": out.detach().mean()})

        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(map(self.batch, seeds)),
            model=[self.model],
            num_microbatches=len(seeds),
            seq_length=self.shape.sequence,
            micro_batch_size=self.shape.tokens // self.shape.sequence,
            forward_only=forward_only,
        )
        return [f["loss"] for f in found]

    def step(self, seeds: list[int]) -> list[float]:
        """One optimizer step over these micro-batches: their losses, as device scalars."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        found = self.run(seeds)
        self.optimizer.step()
        return found

    def close(self) -> None:
        """Break the cycle of DDP and its hooks, which no garbage collection sees, so that its memory can go."""
        self.model.grad_accs.clear()


def losses(model: Any, ids: Tensor) -> Tensor:
    """Per-token losses [sequences, length] of predicting the ids themselves shifted by one."""
    position = torch.arange(ids.shape[1], device=ids.device)[None].expand_as(ids)
    return model(ids, position, None, labels=ids.roll(-1, 1))  # type: ignore[no-any-return]


def finish() -> None:
    """Leave Megatron's parallel state and the process group."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
