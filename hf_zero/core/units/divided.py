"""Let a loss compute with whole parameters where this rank holds parts of them.

[Note: parts in a loss] Tensor parallelism and experts divide a parameter: this rank's tensor is a part of it, which is right for the
forward of the parameter's own module and wrong for a penalty in the loss (``weight.norm()``), by name or by iteration. So between a forward
and its backward a divided parameter has the class ``DividedParameter``, whose ``__torch_function__`` gives an operation that builds a graph
the whole parameter: a differentiable gather, whose backward gives this rank its part of the gradient. The class distinguishes such
operations from reads of the part by four conditions: gradients are on (an average of weights is computed without), no module of the model
runs (a loss may call a part of the model), the operation computes, unlike a question about dtype, a comparison, ``detach()`` or a write to
the part, and the caller is neither this package nor torch's own code for modules (a forward without a backward may be followed by a save). Shapes are whole, too: a penalty may divide by ``numel()``. A parameter of which each rank has a copy, but whose gradient is a
sum over ranks, is read in the same way: only one rank passes the gradient of the penalty on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from hf_zero.core.units.marks import tp_shard_of, whole_shape
from hf_zero.core.units.sharded_parameter import WaitingParameter, free_functions, temporary
from hf_zero.errors import StateError, UnsupportedError

Join = Callable[[torch.Tensor], torch.Tensor]
_joins: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_wholes: dict[int, tuple[int, torch.Tensor]] = {}  # by id of the part: its version, and the whole tensor
_inside = [0]  # number of running forwards of modules that have divided parameters, outside of a forward of their model
_MACHINERY = ("hf_zero.", "torch.nn.modules.", "torch.optim.", "safetensors.")  # their code works with parts
_WITHOUT_FUNCTION: Any = torch._C.DisableTorchFunctionSubclass
_LOCAL = (
    "detach", "equal", "allclose", "isnan", "isinf", "isfinite", "eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__",
    "__le__", "__gt__", "__ge__", "item", "tolist", "numpy", "cpu", "backward", "__array__", "__bool__", "__float__", "__int__",
    "__index__", "__dlpack__", "dim", "ndimension", "__setitem__",
)  # fmt: skip
_SHAPES = frozenset(
    (torch.Tensor.shape.__get__, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.nelement, torch.numel, torch.Tensor.__len__)  # type: ignore[attr-defined]
)


def mark_join(param: torch.Tensor, join: Join) -> None:
    """Register ``join`` for losses that compute with ``param``, see [Note: parts in a loss].

    ``join(part)`` returns the whole parameter; its backward gives ``param`` this rank's part of the gradient. Both may be collective over
    the ranks that divide the parameter. The record is kept beside the parameter, because attributes of a parameter are pickled.
    """
    _joins[param] = join


def is_joined(param: torch.Tensor) -> bool:
    """Return whether ``mark_join`` was called for ``param``."""
    return param in _joins


class DividedParameter(WaitingParameter):
    """A part, or a copy whose gradients are summed over ranks, that a loss may read ([Note: parts in a loss]); its gradient may wait for a
    step.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asks = sys._getframe(1).f_globals.get("__name__", "")
        if torch.is_grad_enabled() and not _inside[0] and not asks.startswith(_MACHINERY):
            if func is torch.autograd.grad:
                return _gradients(func, args, kwargs)
            if func in _SHAPES:
                return of_whole_shape(func, args, kwargs)
            if not _is_local(func, args, kwargs):
                args, kwargs = _with_wholes((args, kwargs))
                return func(*args, **kwargs)
        with _WITHOUT_FUNCTION():
            return func(*args, **kwargs)


temporary.add(DividedParameter)


class PartsInLoss:
    """Manager of the classes of one model's divided parameters: ``show`` before a loss, ``hide`` before everything else.

    Args:
        module: The model; parameters that are registered later are not noticed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._params = [param for param in module.parameters() if is_joined(param)]
        self._modules = {id(inner) for inner in module.modules()} if self._params else set()
        self._handles: list[RemovableHandle] = []
        self._former: dict[int, type[Any]] = {}  # classes of parameters that are shown, by id

    def show(self) -> None:
        """Let code compute with the whole parameters from now on; local. Parameters that are sharded now do not change."""
        if not self._params:
            return
        for param in self._params:
            if type(param) in (nn.Parameter, WaitingParameter):
                self._former[id(param)] = type(param)
                param.__class__ = DividedParameter  # type: ignore[assignment]
        if not self._handles:
            _inside[0] = 0
            self._handles = [
                register_module_forward_pre_hook(self._entered),
                register_module_forward_hook(self._left, always_call=True),
            ]

    def hide(self) -> None:
        """Undo ``show``; local."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles, _inside[0] = [], 0
        for param in self._params:
            _wholes.pop(id(param), None)
            if type(param) is DividedParameter:
                param.__class__ = self._former[id(param)]
        self._former.clear()

    def _entered(self, module: nn.Module, _args: Any) -> None:
        _inside[0] += id(module) in self._modules

    def _left(self, module: nn.Module, _args: Any, _output: Any) -> None:
        _inside[0] -= id(module) in self._modules


def of_whole_shape(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of ``func``, a question about the shape of a divided parameter (its first argument), for the whole parameter."""
    with _WITHOUT_FUNCTION():
        part = args[0]
        shape = whole_shape(part) or part.shape
        return func(torch.empty(shape, dtype=part.dtype, device="meta"), *args[1:], **kwargs)


def _gradients(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of ``torch.autograd.grad``, with whole gradients of parts.

    Raises:
        UnsupportedError: An input is a part of a parameter of experts: ranks have other batches, and its gradient is that of all of them.
    """
    inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    parts = {place: tp_shard_of(tensor) for place, tensor in enumerate(inputs) if isinstance(tensor, DividedParameter)}
    if any(part is not None and part.expert for part in parts.values()):
        raise UnsupportedError(
            "torch.autograd.grad was called for a parameter of experts that are divided over ranks (expert_parallel): its gradient "
            "includes the tokens of other ranks' batches. Use another parameter, or remove expert_parallel"
        )
    joins = {place: _joins[inputs[place]] for place, part in parts.items() if part is not None}
    with _WITHOUT_FUNCTION():
        found = func(*args, **kwargs)
        return tuple(grad if grad is None or place not in joins else joins[place](grad) for place, grad in enumerate(found))


@cache
def _local() -> frozenset[Any]:
    """Return the functions whose operand stays the part: questions that need no values, and reads that one rank makes for its log."""
    found = {getattr(place, name) for place in (torch.Tensor, torch) for name in _LOCAL if hasattr(place, name)}
    data: Any = torch.Tensor.data
    ndim: Any = torch.Tensor.ndim
    return frozenset((*free_functions(), *found, data.__get__, data.__set__, ndim.__get__))


def _is_local(func: Any, args: Any, kwargs: Any) -> bool:
    if func in _local():
        return True
    name = getattr(func, "__name__", "")
    if name in ("view_as", "expand_as"):
        return args[0] is args[1]  # asks for the node of the graph that accumulates the gradient
    first = args[0][0] if args and isinstance(args[0], (list, tuple)) and args[0] else args[0] if args else None
    writes = (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name.endswith("__")) or "out" in kwargs
    return writes and isinstance(first, torch.Tensor) and any(_shape(first) == _shape(part) for part in _parts((args, kwargs)))


def _parts(given: Any) -> Iterable[Any]:
    return (leaf for leaf in tree_leaves(given) if isinstance(leaf, DividedParameter))


def _shape(tensor: torch.Tensor) -> torch.Size:
    with _WITHOUT_FUNCTION():
        return tensor.shape


def _with_wholes(given: Any) -> Any:
    """Return ``given`` with whole parameters for parts; other tensors of the shape of a part (values of it that a script has kept) are
    joined in the same way.

    Raises:
        StateError: Parts of one shape that are divided differently are given together with another tensor of their shape.
    """
    divided = {_shape(part): part for part in _parts(given) if whole_shape(part) is not None}

    def replaced(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DividedParameter):
            return _whole(tensor)
        part = divided.get(tensor.shape)
        if part is None:
            return tensor
        if any(_shape(other) == tensor.shape and tp_shard_of(other) != tp_shard_of(part) for other in _parts(given)):
            raise StateError(
                f"one operation of a loss was given several divided parameters and a tensor of shape {tuple(tensor.shape)}, which could be "
                "a part of each: compute the loss one parameter at a time"
            )
        return _joins[part](tensor)

    return tree_map_only(torch.Tensor, replaced, given)


def _whole(part: Any) -> torch.Tensor:
    with _WITHOUT_FUNCTION():
        version, kept = part._version, _wholes.get(id(part))
        if kept is not None and kept[0] == version:
            return kept[1]
        whole = _joins[part](part)
    _wholes[id(part)] = version, whole
    return whole
