"""Define the class of a parameter without values, and its placeholder tensors, which have shape, dtype and device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from numbers import Number
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_zero.core.units.marks import is_packed, tracing_now, unshard_in_trace
from hf_zero.errors import StateError

_META = torch.device("meta")
_NO_VALUES = "this rank's state dict has no values of it, and a file would be empty"
OWNER = "_hf_zero_owner"
_GRAD: Any = torch.Tensor.grad  # torch's own property
_NDIM: Any = torch.Tensor.ndim
_WITHOUT_FUNCTION: Any = torch._C.DisableTorchFunctionSubclass

_VALUES = ("data", "T", "mT", "H", "mH", "real", "imag", "ndim", "__cuda_array_interface__")
_OF_SHAPE: Any = dict.fromkeys((torch.Tensor.dim, torch.Tensor.ndimension, _NDIM.__get__), len)
_OF_SHAPE[torch.Tensor.__len__] = lambda shape: len(torch.empty(shape, device=_META))  # raises TypeError without a dimension, as torch
_COUNTS = frozenset((torch.Tensor.numel, torch.Tensor.nelement))
_counts_whole = False  # see `counts_whole_sizes`
_QUESTIONS = (
    "size", "numel", "nelement", "stride", "storage_offset", "element_size", "dim_order", "get_device",
    "is_complex", "is_conj", "is_contiguous", "is_distributed", "is_floating_point", "is_inference", "is_neg", "is_pinned",
    "is_same_size", "is_shared", "is_signed", "is_coalesced", "is_set_to", "has_names", "_is_view", "_is_zerotensor", "_use_count",
    "data_ptr", "untyped_storage", "storage", "_typed_storage",
    "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "detach_",
    "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided", "new",
    "__hash__", "__repr__", "__str__", "__format__", "__dir__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__sizeof__",
    "__setstate__", "__getstate__", "_reduce_ex_internal", "__dlpack_device__", "_clear_non_serializable_cached_data",
)  # fmt: skip
_CONVERSIONS = (
    "to", "type", "cpu", "cuda", "xpu", "mtia", "float", "double", "half", "bfloat16", "int", "long", "short", "char", "byte", "bool",
    "cfloat", "cdouble", "chalf",
)  # fmt: skip
_COMPARISONS = ("__eq__", "__ne__", "eq", "ne")
_TO_NODE = ("view_as", "expand_as")  # called with the parameter itself, autograd code gets the gradient accumulation node from the result


def refusal(name: str, attempt: str = _NO_VALUES) -> StateError:
    """Return the error for an attempt to read or write the values of sharded parameter ``name``.

    ``attempt`` is a clause that names the operation.
    """
    return StateError(
        f"parameter {name} is divided over the ranks (ZeRO stage 3, experts, a pipeline), or offloaded: {attempt}. To read or write it, "
        "enter `with hf_zero.zero.GatheredParameters([parameter], modifier_rank=0):` on all ranks, or call "
        "hf_zero.utils.safe_get_full_fp32_param(parameter) on all ranks. To average weights, use hf_zero.utils.AveragedWeights(engine), "
        "which needs no gather. To save, use save_model(folder) of the class that trains; or, called by all ranks, "
        "engine.save_16bit_model(folder) or model.save_pretrained(folder, state_dict=accelerator.get_state_dict(engine), "
        "is_main_process=accelerator.is_main_process) (a gather does not serve experts and pipelines)"
    )


class Valueless(torch.Tensor):
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
        first = next(arg for arg in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(arg, Valueless))
        if func is torch.ops.prim.device.default:
            return first.shown_device
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return first.like()
        if func is torch.ops.aten.constant_pad_nd.default and not any(args[1]):  # libraries pad a bias to the size of its weight
            return first.like()
        raise first.refused(f"{getattr(func, '__name__', str(func)).split('.')[0]} was called with its values")

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


class EmptyValues(Valueless):
    """The result of ``param.data`` and ``param.detach()`` of an empty parameter."""

    def dim(self) -> int:
        """Return the number of dimensions of the whole parameter, as the parameter does."""
        return super().dim() if self.source is None else int(self.source.dim())

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Return ``dim()``."""
        return self.dim()

    def __len__(self) -> int:
        """Return the length of the whole parameter, as the parameter does."""
        return super().__len__() if self.source is None else len(self.source)


quiet: list[None] = []  # not empty while code runs that wants gradients as torch has them


@contextmanager
def plain_grad_access() -> Iterator[None]:
    """Make ``param.grad`` torch's own inside the ``with``: for code that clears gradients, or only checks whether one exists."""
    quiet.append(None)
    try:
        yield
    finally:
        quiet.pop()


def set_gradient(param: torch.Tensor, value: torch.Tensor | None) -> None:
    """Set torch's own ``param.grad``; ``gradients_of`` reads it."""
    with _WITHOUT_FUNCTION():
        _GRAD.__set__(param, value)


class _Waiting:
    """Mixin with a ``grad`` that the engine serves where torch has none, see [Note: read gradients]."""

    __slots__ = ()

    @property
    def grad(self: Any) -> torch.Tensor | None:
        """Return the gradient, as for any tensor; while sharded gradients wait for a step, whole or None."""
        with _WITHOUT_FUNCTION():
            found: torch.Tensor | None = _GRAD.__get__(self)
        if (training := _training_of(self)) is not None:
            found = training.read_gradient(*vars(self)[OWNER], found)
        return found

    @grad.setter
    def grad(self: Any, value: torch.Tensor | None) -> None:
        """Set a gradient, or remove it.

        Raises:
            StateError: The engine does not handle the write, and the shape of ``value`` differs from the parameter's present shape.
        """
        training = _training_of(self)
        if training is not None and training.write_gradient(*vars(self)[OWNER], value):
            return
        with _WITHOUT_FUNCTION():
            if isinstance(self, _Empty) and isinstance(value, torch.Tensor) and value.shape != self.shape:  # type: ignore[attr-defined]
                raise _refusal(self, value)
            _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        with _WITHOUT_FUNCTION():
            _GRAD.__delete__(self)


def _training_of(param: Any) -> Any:
    """Return the engine of a parameter, see ``Unit.belongs_to``; None without one, and if torch's own gradient is wanted."""
    owner = None if quiet else vars(param).get(OWNER)
    return owner[0].belongs_to() if owner is not None and owner[0].belongs_to is not None else None


class WaitingParameter(_Waiting, nn.Parameter):
    """An unsharded ``nn.Parameter`` whose sharded gradient waits for a step."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        copied.__class__ = nn.Parameter
        return copied


def mark_waiting(params: Iterable[nn.Parameter | None]) -> None:
    """Give unsharded parameters the class whose ``grad`` the engine serves."""
    for param in params:
        if type(param) is nn.Parameter:
            param.__class__ = WaitingParameter


def unmark_waiting(params: Iterable[nn.Parameter | None]) -> None:
    """Undo ``mark_waiting``."""
    for param in params:
        if type(param) is WaitingParameter:
            param.__class__ = nn.Parameter  # type: ignore[assignment]


class _Empty(_Waiting):
    """Mixin that the class of an empty parameter adds to the class that the parameter has while it is unsharded.

    [Note: the class of an empty parameter] A parameter is an empty tensor between its uses at stage 3, and torch computes with empty
    tensors: a sum is 0, a copy is empty, a comparison is true. So a parameter has another class while it is empty, whose
    ``__torch_function__`` allows questions about shape, type, device and gradient. Other operations unshard the parameter in the model's
    forward and the loss after it, and elsewhere raise with the parameter's name. Size and number of elements are those of the empty tensor,
    by which libraries recognise it. ``dim()`` and ``len()`` are those of the whole parameter: otherwise a script that selects matrices
    (``if p.dim() > 1``, for weight decay or a penalty) would leave out all that are sharded, and one that freezes the rows from 100 to
    ``len(p)`` by a hook would freeze none. ``data`` and ``detach()`` return tensors that also raise (``EmptyValues``), and so do
    conversions while gradients are off: ``nn.Module.cpu()`` and similar methods convert each parameter under ``no_grad`` and assign the
    result to ``data``, which changes nothing. torch compares an assigned gradient with the parameter, and its error message names neither;
    so ``grad`` is a property here. While the model runs, is compiled or is pickled, its unsharded parameters are ordinary
    ``nn.Parameter``s: forward and backward never see this class.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if tracing_now():
            unshard_in_trace(partial(_unsharded_for_use, next(_empty_ones(args, kwargs))))
        if _counts_whole and func in _COUNTS:
            return _shape(args[0]).numel()
        if func in free_functions():
            with _WITHOUT_FUNCTION():
                return func(*args, **(kwargs or {}))
        return _without_values(func, args, kwargs or {})


class ShardedParameter(_Empty, nn.Parameter):
    """An empty ``nn.Parameter`` of a unit, see [Note: the class of an empty parameter]."""


@contextmanager
def counts_whole_sizes() -> Iterator[None]:
    """Make ``numel()`` of empty parameters return the whole size inside the ``with``: a library counts a model's parameters."""
    global _counts_whole
    before, _counts_whole = _counts_whole, True
    try:
        yield
    finally:
        _counts_whole = before


def point(param: nn.Parameter, value: torch.Tensor, empties: bool) -> None:
    """Point ``param.data`` at ``value``; ``empties`` marks the parameter as one without values."""
    with torch._C.DisableTorchFunction():  # no mode may see it: ``ConstructorAccess`` would treat it as a constructor's write
        param.data = value
    set_class(param, empties)


def point_all(params: Iterable[nn.Parameter | None], values: Iterable[torch.Tensor], empties: bool) -> None:
    """Call ``point`` for each parameter and its value, at less cost; None in ``params`` is a parameter that has moved to another unit."""
    held = [pair for pair in zip(params, values, strict=False) if pair[0] is not None]
    with torch._C.DisableTorchFunction():
        for param, value in held:
            param.data = value  # type: ignore[union-attr]
    former, present = (nn.Parameter, ShardedParameter) if empties else (ShardedParameter, nn.Parameter)
    for param, _ in held:
        kind = type(param)
        if kind is former:
            param.__class__ = present  # type: ignore[assignment]
        elif kind is not present:
            set_class(param, empties)  # type: ignore[arg-type]


def gradients_of(params: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return ``param.grad`` of each parameter, empty or not, at less cost than reading the property; None for None."""
    with _WITHOUT_FUNCTION():
        return [None if param is None else _GRAD.__get__(param) for param in params]


def requires_gradient(params: Iterable[torch.Tensor]) -> list[bool]:
    """Return ``param.requires_grad`` of each parameter, empty or not, at less cost than reading the property."""
    with _WITHOUT_FUNCTION():
        return [param.requires_grad for param in params]


def set_class(param: torch.Tensor, empty: bool) -> None:
    """Give ``param`` the class of an empty parameter, or its former class; classes with their own ``__torch_function__`` do not change."""
    kind = type(param)
    if issubclass(kind, WaitingParameter):
        param.__class__ = kind = nn.Parameter  # type: ignore[assignment]
    if kind is (nn.Parameter if empty else ShardedParameter):  # nearly all parameters have one of these classes; runs in each forward
        param.__class__ = ShardedParameter if empty else nn.Parameter  # type: ignore[assignment]
    elif empty and issubclass(kind, ShardedParameter):  # a parameter that shows a placeholder
        param.__class__ = ShardedParameter  # type: ignore[assignment]
    elif empty and not issubclass(kind, _Empty):
        sharded = _empty_class(kind)
        if sharded is not None and not is_packed(param):
            param.__class__ = sharded  # type: ignore[assignment]
    elif not empty and issubclass(kind, _Empty):
        param.__class__ = whole_class(kind)  # type: ignore[assignment]


def whole_class(kind: type[Any]) -> type[Any]:
    """Return the class that a parameter of class ``kind`` has while it is unsharded."""
    return kind.__mro__[kind.__mro__.index(_Waiting) + 1] if issubclass(kind, _Waiting) else kind


@cache
def _empty_class(kind: type[Any]) -> type[Any] | None:
    """Return the class that a parameter of class ``kind`` has while it is empty; None if ``kind`` has its own ``__torch_function__``."""
    plain = issubclass(kind, nn.Parameter) and getattr(kind, "__torch_function__", None) is nn.Parameter.__torch_function__
    return type(f"Sharded{kind.__name__}", (_Empty, kind), {"__slots__": (), "__module__": kind.__module__}) if plain else None


# -- operations on an empty parameter ---------------------------------------------------------------------------------


@cache
def free_functions() -> frozenset[Callable[..., Any]]:
    """Return the functions that need no values: questions about shape, type, device, memory, gradient and hooks."""
    accessors = (getattr(torch.Tensor, name) for name in dir(torch.Tensor) if name not in _VALUES)
    found = {
        getattr(accessor, access)
        for accessor in accessors
        for access in ("__get__", "__set__", "__delete__")
        if hasattr(accessor, "__set__") and not callable(accessor)
    }
    found |= {getattr(place, name) for place in (torch.Tensor, torch) for name in _QUESTIONS if hasattr(place, name)}
    return frozenset((*found, torch.autograd.grad, torch.autograd.backward))


@cache
def _named(names: tuple[str, ...]) -> frozenset[Callable[..., Any]]:
    return frozenset(getattr(place, name) for place in (torch.Tensor, torch) for name in names if callable(getattr(place, name, None)))


_DATA: Any = torch.Tensor.data


def _without_values(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return the result of an operation on an empty parameter if it needs no values or the engine unshards the parameter, or raise.

    Raises:
        StateError: The operation needs values, outside of the model's forward and its loss; the message names the parameter.
    """
    param = args[0] if args and isinstance(args[0], _Empty) else next(_empty_ones(args, kwargs))
    if func in _OF_SHAPE:
        return _OF_SHAPE[func](_shape(param))
    if func == _DATA.__get__ or func in _named(("detach", "full_like")):  # torch's Adagrad makes states of this shape when it is built
        return _empty_values_of(param)
    if func == _DATA.__set__ and param is args[0]:
        _assign(param, args[1])
        return None
    if func is torch.Tensor.copy_ and args[0] is args[1]:
        return param
    if func is torch._has_compatible_shallow_copy_type:
        return args[0] is param and isinstance(args[1], Valueless) and args[1].source is param
    if func in _named(_CONVERSIONS) and not torch.is_grad_enabled() and param is args[0]:
        return _converted(param, func, args, kwargs)
    compared = func in _named(_COMPARISONS) and not isinstance(args[1], (torch.Tensor, Number))  # a comparison with None
    if compared or (func in _named(_TO_NODE) and args[0] is args[1]):
        with _WITHOUT_FUNCTION():
            return func(*args, **kwargs)
    if _unsharded_for_use(param):
        return func(*args, **kwargs)
    raise _refused(param, _called(func))


def _unsharded_for_use(param: Any) -> bool:
    """Return whether the engine has unsharded ``param`` for code of its model that computes with it now; collective if it has."""
    owner = vars(param).get(OWNER)
    if owner is None or owner[0].belongs_to is None or owner[0].own.offloaded:
        return False
    training = owner[0].belongs_to()
    return training is not None and training.unshard_for_use(param)


def _refused(param: Any, called: str) -> StateError:
    owner = vars(param).get(OWNER)
    if owner is not None and owner[0].own.offloaded:
        return StateError(f"{called} needs values of parameter {_name(param)}, which are on the host; call engine.reload_states() first")
    return refusal(_name(param), f"{called} needs its values")


def _empty_ones(args: Any, kwargs: Any) -> Iterator[Any]:
    return (value for value in tree_leaves((args, kwargs)) if isinstance(value, _Empty))


def _empty_values_of(param: Any) -> EmptyValues:
    with _WITHOUT_FUNCTION():
        found: EmptyValues = EmptyValues.make(_name(param), param.shape, param.dtype, param.device)
    found.source = param
    return found


def _shape(param: Any) -> torch.Size:
    owner = vars(param).get(OWNER)
    return torch.Size(owner[0].layout.slots[owner[1]].shape) if owner is not None else param.shape


def _converted(param: Any, func: Callable[..., Any], args: Any, kwargs: Any) -> EmptyValues:
    """Return a placeholder with the dtype and device that ``func`` would give."""
    with _WITHOUT_FUNCTION():
        result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor):  # ``type()``
            return result
        found: EmptyValues = EmptyValues.make(_name(param), result.shape, result.dtype, result.device)
    found.source = param
    return found


def _assign(param: Any, value: Any) -> None:
    """Set ``param.data``; assigning the placeholder of the parameter itself changes nothing.

    Raises:
        StateError: ``value`` is the placeholder of another parameter, or has another dtype.
    """
    with _WITHOUT_FUNCTION():
        itself = value is param or (isinstance(value, Valueless) and value.source is param)
        if itself and value.dtype != param.dtype:
            raise refusal(_name(param), f"it was converted from {param.dtype} to {value.dtype}")
        if isinstance(value, (Valueless, _Empty)) and not itself:
            raise refusal(_name(param), f"its data was set to that of {value.parameter if isinstance(value, Valueless) else _name(value)}")
        if not itself:
            _DATA.__set__(param, value)


def _called(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    return f".{getattr(func.__self__, '__name__', name)}" if name in ("__get__", "__set__") and hasattr(func, "__self__") else name


def _name(param: Any) -> str:
    owner = vars(param).get(OWNER)
    return "a parameter" if owner is None else str(owner[0].layout.slots[owner[1]].name)


def _refusal(param: Any, value: torch.Tensor) -> StateError:
    return StateError(
        f"{_name(param)}.grad was given a gradient of shape {tuple(value.shape)}, and the parameter is empty now: sharded over the ranks "
        "(ZeRO stage 3), or offloaded. Call hf_zero.utils.safe_set_full_grad(param, gradient) on all ranks between backward and step(), "
        "or use stage 0, 1 or 2"
    )
