"""Command line -> Megatron's own argument namespace, with the architecture taken from the Hugging Face checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from unittest import mock

import torch

from ..checkpoint.hf import HFModel
from ..config import QuadsConfig
from ..errors import QuadsError
from ..kernels.nvfp4.reference import BLOCK
from ..te.arguments import add_quads_arguments, expert_tensor_parallel_size, refuse_settings, require_te, te_version
from .runtime import apply_patches

TE = "transformer_engine"
_UNFUSED = (
    "--no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-persist-layer-norm "
    "--attention-softmax-in-fp32"
)
# Megatron's own layers have no fused kernels; Transformer Engine's accumulate their weight gradients without apex
_SPEC = {
    "local": f"--transformer-impl local --no-gradient-accumulation-fusion {_UNFUSED}",
    TE: f"--transformer-impl {TE} --moe-grouped-gemm {_UNFUSED}",
}
_DEFAULTS = (
    "--micro-batch-size 8 --lr 1e-5 --lr-decay-style constant --weight-decay 0.0 --clip-grad 1.0 --adam-beta2 0.999 "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.0 "
    "--make-vocab-size-divisible-by 128 --calculate-per-token-loss"
)


def megatron_arguments() -> ModuleType:
    """``megatron.training.arguments``, imported without ModelOpt.

    Megatron's package tries to import ModelOpt's training plugins, which import vLLM and several others (most of the
    start-up time, and none is used here). It treats ModelOpt as optional, so it is hidden during this one import.
    """
    name = "megatron.training.arguments"
    if name in sys.modules or "modelopt" in sys.modules:
        return importlib.import_module(name)
    sys.modules["modelopt"] = None  # type: ignore[assignment]  # importing it raises ModuleNotFoundError
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules["modelopt"]


def derived_argv(hf: HFModel) -> list[str]:
    """The Megatron flags that make its GPTModel compute the same function as the Hugging Face model."""
    model = {
        "--num-layers": hf.num_layers,
        "--hidden-size": hf.hidden_size,
        "--ffn-hidden-size": hf.intermediate_size,
        "--num-attention-heads": hf.num_heads,
        "--num-query-groups": hf.num_kv_heads,
        "--kv-channels": hf.head_dim,
        "--num-experts": hf.num_experts,
        "--moe-ffn-hidden-size": hf.moe_intermediate_size,
        "--moe-router-topk": hf.topk,
        "--moe-router-dtype": "fp32",
        "--norm-epsilon": hf.rms_norm_eps,
        "--normalization": "RMSNorm",
        "--position-embedding-type": "rope",
        "--seq-length": hf.max_position,
        "--max-position-embeddings": hf.max_position,
        "--hidden-dropout": 0.0,
        "--attention-dropout": 0.0,
    }
    out = [str(x) for pair in model.items() for x in pair]
    out += ["--group-query-attention", "--qk-layernorm", "--swiglu", "--disable-bias-linear"]
    if not hf.norm_topk_prob:  # softmax over all experts, not renormalised over the chosen ones
        out.append("--moe-router-pre-softmax")
    if not hf.tie_word_embeddings:
        out.append("--untie-embeddings-and-output-weights")
    return out


def _extra_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Megatron ``extra_args_provider``: the recipe's flags, and an off switch for what is on by default here."""
    add_quads_arguments(parser)
    parser.add_argument(
        "--no-distributed-optimizer", action="store_true", help="keep the whole optimizer state on every rank"
    )
    return parser


def layers_of(argv: Sequence[str]) -> str:
    """Whose layers the trainer is built of: what ``--transformer-impl`` in ``argv`` says, "local" or "transformer_engine".

    Without the flag Transformer Engine's where there is a GPU and the package, else Megatron's own. QuadsError when
    Transformer Engine was asked for and cannot run.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--transformer-impl")
    asked = parser.parse_known_args(list(argv))[0].transformer_impl
    on_gpu = torch.cuda.is_available()
    if asked is None:
        return TE if on_gpu and te_version() is not None else "local"
    if asked not in _SPEC:
        raise QuadsError(f"{asked!r} is not built", where="--transformer-impl", do=f"choose one of {', '.join(_SPEC)}")
    if asked == TE:
        if not on_gpu:
            raise QuadsError("Transformer Engine needs a GPU", where=f"--transformer-impl {TE}", do="use local here")
        require_te("substitute")
    return asked


def parse_args(argv: Sequence[str], hf: HFModel) -> argparse.Namespace:
    """Parse ``argv`` with ``megatron.training.arguments`` and return its checked namespace.

    Architecture flags come from ``hf``; one that contradicts it is refused. The world size is read from WORLD_SIZE.
    Raises QuadsError, in one line, on an unknown flag, a value Megatron refuses, experts that expert parallelism does
    not divide, experts that Megatron's default would split (TP > 1 without an expert TP), or a sharded K that is not a
    multiple of 16 (NVFP4).
    """
    arguments = megatron_arguments()
    derived = derived_argv(hf)
    base = [*_SPEC[layers_of(argv)].split(), *_DEFAULTS.split(), *derived]
    with _as_command_line([*base, *argv]):
        args = arguments.parse_args(extra_args_provider=_extra_arguments)
    with _as_command_line(base):
        reference = arguments.parse_args(extra_args_provider=_extra_arguments)
    _require_architecture(args, reference, derived)
    quads = QuadsConfig.from_args(args)
    _require_runnable(args, quads, hf)
    args.use_distributed_optimizer = not args.no_distributed_optimizer
    args.sequence_parallel = args.tensor_model_parallel_size > 1  # Megatron's MoE layer needs it to train
    args.use_cpu_initialization = not torch.cuda.is_available()
    args.distributed_backend = "nccl" if torch.cuda.is_available() else "gloo"
    args.rotary_base = hf.rope_theta
    args.quads_vocab_size = hf.vocab_size  # the true one: padded_vocab_size counts columns that no token has
    # optimizer shards are saved in a form that another layout can read; the default form needs NCCL-only collectives
    args.dist_ckpt_optim_fully_reshardable = True
    # the tensor-parallel overlap that this variable serves needs a GPU; Megatron insists on it for every TP > 1
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _validate(args)
    unit = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-hf.vocab_size // unit) * unit
    return args


def _validate(args: argparse.Namespace) -> None:
    arguments = megatron_arguments()
    apply_patches()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # announcements of single settings
            arguments.validate_args(args)
    except (AssertionError, ValueError, RuntimeError) as e:
        raise QuadsError(f"Megatron refuses the arguments: {e}", where="command line", do="change the flags") from e


@contextlib.contextmanager
def _as_command_line(argv: list[str]) -> Iterator[None]:
    """Megatron's parser reads sys.argv and ends the process on a fault: give it ``argv`` and raise instead."""
    said = io.StringIO()
    try:
        with mock.patch.object(sys, "argv", ["megatron-quads", *argv]), contextlib.redirect_stderr(said):
            yield
    except SystemExit as e:
        if not e.code:  # --help
            raise
        fault = said.getvalue().strip().splitlines()[-1:] or ["?"]
        raise QuadsError(fault[0].split("error: ")[-1], where="command line", do="see --help") from e


# flags that the checkpoint decides without being given, or that this trainer is not built for
_ALSO_FIXED = (
    "--moe-router-pre-softmax",
    "--untie-embeddings-and-output-weights",
    "--moe-router-topk-scaling-factor",
    "--moe-router-score-function",
    "--add-qkv-bias",
    "--moe-grouped-gemm",
    "--context-parallel-size",
)
_OTHER_NAMES = {"--norm-epsilon": "layernorm_epsilon", "--disable-bias-linear": "add_bias_linear"}


def _require_architecture(args: argparse.Namespace, reference: argparse.Namespace, derived: list[str]) -> None:
    for flag in [*(x for x in derived if x.startswith("--")), *_ALSO_FIXED]:
        name = _OTHER_NAMES.get(flag, flag.removeprefix("--").replace("-", "_"))
        mine, theirs = getattr(args, name), getattr(reference, name)
        if mine != theirs:
            raise QuadsError(
                f"{mine} contradicts {theirs}, which the checkpoint or this trainer fixes",
                where=flag,
                do="leave the flag out",
            )


def _require_runnable(args: argparse.Namespace, quads: QuadsConfig, hf: HFModel) -> None:
    world, ep = args.world_size, args.expert_model_parallel_size
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    etp = expert_tensor_parallel_size(args) if quads.quantized_trainer else args.expert_tensor_parallel_size or tp
    if hf.num_experts % ep:
        raise QuadsError(
            f"{hf.num_experts} experts cannot be divided over {ep} expert-parallel ranks",
            where="--expert-model-parallel-size",
            do="choose a divisor",
        )
    if world % (tp * pp) or world % (etp * ep * pp):
        raise QuadsError(
            f"{world} processes do not hold TP {tp} x PP {pp} and ETP {etp} x EP {ep} x PP {pp}",
            where="WORLD_SIZE",
            do="start a multiple of both products",
        )
    if args.transformer_impl == TE:
        if quads.quantized_trainer:
            refuse_settings(args)
    elif args.quads_weight_cache != "copy" or args.quads_weight_hook != "substitute":
        raise QuadsError(
            "Megatron's own layers have one way to quantise a weight",
            where="--quads-weight-cache, --quads-weight-hook",
            do=f"leave them out, or use --transformer-impl {TE}",
        )
    if quads.recipe == "bf16":
        return
    quads.quantized_layers(hf.num_layers)
    if quads.fp8_rollout:
        return  # a row of any length has its scale
    for name, k in (("gate_proj and up_proj", hf.hidden_size), ("down_proj", hf.moe_intermediate_size)):
        shards = etp if name == "down_proj" else 1
        if k % (BLOCK * shards):
            raise QuadsError(
                f"K = {k} of every expert's {name} is not a multiple of {BLOCK * shards}",
                where=str(hf.path),
                do="NVFP4 needs whole blocks of 16 on each rank: choose another model or a smaller expert TP",
            )
