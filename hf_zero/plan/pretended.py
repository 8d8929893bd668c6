"""Simulate hardware that a plan does not have: an accelerator, other ranks, a GPU's attention kernels, the experts that tokens choose.

On the simulated device torch would select its reference implementation of attention, which keeps all scores; plans have the memory of a
GPU's kernels, and masks only where a run needs them.

[Note: known choices] A layer with a list of experts looks up the tokens that chose each expert, so shapes depend on values, which fake
tensors do not have. Inside such a layer the choices get values: an operation that selects the k best of as many scores as there are experts
assigns the experts in turn, so that tokens are spread evenly. Operations whose inputs are all integers or booleans with known values are
also computed with these values. So masks, counts and positions of tokens have the same shapes as in a run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from hf_zero.comm.bootstrap import pretend_distributed
from hf_zero.errors import ConfigError, StateError, UnsupportedError
from hf_zero.expert_parallel.find import listed_experts
from hf_zero.plan.inputs import Cluster
from hf_zero.sequence_parallel import blocks
from hf_zero.system.planning import DEVICE, Told, only_planning

_HALF = (torch.bfloat16, torch.float16)
_MOST_WIDTH = 256  # largest width of a head that the flash kernel accepts
_aten = torch.ops.aten
_CHOOSE = (_aten.topk.default, _aten.sort.default, _aten.sort.stable, _aten.argmax.default, _aten.max.dim)
_NUMBER_OF = _aten._local_scalar_dense.default
_FILLED = (
    _aten.zeros, _aten.ones, _aten.full, _aten.arange, _aten.scalar_tensor, _aten.zeros_like, _aten.ones_like, _aten.full_like,
    _aten.new_zeros, _aten.new_ones, _aten.new_full,
)  # fmt: skip
_BY_MASK = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)


class _NullStream:
    """A stream or event of the simulated device, which finishes all work at once."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def wait(self, *_args: Any) -> None:
        """Return at once: no work is pending."""

    wait_stream = wait_event = synchronize = record = wait

    def record_event(self, *_args: Any) -> _NullStream:
        """Return an event of this stream."""
        return self

    def query(self) -> bool:
        """Return True: all work has finished."""
        return True


class Accelerator:
    """Module ``torch.planned`` of the simulated device, with the functions that libraries call.

    Attributes:
        nbytes: Bytes of memory that ``mem_get_info`` reports: more than any plan needs.
    """

    Stream = Event = _NullStream
    _stream = _NullStream()

    def __init__(self) -> None:
        self.nbytes = 1 << 60

    def is_available(self) -> bool:
        """Return True: the device exists and is initialised."""
        return True

    is_initialized = is_bf16_supported = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        """Return 1, the number of devices of this rank."""
        return 1

    def current_device(self) -> int:
        """Return 0, the index of the only device."""
        return 0

    def set_device(self, *_args: Any) -> None:
        """Do nothing: there is only one device."""

    manual_seed = manual_seed_all = synchronize = empty_cache = set_rng_state = reset_peak_memory_stats = set_device

    def get_rng_state(self, *_args: Any) -> torch.Tensor:
        """Return a placeholder for the state of the random number generator."""
        return torch.zeros(16, dtype=torch.uint8, device="cpu")

    def device(self, *_args: Any) -> Any:
        """Return a context manager that does nothing."""
        return nullcontext()

    stream = device

    def current_stream(self, *_args: Any) -> _NullStream:
        """Return the only stream."""
        return self._stream

    default_stream = current_stream

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes that autocast may use."""
        return [torch.bfloat16, torch.float16]

    def mem_get_info(self, *_args: Any) -> tuple[int, int]:
        """Return (free, total) bytes of the device; nothing is ever used."""
        return self.nbytes, self.nbytes

    def memory_allocated(self, *_args: Any) -> int:
        """Return 0: the plan's recorder counts memory instead."""
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated


_accelerator: Accelerator | None = None


def accelerator() -> torch.device:
    """Return the simulated accelerator; the first call registers it with torch until the process ends.

    Raises:
        UnsupportedError: torch is too old for devices written in Python, or another device uses torch's private back end.
    """
    global _accelerator
    if _accelerator is None:
        try:
            from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as register
        except ImportError:
            raise UnsupportedError(
                f"torch {torch.__version__} cannot simulate an accelerator: install torch 2.10 or newer, or plan with --device cpu"
            ) from None
        taken = torch._C._get_privateuse1_backend_name()
        if taken != "privateuseone":
            raise UnsupportedError(
                f"this process has registered the accelerator {taken!r}, so a plan cannot register another one: plan in a separate process"
            )
        _accelerator = Accelerator()
        register(rename=DEVICE, backend_module=_accelerator)
    return torch.device(DEVICE, 0)


@contextmanager
def pretended_world(cluster: Cluster, rank: int = 0, messages: Told | None = None) -> Iterator[torch.device]:
    """Make this process one rank of a simulated world inside the ``with``; gives the rank's device.

    Args:
        cluster: Number and place of the ranks.
        rank: Number of this rank.
        messages: Messages that ranks planned before have sent; receives this rank's.

    Raises:
        StateError: This process has a process group already.
    """
    if dist.is_initialized():
        raise StateError("a plan simulates a process group, but this process has a process group already: plan in a separate process")
    device = torch.device("cpu") if cluster.on_host else accelerator()
    settings = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(cluster.near), "RANK": str(rank), "WORLD_SIZE": str(cluster.ranks)}
    if cluster.on_host:
        settings["ACCELERATE_USE_CPU"] = "true"
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        with only_planning(messages):
            pretend_distributed(rank, cluster.ranks, device)
            try:
                yield device
            finally:
                dist.destroy_process_group()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def masks_by_values() -> Iterator[None]:
    """Make transformers decide like in a run, inside the ``with``, whether attention needs a mask; fake tensors would always get one.

    The decision reads values of tensors. Unknown booleans count as true in a plan: positions are consecutive, and tokens are not padding.
    """
    masking = sys.modules.get("transformers.masking_utils")
    if not hasattr(masking, "is_tracing"):
        yield
        return
    with mock.patch.object(masking, "is_tracing", lambda *_: False):
        yield


@contextmanager
def device_attention(flash: bool) -> Iterator[None]:
    """Replace ``scaled_dot_product_attention`` on the simulated device, inside the ``with``, by the operation that CUDA would select.

    Half precision without a mask uses the flash kernel, everything else the memory-efficient kernel (torch's ``sdp_utils.cpp``). Both keep
    the outputs and one number per row of scores. This patches the function, because dispatch modes are off in a backward that recomputes.
    Attention of context parallelism calls the flash kernel itself.

    Args:
        flash: Whether to raise for inputs that the flash kernel does not accept.
    """
    functional = torch.nn.functional
    attend = partial(_attend, functional.scaled_dot_product_attention, flash)
    kernels = mock.patch.object(blocks, "CUDA_KERNELS", [*blocks.CUDA_KERNELS, DEVICE])
    with mock.patch.object(functional, "scaled_dot_product_attention", attend), kernels:
        yield


@dataclass(frozen=True)
class _Rules:
    """Arguments of ``scaled_dot_product_attention`` after query, key and value, with torch's names and defaults."""

    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def _attend(usual: Any, flash: bool, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if query.device.type != DEVICE:
        return usual(query, key, value, *args, **kwargs)
    rules = _Rules(*args, **kwargs)
    mask = rules.attn_mask
    if mask is None and query.dtype in _HALF and query.shape[-1] <= _MOST_WIDTH:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        return kernel(query, key, value, rules.dropout_p, rules.is_causal, False, scale=rules.scale)[0]
    if flash:
        raise ConfigError(
            f"--attention flash: the kernel takes 16 bit, no mask and heads of width up to {_MOST_WIDTH}; the model has {query.dtype}, "
            f"{'a mask' if mask is not None else 'no mask'} and heads of width {query.shape[-1]}. Use --attention sdpa"
        )
    if rules.enable_gqa and key.shape[1] != query.shape[1]:
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    if mask is not None:
        mask = (mask.to(query.dtype) if mask.dtype == torch.bool else mask).expand(*query.shape[:3], key.shape[2])
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, mask, True, rules.dropout_p, rules.is_causal, scale=rules.scale)[0]


class Choices(TorchDispatchMode):
    """Dispatch mode that keeps the values of integers and booleans derived from choices of experts; see [Note: known choices].

    It must also be entered during backward, which reverses the selection by masks.

    Attributes:
        any: Whether ``model`` has layers that call experts one by one.

    Args:
        model: The model; the mode replaces the forwards of its layers that call experts one by one.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._values: Any = WeakTensorKeyDictionary()
        self._count = 0  # number of experts of the running layer; 0 outside of such layers
        layers = {id(layer.module): layer for layer in listed_experts(model)}
        for layer in layers.values():
            layer.module.forward = partial(self._run, layer.module.forward, layer.count)  # type: ignore[method-assign]
        self.any = bool(layers)

    def _run(self, forward: Callable[..., Any], count: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a layer with ``count`` experts."""
        before, self._count = self._count, count
        try:
            return forward(*args, **kwargs)
        finally:
            self._count = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation on fake tensors, and also on values if all its inputs have known values."""
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if self._count and func._overloadpacket in _FILLED:
            return self._filled(func, args, kwargs)
        if given and all(tensor in self._values for tensor in given):
            return self._computed(func, args, kwargs, given[0].device)
        if func in _BY_MASK:
            args = (args[0], [place for index in args[1] for place in self._places(index)], *args[2:])
        result = func(*args, **kwargs)
        if func._schema.is_mutable and given:
            self._forget(given[0])
        if self._count and func in _CHOOSE:
            self._choose(args[0], result[-1] if isinstance(result, (tuple, list)) else result)
        return result

    def _computed(self, func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        """Return the result of ``func``, and store its values; all tensor arguments have known values."""
        with _disable_current_modes():
            values = func(*tree_map_only(torch.Tensor, self._values.__getitem__, args), **_on_host(kwargs))
        if func is _NUMBER_OF:
            return values
        try:
            result = func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            result = tree_map_only(torch.Tensor, lambda value: torch.empty(value.shape, dtype=value.dtype, device=device), values)
        for tensor, value in zip(tree_leaves(result), tree_leaves(values), strict=True):
            if isinstance(tensor, torch.Tensor):
                self._values[tensor] = value
        return result

    def _filled(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation that creates a tensor (``zeros``, ``arange``, ...); store its values if they are integers or booleans."""
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and not result.is_floating_point():
            with _disable_current_modes():
                like = tree_map_only(torch.Tensor, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"), args)
                self._values[result] = func(*like, **_on_host(kwargs))
        return result

    def _choose(self, scores: torch.Tensor, indices: torch.Tensor) -> None:
        """Assign experts to ``indices`` in turn, one row after the other, if ``scores`` has one score per expert."""
        if not scores.is_floating_point() or scores.shape[-1:] != (self._count,):
            return
        width = indices.shape[-1] if indices.dim() == scores.dim() else 1
        with _disable_current_modes():
            rows = torch.arange(indices.numel() // width, device="cpu").unsqueeze(-1)
            self._values[indices] = ((rows + torch.arange(width, device="cpu")) % self._count).view(indices.shape)

    def _forget(self, tensor: torch.Tensor) -> None:
        """Drop the values of ``tensor`` and of tensors that share its memory, after a write of unknown values."""
        if tensor in self._values:
            memory = self._values[tensor].untyped_storage()._cdata
            for other in [other for other, value in self._values.items() if value.untyped_storage()._cdata == memory]:
                del self._values[other]

    def _places(self, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Return ``index`` itself; for a boolean mask with known values, index tensors with the number of true elements."""
        if index is None or index.dtype != torch.bool or index not in self._values:
            return [index]
        with _disable_current_modes():
            count = int(self._values[index].sum())
        return [torch.empty(count, dtype=torch.int64, device=index.device) for _ in range(index.dim())]


def _on_host(kwargs: Any) -> Any:
    return {name: torch.device("cpu") if name == "device" and value is not None else value for name, value in kwargs.items()}
