"""Megatron's GPTModel: on its local spec with this project's expert linears and norm in it, or on Transformer Engine's."""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_spec,
    get_mlp_module_spec_for_backend,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn

from ..checkpoint.hf import HFModel
from ..config import QuadsConfig
from ..patches import megatron_te, registry
from ..te.install import install
from .args import TE, megatron_arguments
from .experts import QuadsColumnParallelLinear, QuadsRowParallelLinear


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm as a Megatron norm. Megatron's own wrapper of it refuses sequence parallelism; the one thing that
    needs is the mark by which Megatron sums the weight's gradient over the tensor parallel group."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class QuadsSpecProvider(LocalSpecProvider):
    """Megatron's local backend with expert linears that can quantise their weight."""

    def __init__(self, quantized: bool) -> None:
        self.quantized = quantized

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> partial[SequentialMLP]:
        """One MLP per expert, run in turn."""
        return partial(
            SequentialMLP,
            submodules=MLPSubmodules(
                linear_fc1=partial(QuadsColumnParallelLinear, quantized=self.quantized),
                linear_fc2=partial(QuadsRowParallelLinear, quantized=self.quantized),
            ),
        )


def layer_spec(config: TransformerConfig, *, quantized: bool) -> ModuleSpec:
    """Spec of one transformer layer."""
    local = get_gpt_layer_local_submodules(
        num_experts=config.num_moe_experts, qk_layernorm=True, normalization="RMSNorm"
    )
    attention = local.self_attention
    assert isinstance(attention, ModuleSpec)
    attention = dataclasses.replace(
        attention, submodules=dataclasses.replace(attention.submodules, q_layernorm=RMSNorm, k_layernorm=RMSNorm)
    )
    submodules = dataclasses.replace(
        local,
        input_layernorm=RMSNorm,
        self_attention=attention,
        pre_mlp_layernorm=RMSNorm,
        mlp=get_mlp_module_spec_for_backend(
            backend=QuadsSpecProvider(quantized), num_experts=config.num_moe_experts, moe_grouped_gemm=False
        ),
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def build(args: argparse.Namespace, hf: HFModel, quads: QuadsConfig) -> list[nn.Module]:
    """This rank's model chunks (one per virtual stage; here always one), randomly initialised, not yet wrapped.

    ``quads`` decides which layers' experts quantise their weights; ``args`` decides everything else. Needs
    ``runtime.initialize``. Raises QuadsError, on every rank, when the recipe matches no Transformer Engine layer of one.
    """
    config = megatron_arguments().core_transformer_config_from_args(args)
    spec: TransformerBlockSubmodules | ModuleSpec
    if args.transformer_impl == TE:
        registry.apply((megatron_te.OUTPUT_LAYER,))
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=True, qk_layernorm=True
        )
    else:
        specs = [
            layer_spec(config, quantized=quads.quantized_trainer and quads.quantizes_layer(i, hf.num_layers))
            for i in range(hf.num_layers)
        ]
        first = get_transformer_layer_offset(config)
        here = specs[first : first + get_num_layers_to_build(config)]
        spec = TransformerBlockSubmodules(layer_specs=here, layer_norm=RMSNorm)
    model: nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_percent=1.0,
        rotary_base=hf.rope_theta,
    )
    if torch.cuda.is_available():
        model.cuda(torch.cuda.current_device())
    if args.bf16:
        from megatron.core.transformer.module import Float16Module

        model = Float16Module(config, model)
    if args.transformer_impl == TE and quads.quantized_trainer:
        install(
            [model], quads, cache=args.quads_weight_cache, hook=args.quads_weight_hook, debug=args.quads_debug,
            shared_launch=not args.overlap_param_gather, inputs=False,
        )  # fmt: skip
    return [model]
