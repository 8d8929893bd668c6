"""Fix which experts the tokens of a plan choose, in layers that call their experts one by one.

[Note: known choices] A layer with a list of experts looks up the tokens that chose each expert, so shapes depend on values, which fake
tensors do not have. Inside such a layer the choices get values: an operation that selects the k best of as many scores as there are experts
assigns the experts in turn, so that tokens are spread evenly. Operations whose inputs are all integers or booleans with known values are
also computed with these values. So masks, counts and positions of tokens have the same shapes as in a run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from hf_zero.expert_parallel.find import listed_experts

_aten = torch.ops.aten
_CHOOSE = (_aten.topk.default, _aten.sort.default, _aten.sort.stable, _aten.argmax.default, _aten.max.dim)
_NUMBER_OF = _aten._local_scalar_dense.default
_FILLED = (
    _aten.zeros, _aten.ones, _aten.full, _aten.arange, _aten.scalar_tensor, _aten.zeros_like, _aten.ones_like, _aten.full_like,
    _aten.new_zeros, _aten.new_ones, _aten.new_full,
)  # fmt: skip
_BY_MASK = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)


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
