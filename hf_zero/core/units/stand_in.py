"""Define placeholder tensors of sharded parameters: they have shape, dtype and device, and raise an error when values are needed."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch

from hf_zero.errors import StateError

_META = torch.device("meta")


_NO_VALUES = "this rank's state dict has no values of it, and a file would be empty"


def refusal(name: str, attempt: str = _NO_VALUES) -> StateError:
    """Return the error for an attempt to read or write the values of a sharded parameter.

    Args:
        name: Name of the parameter.
        attempt: The operation that was tried, as a clause.
    """
    return StateError(
        f"parameter {name} is divided over the ranks (ZeRO stage 3, experts, a pipeline), or offloaded: {attempt}. To read or write it, "
        "enter `with hf_zero.zero.GatheredParameters([parameter], modifier_rank=0):` on all ranks, or call "
        "hf_zero.utils.safe_get_full_fp32_param(parameter) on all ranks. To average weights, use hf_zero.utils.AveragedWeights(engine), "
        "which needs no gather. To save, use save_model(folder) of the class that trains; or, called by all ranks, "
        "engine.save_16bit_model(folder) or model.save_pretrained(folder, state_dict=accelerator.get_state_dict(engine), "
        "is_main_process=accelerator.is_main_process) (a gather does not serve experts and pipelines)"
    )


class StandIn(torch.Tensor):
    """A tensor without memory that represents a sharded parameter by its name; operations that need values raise.

    It reports the device that it was made for, but its real device is meta: torch then refuses to make it the ``data`` of an ordinary
    tensor, whose reads would access no memory.

    Attributes:
        parameter: Name of the parameter that it represents.
        source: The parameter itself, or None; a weak reference, so that a tensor kept by a script keeps no model alive.
        shown_device: The device that it reports.
    """

    parameter: str
    shown_device: torch.device
    _own_storage: torch.UntypedStorage
    _source: ref[Any] | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def make(cls, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
        """Return a placeholder of this class for parameter ``name``."""
        tensor: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=_META, dispatch_device=True)  # type: ignore[attr-defined]
        tensor.parameter = name
        tensor._source = None
        tensor.shown_device = device
        tensor._own_storage = torch.UntypedStorage(1)  # unique, so that no search mistakes two placeholders for tied weights
        return tensor

    @property
    def source(self) -> Any:
        """Return the parameter itself, or None if it no longer exists."""
        return self._source() if self._source is not None else None

    @source.setter
    def source(self, value: Any) -> None:
        self._source = ref(value) if value is not None else None

    def like(self) -> Any:
        """Return another placeholder of the same parameter."""
        other = type(self).make(self.parameter, self.shape, self.dtype, self.shown_device)
        other.source = self.source
        return other

    def refused(self, attempt: str) -> StateError:
        """Return the error for ``attempt``, a clause that names an operation which needs values."""
        return refusal(self.parameter, attempt)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Return the device, or another placeholder for ``detach`` and empty padding; raise for all other operations."""
        first = next(arg for arg in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(arg, StandIn))
        if func is torch.ops.prim.device.default:
            return first.shown_device
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return first.like()
        if func is torch.ops.aten.constant_pad_nd.default and not any(args[1]):  # libraries pad a bias to the size of its weight
            return first.like()
        raise first.refused(_attempt(func))

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the device that the placeholder reports."""
        return self.shown_device

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.parameter}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise self.refused("a copy of it would have no values")

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return a storage of one byte that no other tensor shares."""
        return self._own_storage

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.refused("its bytes were requested")

    def data_ptr(self) -> int:
        """Raise, because the caller needs the bytes."""
        raise self.refused("its bytes were requested")

    def numpy(self, *, force: bool = False) -> Any:
        """Raise, because the caller needs the values."""
        raise self.refused("it was converted to an array")

    def tolist(self) -> Any:
        """Raise, because the caller needs the values."""
        raise self.refused("it was converted to a list")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise self.refused("its memory was requested")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise self.refused("it was converted to an array")

    def __bool__(self) -> bool:
        raise self.refused("its truth value was requested")


class EmptyValues(StandIn):
    """The result of ``param.data`` and ``param.detach()`` of an empty parameter."""


def _attempt(func: Any) -> str:
    return f"{getattr(func, '__name__', str(func)).split('.')[0]} was called with its values"
