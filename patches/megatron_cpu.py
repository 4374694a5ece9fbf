"""What Megatron-Core needs on a machine without a GPU (gloo, CPU tensors).

Megatron asks ``torch.cuda`` for the current device and side streams: those functions are replaced. It also writes
``device="cuda"`` literals and compares ``Tensor.type()`` with ``torch.cuda.*`` names: a ``TorchFunctionMode`` answers
them, active only inside the entry points listed here (some microseconds per torch call).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .registry import Patch

_MEGATRON = ("megatron-core", ">=0.19.2,<0.20")
_TORCH = ("torch", ">=2.11,<2.14")
_UPSTREAM = "https://github.com/NVIDIA/Megatron-LM"
_CPU = torch.device("cpu")


class Stream:
    """A CUDA stream's interface where work is synchronous anyway."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Stream) -> None:
        """Nothing is in flight."""

    def wait_event(self, event: Event) -> None:
        """Nothing is in flight."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has already happened."""
        return event or Event()

    def synchronize(self) -> None:
        """Nothing is in flight."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return hash(Stream)


class Event:
    """A CUDA event's interface where work is synchronous anyway."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Stream | None = None) -> None:
        """Has happened."""

    def wait(self, stream: Stream | None = None) -> None:
        """Has happened."""

    def synchronize(self) -> None:
        """Has happened."""


class CudaLiterals(TorchFunctionMode):
    """Answer ``device="cuda"``, ``.cuda()`` and ``Tensor.type()`` on a CPU-only torch."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not kwargs and func not in _ASKS_FOR_CUDA:
            return func(*args)
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


_ASKS_FOR_CUDA = frozenset((torch.Tensor.cuda, torch.Tensor.to, torch.Tensor.type))


def _is_cuda(value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value).startswith("cuda")


def _inside_literals(original: Any) -> Any:
    """The original, run with ``CudaLiterals`` active."""
    function = original.__func__ if isinstance(original, classmethod | staticmethod) else original

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with CudaLiterals():
            return function(*args, **kwargs)

    return classmethod(wrapper) if isinstance(original, classmethod) else wrapper


def _constant(value: Any) -> Callable[[Any], Any]:
    """A maker of functions that return ``value`` whatever they are given."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return value

        return wrapper

    return make


def _splits_as_numpy(original: Any) -> Any:
    """CPU tensors become numpy too: torch.distributed's split sizes must not be tensors."""

    @functools.wraps(original)
    def wrapper(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy()
        return original(tensor, as_numpy, record_stream)

    return wrapper


_STREAM = Stream()
_DEVICE = "torch.device | str | int | None"
_NEVER = "Megatron-Core takes its device from one place that knows CPU"


def _cuda(name: str, signature: str, why: str, make: Callable[[Any], Any]) -> Patch:
    return Patch(f"torch.cuda:{name}", *_TORCH, signature, why, _UPSTREAM, _NEVER, make)


def _literals(target: str, signature: str, why: str) -> Patch:
    return Patch(target, *_MEGATRON, signature, why, _UPSTREAM, _NEVER, _inside_literals)


_GROUPS = "megatron.core.process_groups_config.ProcessGroupCollection"
_SCHEDULE = (
    "(*, forward_step_func, data_iterator: Union[Iterator, List[Iterator]], model: "
    "Union[torch.nn.modules.module.Module, List[torch.nn.modules.module.Module]], num_microbatches: int, "
    "seq_length: int, micro_batch_size: int, decoder_seq_length: Optional[int] = None, forward_only: bool = False, "
    "collect_non_loss_data: bool = False, first_val_step: Optional[bool] = None, "
    "adjust_tensor_shapes_fn: Optional[Callable] = None, p2p_communicator: "
    "Optional[megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator] = None, pg_collection: "
)
# (target, signature, why): entry points that write device="cuda" or compare Tensor.type() inside
_ENTRY_POINTS = (
    (
        "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining",
        f"{_SCHEDULE}Optional[{_GROUPS}] = None, force_all_reduce: Optional[bool] = False)",
        "counts tokens in a tensor on device='cuda'",
    ),
    (
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
        f"{_SCHEDULE}Union[{_GROUPS}, megatron.core.process_groups_config.MultiModuleProcessGroupCollection, NoneType]"
        " = None, force_all_reduce: Optional[bool] = False)",
        "counts tokens in a tensor on device='cuda'",
    ),
    (
        "megatron.core.optimizer:get_megatron_optimizer",
        "(config: megatron.core.optimizer.optimizer_config.OptimizerConfig, model_chunks: "
        "List[megatron.core.transformer.module.MegatronModule], config_overrides: "
        "Optional[Dict[megatron.core.optimizer.optimizer_config.ParamKey, "
        "megatron.core.optimizer_param_scheduler.ParamGroupOverride]] = None, use_gloo_process_groups: bool = True, "
        f"pg_collection: Optional[{_GROUPS}] = None, dump_param_to_param_group_map: Optional[str] = None) -> "
        "megatron.core.optimizer.optimizer.MegatronOptimizer",
        "sorts parameters by type names such as 'torch.cuda.FloatTensor'",
    ),
    (
        "megatron.core.optimizer.optimizer:ChainedOptimizer.step",
        "(self)",
        "gradient norms live in tensors on device='cuda'",
    ),
    (
        "megatron.core.optimizer.optimizer:ChainedOptimizer.sharded_state_dict",
        "(self, model_sharded_state_dict: Dict[str, Any], is_loading: bool = False, **kwargs)",
        "gathers optimizer shards in tensors moved with .cuda()",
    ),
    (
        "megatron.core.optimizer.optimizer:ChainedOptimizer.load_state_dict",
        "(self, state_dict)",
        "scatters optimizer shards in tensors on device='cuda'",
    ),
    (
        "megatron.core.dist_checkpointing:save",
        "(sharded_state_dict: Dict[str, Any], checkpoint_dir: str, sharded_strategy: "
        "megatron.core.dist_checkpointing.strategies.torch.TorchDistSaveShardedStrategy = None, "
        "validate_access_integrity: bool = True, async_sharded_save: bool = False, "
        "preprocess_common_before_consistancy_check: Optional[Callable[[Dict[str, Any]], Dict[str, Any]]] = None, "
        "content_metadata: Optional[dict] = None, async_strategy: Optional[str] = 'nvrx', "
        "verify_integrity: bool = False) -> "
        "Optional[megatron.core.dist_checkpointing.strategies.async_utils.AsyncRequest]",
        "exchanges flags in tensors on device='cuda'",
    ),
)

PATCHES: tuple[Patch, ...] = (
    _cuda("current_device", "() -> int", "buffers are allocated on torch.cuda.current_device()", _constant(_CPU)),
    _cuda(
        "current_stream",
        f"(device: {_DEVICE} = None) -> torch.cuda.streams.Stream",
        "DDP and the MoE dispatcher order side streams",
        _constant(_STREAM),
    ),
    _cuda(
        "stream",
        "(stream: Optional[ForwardRef('torch.cuda.Stream')]) -> torch.cuda.StreamContext",
        "the MoE dispatcher enters a side stream",
        _constant(_STREAM),
    ),
    _cuda(
        "Stream", "(device=None, priority=0, **kwargs)", "the MoE dispatcher creates a side stream", lambda _: Stream
    ),
    _cuda(
        "synchronize",
        f"(device: {_DEVICE} = None) -> None",
        "pipeline communication and checkpointing synchronise",
        _constant(None),
    ),
    Patch(
        "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
        *_MEGATRON,
        "(tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False) -> torch.Tensor",
        "split sizes on the CPU stay tensors, which all_to_all_single refuses",
        _UPSTREAM,
        "maybe_move_tensor_to_cpu honours as_numpy for CPU tensors",
        _splits_as_numpy,
    ),
    Patch(
        "megatron.training.arguments:get_device_arch_version",
        *_MEGATRON,
        "()",
        "the argument check asks for the GPU's architecture when TP > 1",
        _UPSTREAM,
        "validate_args asks only when a GPU is present",
        _constant(0),
    ),
    *(_literals(*entry) for entry in _ENTRY_POINTS),
)
