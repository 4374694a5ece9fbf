"""``python -m megatron_quads.train``: Megatron's pretraining with a quantised trainer.

Takes the command line of Megatron's ``pretrain_gpt.py`` (GPT or, with ``--hybrid-layer-pattern``, hybrid models) plus the
``--quads-*`` flags:

    torchrun --nproc-per-node 8 -m megatron_quads.train --quads-recipe quads <flags of pretrain_gpt.py>

The loop, the model, the optimizer and the checkpoints are ``megatron.training``'s; the recipe is installed on the built
model through its ``post_wrap_hooks``. A script of one's own does the same with two lines (``megatron_quads.recipe``).
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .config import QuadsConfig
from .errors import QuadsError
from .patches import megatron_te, registry
from .recipe import add_quads_arguments, model_hook, refuse_arguments
from .trainer.args import _as_command_line, megatron_arguments

DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}
_BATCH = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
_OTHER_DATA = (("sft", "--sft"), ("fim_data", "--fim-data"), ("perform_rl_step", "--perform-rl-step"))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Checked arguments; Megatron's globals are not set yet. QuadsError in one line, also for what Megatron refuses."""
    arguments = megatron_arguments()
    with _as_command_line(list(argv)):
        args: argparse.Namespace = arguments.parse_args(extra_args_provider=add_quads_arguments)
    refuse_arguments(args, QuadsConfig.from_args(args))
    for name, flag in _OTHER_DATA:
        if getattr(args, name, None):
            raise QuadsError(
                "this command builds pretraining data only",
                where=flag,
                do="add the recipe's two lines to the script that you use with this flag (megatron_quads/recipe.py)",
            )
    if args.transformer_impl == "local" and args.gradient_accumulation_fusion and not megatron_te.has_apex_fusion():
        raise QuadsError(
            "Megatron's own layers need NVIDIA apex to fuse gradient accumulation",
            where="--transformer-impl local",
            do="add --no-gradient-accumulation-fusion",
        )
    if not torch.cuda.is_available():
        raise QuadsError(
            "Megatron's training loop needs a GPU", where="this machine", do="use `quads rl`, which runs on a CPU too"
        )
    return args


def main(argv: Sequence[str]) -> None:
    """Train. Runs as one rank of a torchrun or srun job."""
    parse(argv)
    arguments = megatron_arguments()
    try:
        with _as_command_line(list(argv)):
            args = arguments.parse_and_validate_args(add_quads_arguments, args_defaults=DEFAULTS)
    except (AssertionError, ValueError) as e:
        raise QuadsError(f"Megatron refuses the arguments: {e}", where="command line", do="change the flags") from e

    from megatron.core.enums import ModelType
    from megatron.training import argument_utils as configs
    from megatron.training import pretrain

    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("megatron_quads").setLevel(logging.INFO)
    registry.apply((megatron_te.OUTPUT_LAYER, megatron_te.DATASET_HELPERS))
    build = configs.hybrid_config_from_args if args.hybrid_layer_pattern else configs.gpt_config_from_args
    model = build(args)
    model.post_wrap_hooks.append(model_hook(args))
    datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # every rank that needs data builds it
    pretrain(
        configs.pretrain_cfg_container_from_args(args, model),
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
    )


def datasets_provider(samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Megatron ``train_valid_test_dataset_provider``: its indexed GPT datasets, or mock data with ``--mock-data``."""
    from megatron.core import parallel_state
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args
    from megatron.training.utils.common_utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

    args = get_args()
    blend, per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )

    def here() -> bool:
        return is_first_or_last_pipeline_stage(vp_stage) and parallel_state.get_tensor_model_parallel_rank() == 0

    kind = MockGPTDataset if args.mock_data else GPTDataset
    found = BlendedMegatronDatasetBuilder(kind, samples, here, config).build()
    return found[0], found[1], found[2]


def _batch(iterator: Iterator[dict[str, Tensor]], vp_stage: int | None) -> dict[str, Tensor | None]:
    """This rank's part of the next micro-batch; nothing on inner pipeline stages."""
    from megatron.core import parallel_state as ps
    from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
    from megatron.training import get_args
    from megatron.training.utils.common_utils import is_first_or_last_pipeline_stage

    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(_BATCH)
    args = get_args()
    rank = ps.get_tensor_model_parallel_rank()
    whole: dict[str, Any] = {}
    if rank == 0:
        read = next(iterator)
        whole = {k: read[k].cuda(non_blocking=True) if read.get(k) is not None else None for k in _BATCH}
        whole |= dict.fromkeys(("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group"))
    mine = get_batch_on_this_tp_rank(
        whole,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=ps.get_tensor_model_parallel_src_rank(),
        broadcast_group=ps.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=bool(args.mtp_num_layers),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=ps.is_pipeline_first_stage(),
        is_pipeline_last_stage=ps.is_pipeline_last_stage(),
    )
    sliced: dict[str, Tensor | None] = get_batch_on_this_cp_rank(
        mine, is_hybrid_cp=False, cp_group=ps.get_context_parallel_group()
    )
    return sliced


def _loss(mask: Any, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum over the micro-batch's tokens, their number, and both to report."""
    weight = mask.reshape(-1).float()
    total, count = (losses.reshape(-1).float() * weight).sum(), weight.sum().to(torch.int)
    return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}


def forward_step(iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    """Megatron ``forward_step_func``."""
    from megatron.core.utils import get_attr_wrapped_model

    batch = _batch(iterator, get_attr_wrapped_model(model, "vp_stage"))
    mask = batch["loss_mask"]
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"],
                   loss_mask=mask)  # fmt: skip
    return output, partial(_loss, mask)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except QuadsError as fault:
        print(f"quads: error: {fault}", file=sys.stderr)
        sys.exit(fault.exit_code)
