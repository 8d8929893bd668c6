"""Let a loss compute with whole parameters where this rank holds parts of them.

[Note: parts in a loss] Tensor parallelism and experts divide a parameter: this rank's tensor is a part of it, which is right for the
forward of the parameter's own module and wrong for a penalty in the loss (``weight.norm()``), by name or by iteration. So between a forward
and its backward a divided parameter has the class ``DividedParameter``, whose ``__torch_function__`` gives an operation that builds a graph
the whole parameter: a differentiable gather, whose backward gives this rank its part of the gradient. The class distinguishes such
operations from reads of the part by three conditions: gradients are on (an average of weights is computed without), no module of the model
runs (a loss may call a part of the model), and the operation computes, unlike a question about dtype, a comparison, ``detach()`` or a write
to the part. Shapes are whole, too: a penalty may divide by ``numel()``; ``param.data`` has that of the part. A parameter of which each rank
has a copy, but whose gradient is a sum over ranks, is read in the same way: only one rank passes the gradient of the penalty on.

Outside of a loss nothing may communicate: one rank alone may log a norm. There a divided parameter has the class ``IdlePart``, which
computes with the part, and whose graphs raise an error in backward: a penalty from before the forward would count the part.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from hf_zero.core.units.marks import is_elsewhere, own_shape, tp_shard_of, whole_shape
from hf_zero.core.units.parts import REDUCTIONS, SHAPES, WITHOUT_FUNCTION, is_divided, joins, of_whole_shape, part_of
from hf_zero.core.units.sharded_parameter import WaitingParameter, free_functions
from hf_zero.errors import StateError, UnsupportedError
from hf_zero.observe import warn_once

_places: WeakKeyDictionary[nn.Module, dict[str, ref[torch.Tensor]]] = WeakKeyDictionary()  # parts by name in the module that owns them
_partial: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_wholes: dict[int, tuple[int, torch.Tensor]] = {}  # by id of the part: its version, and the whole tensor
_inside = [0]  # number of running forwards of modules that have divided parameters, outside of a forward of their model
_LOCAL = (
    "detach", "equal", "allclose", "isnan", "isinf", "isfinite", "eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__",
    "__le__", "__gt__", "__ge__", "item", "tolist", "numpy", "cpu", "backward", "__array__", "__bool__", "__float__", "__int__",
    "__index__", "__dlpack__", "dim", "ndimension", "__setitem__",
)  # fmt: skip


def mark_partial(module: nn.Module, text: str) -> None:
    """Register ``text``, which says of which tensors hooks on ``module`` see this rank's part, for a warning."""
    _partial[module] = text


class DividedParameter(WaitingParameter):
    """A part, or a copy whose gradients are summed over ranks, that a loss may read ([Note: parts in a loss]); its gradient may wait for a
    step.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _inside[0]:
            if not torch.is_grad_enabled():
                _warn(func, args)
            elif func is torch.autograd.grad:
                return _gradients(func, args, kwargs)
            elif func in SHAPES:
                return of_whole_shape(func, args, kwargs)
            elif not _is_local(func, args, kwargs):
                args, kwargs = _with_wholes((args, kwargs))
                return func(*args, **kwargs)
        with WITHOUT_FUNCTION():
            return func(*args, **kwargs)


class _Refused(torch.autograd.Function):
    """A part; backward raises an error."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, called: str) -> torch.Tensor:
        ctx.name, ctx.called = joins[part][1], called
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> Any:  # type: ignore[override]
        """Raise.

        Raises:
            StateError: Always.
        """
        raise StateError(
            f"a loss contains {ctx.called} of {ctx.name}, computed before the model's forward or after its backward, where this rank has a "
            "part of the parameter (tensor parallelism, experts). Compute it between the forward and the backward: there it is whole"
        )


class IdlePart(WaitingParameter):
    """A part outside of forward, loss and backward, see [Note: parts in a loss]; its gradient may wait for a step."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        computes = not _is_local(func, args, kwargs)
        if computes:
            _warn(func, args)
        refuses = computes and torch.is_grad_enabled()
        with WITHOUT_FUNCTION():
            if refuses and _has_only_parts((args, kwargs)):
                called = f"{getattr(func, '__name__', func)}()"
                args, kwargs = tree_map_only(IdlePart, lambda part: _Refused.apply(part, called), (args, kwargs))
            return func(*args, **kwargs)


def _has_only_parts(given: Any) -> bool:
    """Return whether all tensors in ``given`` are parts, or have the shape of one (values of it that a script has kept); otherwise it is a
    layer's product of a weight and its input.
    """
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    shapes = {part.shape for part in tensors if isinstance(part, IdlePart)}
    return all(tensor.shape in shapes for tensor in tensors)


def require_own_parts(module: nn.Module) -> None:
    """Raise if a script has replaced a divided parameter of ``module`` by a new one; local.

    Raises:
        UnsupportedError: It has.
    """
    for leaf, former in _places.get(module, {}).items():
        param, own = module._parameters.get(leaf), former()
        if isinstance(param, nn.Parameter) and own is not None and param is not own:
            raise UnsupportedError(
                f"{joins[own][1]}: a new parameter {tuple(param.shape)} was put in its place after initialize(), in a model that several "
                "ranks hold together (tensor parallelism, experts), which is not supported. Copy this rank's part of the values into the "
                "parameter (param.data.copy_(part)), or replace the parameter before initialize()"
            )


def _rest(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let the parameters of ``module`` be parts again before values of ``state`` are loaded into them (a hook): torch compares the shapes.
    Cut whole values.
    """
    for leaf, param in module._parameters.items():
        if type(param) is DividedParameter:
            param.__class__ = IdlePart  # type: ignore[assignment]
        value = state.get(prefix + leaf)
        if param is None or not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, nn.Parameter):
            continue
        if is_divided(param) and value.shape == whole_shape(param) != own_shape(param):
            state[prefix + leaf] = part_of(param, value)


def _hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def _is_foreign(hook: Any) -> bool:
    """Return whether a script or library has registered ``hook``, and not this package or torch."""
    while isinstance(hook, partial):
        hook = hook.func
    return not str(getattr(hook, "__module__", "")).startswith(("hf_zero.", "torch."))


def has_hooks_of_scripts(param: torch.Tensor) -> bool:
    """Return whether a script or library has registered a hook on the gradient of ``param``."""
    found: Any = (param._backward_hooks, param._post_accumulate_grad_hooks)
    return any(_is_foreign(hook) for hooks in found for hook in (hooks or {}).values())


def _has_rest(module: nn.Module) -> bool:
    return any(getattr(hook, "hook", hook) is _rest for hook in module._load_state_dict_pre_hooks.values())


class PartsInLoss:
    """Manager of the classes of one model's divided parameters.

    Args:
        module: The model; parameters that are registered later are not noticed.
    """

    def __init__(self, module: nn.Module) -> None:
        # Another stage of a pipeline computes the values of a parameter that is elsewhere.
        self._params = [param for param in module.parameters() if param in joins and not is_elsewhere(param)]
        self._modules = {id(inner) for inner in module.modules()} if self._params else set()
        self._handles: list[RemovableHandle] = []
        self._owners = []
        for inner in module.modules() if self._params else ():
            own: dict[str, ref[torch.Tensor]] = {
                leaf: ref(param) for leaf, param in inner._parameters.items() if param is not None and param in joins
            }
            if own:
                _places[inner] = own
                self._owners.append(inner)
                if not _has_rest(inner):
                    inner.register_load_state_dict_pre_hook(_rest)

    def require_own(self) -> None:
        """Raise if a script has replaced a divided parameter by a new one, whose part nobody knows; warn of hooks that see parts. Local.

        Raises:
            UnsupportedError: It has.
        """
        hooked = next((param for param in self._params if has_hooks_of_scripts(param)), None)
        if hooked is not None:
            warn_once(
                f"{joins[hooked][1]}: its hook (register_hook, register_post_accumulate_grad_hook) sees the gradient of this rank's part "
                f"{tuple(own_shape(hooked))} of {tuple(whole_shape(hooked) or own_shape(hooked))} (tensor parallelism, experts): a norm or "
                'mean there covers only this part. Change param.grad after the backward, with "hf_zero": {"show_gradients": true}'
            )
        for inner in self._owners:
            require_own_parts(inner)
            if inner in _partial and any(_is_foreign(hook) for hooks in _hooks_of(inner) for hook in hooks.values()):
                warn_once(
                    f"{_partial.pop(inner)}: hooks that compute a value from all elements (norm, mean) see only this rank's part. To hook "
                    'the whole layer, keep it whole: tensor_parallel.partition_config.layer_specs, "partition_type": "skip"'
                )

    def __bool__(self) -> bool:
        """Return whether the model has divided parameters."""
        return bool(self._params)

    @property
    def shown(self) -> bool:
        """Return whether a loss may compute with whole parameters now."""
        return bool(self._handles)

    def show(self) -> None:
        """Show whole parameters to a loss from now on; local. Parameters that are sharded now do not change."""
        if not self._params:
            return
        self._set(DividedParameter)
        if not self._handles:
            _inside[0] = 0
            self._handles = [
                register_module_forward_pre_hook(self._entered),
                register_module_forward_hook(self._left, always_call=True),
            ]

    def rest(self) -> None:
        """Make graphs of parts raise in backward from now on; local."""
        if self._params:
            self._forget()
            self._set(IdlePart)

    def hide(self) -> None:
        """Undo ``show`` and ``rest``, because a forward or backward begins; local."""
        if self._params:
            self._forget()
            self._set(nn.Parameter)

    def _set(self, kind: type[nn.Parameter]) -> None:
        for param in self._params:
            if type(param) in _KINDS:
                param.__class__ = kind  # type: ignore[assignment]

    def _forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._handles:
            _inside[0] = 0
            for param in self._params:
                _wholes.pop(id(param), None)
        self._handles = []

    def _entered(self, module: nn.Module, _args: Any) -> None:
        _inside[0] += id(module) in self._modules

    def _left(self, module: nn.Module, _args: Any, _output: Any) -> None:
        _inside[0] -= id(module) in self._modules


_KINDS = frozenset((nn.Parameter, WaitingParameter, DividedParameter, IdlePart))


def _warn(func: Any, args: Any) -> None:
    """Warn once per parameter if ``func``, which the script calls where nothing is gathered, reduces a part to a number."""
    if getattr(func, "__name__", "") in REDUCTIONS and args and type(args[0]) in _KINDS and (shape := whole_shape(args[0])) is not None:
        warn_once(
            f"{func.__name__}() of {joins[args[0]][1]} is that of this rank's part {tuple(args[0].data.shape)} of {tuple(shape)} (tensor "
            "parallelism, experts). It is that of the whole parameter in a loss: between forward and backward, with gradients on, on all "
            "ranks"
        )


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
    wholes = {place: joins[inputs[place]][0] for place, part in parts.items() if part is not None}
    with WITHOUT_FUNCTION():
        found = func(*args, **kwargs)
        return tuple(grad if grad is None or place not in wholes else wholes[place](grad) for place, grad in enumerate(found))


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
    return (leaf for leaf in tree_leaves(given) if isinstance(leaf, (DividedParameter, IdlePart)))


def _shape(tensor: torch.Tensor) -> torch.Size:
    with WITHOUT_FUNCTION():
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
        return joins[part][0](tensor)

    return tree_map_only(torch.Tensor, replaced, given)


def _whole(part: Any) -> torch.Tensor:
    with WITHOUT_FUNCTION():
        version, kept = part._version, _wholes.get(id(part))
        if kept is not None and kept[0] == version:
            return kept[1]
        whole = joins[part][0](part)
    _wholes[id(part)] = version, whole
    return whole
