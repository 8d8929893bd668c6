"""Return results of the last stage on every rank: shapes at once, values when a script reads them (most logits are never read)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from hf_zero.comm.collectives import Collectives
from hf_zero.system.trees import map_tensors, without_values

# These attributes and functions are known before the values are.
_KNOWN = {
    *(vars(torch._C.TensorBase)[name].__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda")),
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.__len__,
    torch.Tensor.is_floating_point,
    torch.Tensor.stride,
    torch.Tensor.element_size,
}
_GRAD_FN = vars(torch._C.TensorBase)["grad_fn"].__get__


class PendingTensor(torch.Tensor):
    """A tensor whose values the first operation on it fetches; that operation is collective over the ranks of a pipeline.

    Shape, type and device are known without the values. Every rank of the pipeline has to run the same operation, as scripts that run alike
    on all ranks do. The engine registers hooks on the model's results without reading values: such hooks wait for the tensor.
    """

    _fetch: Callable[[], torch.Tensor]
    _value: torch.Tensor | None
    _source: Any
    _hooks: OrderedDict[int, Callable[[torch.Tensor], Any]]  # a type that a RemovableHandle can refer to

    @staticmethod
    def __new__(cls, like: torch.Tensor, device: torch.device, fetch: Callable[[], torch.Tensor], source: Any) -> PendingTensor:
        """Return a placeholder for the result of ``fetch``, with the shape and type of ``like``; its gradient flows to the node
        ``source``.
        """
        made: PendingTensor = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=device)
        made._fetch, made._value, made._source, made._hooks = fetch, None, source, OrderedDict()
        return made

    @property
    def value(self) -> torch.Tensor:
        """Return the tensor itself; the first call is collective."""
        if self._value is None:
            self._value = self._fetch()
            for hook in self._hooks.values() if self._value.requires_grad else ():  # on the last stage it may need no gradient
                self._value.register_hook(hook)
        return self._value

    def _hold(self, hook: Callable[[torch.Tensor], Any]) -> RemovableHandle:
        """Keep ``hook`` and register it when the tensor has been fetched."""
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the values if they have been fetched, else the shape."""
        if self._value is not None:
            return repr(self._value)
        return f"PendingTensor(shape={tuple(self.shape)}, dtype={self.dtype}, on the last stage of the pipeline)"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        first = args[0] if args else None
        if isinstance(first, PendingTensor) and first._value is None and first._source is not None:
            if func == _GRAD_FN:
                return first._source
            if func == torch.Tensor.register_hook:
                return first._hold(*args[1:], **(kwargs or {}))
        args, kwargs = tree_map_only(PendingTensor, lambda pending: pending.value, (args, dict(kwargs or {})))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(PendingTensor, lambda pending: pending.value, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


class ResultShapes:
    """Results without values, by the arguments of the model; broadcast when they are new, else a vote confirms that they are unchanged.

    A result may have another shape with each batch, even for equal arguments. So the last stage always reports whether its shape has
    changed, and all ranks take the same path.

    Args:
        pipe: The ranks of the pipeline.
        source: The rank of the pipeline that runs the last stage.
    """

    def __init__(self, pipe: Collectives, source: int) -> None:
        self._pipe = pipe
        self._source = source
        self._known: dict[str, Any] = {}

    def agree(self, given: Mapping[str, Any], result: Any, more: Any = None) -> tuple[Any, Any]:
        """Return the last stage's ``result`` with tensors on the device "meta", and its ``more``, on every rank; collective.

        Args:
            given: Arguments of the model, of the same shapes on every rank.
            result: The result, on the rank of the last stage; ignored elsewhere.
            more: A small object to broadcast with it.
        """
        here, key = self._pipe.rank == self._source, _described(given)
        own = (map_tensors(result, without_values), more) if here else None
        known = self._known.get(key)
        if known is None or self._pipe.any_rank(here and _described(own) != _described(known), "other results"):
            self._known[key] = known = self._pipe.broadcast_object(own, self._source, "shape of the result")
        return known  # type: ignore[no-any-return]


def _described(tree: Any) -> str:
    return repr(map_tensors(tree, lambda tensor: (tuple(tensor.shape), tensor.dtype)))
