"""Record the unit of each parameter, and define pickling and copying of a unit's parameters and of an engine's modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from hf_zero.comm.collectives import Collectives
from hf_zero.core.units.layout import FROZEN
from hf_zero.core.units.marks import OUTER, inner_tensors, is_of_library, is_packed, is_wrapped, mark_inner, mark_packed, with_outer
from hf_zero.core.units.shard import NotedWrites
from hf_zero.core.units.sharded_parameter import OWNER, refusal, set_class, whole_class
from hf_zero.core.units.unit import Unit, UnitSpec, find_unit, full_shape, is_sharded
from hf_zero.memory import host_memory


def copy_unit(unit: Unit) -> Unit:
    """Return a sharded unit with a copy of ``unit``'s shard and of each of its parameters, which no engine trains; local.

    The copy's shard is kept in memory even if ``unit``'s shard is in a file, because the file belongs to the engine.
    """
    empty = torch.empty(0, dtype=unit.layout.dtype, device=unit.collectives.topology.device)
    params = [None if param is None else _param_like(param, empty) for param in unit.params]
    copied = _unit_of(unit, unit.layout.dtype, params)
    copied.reshard()
    copied.built = unit.built
    return copied


def _unit_of(unit: Unit, dtype: torch.dtype, params: Sequence[nn.Parameter | None]) -> Unit:
    """Return a unit of ``params`` with the values of ``unit``'s shard; its whole buffer is allocated but undefined outside of the shard."""
    layout = replace(unit.layout, dtype=dtype, slots=tuple(replace(slot, group=FROZEN) for slot in unit.layout.slots))
    unit.shard_storage.flush()
    buffer = host_memory.empty(layout.padded_numel, dtype, unit.collectives.topology.device)
    buffer[unit.owned.start : unit.owned.stop].copy_(unit.shard)
    storage = unit.shard_storage.of_copies()
    spec = UnitSpec(unit.collectives, shards=True, reshards=True, shard_storage=storage, listener=unit.listener)
    return Unit(layout, params, spec, buffer)


def _param_like(param: nn.Parameter, empty: torch.Tensor) -> nn.Parameter:
    if is_packed(param):  # the constructor of its class has further arguments
        copied: nn.Parameter = torch.Tensor._make_subclass(type(param), empty, False)  # type: ignore[attr-defined]
        if is_of_library(param):
            mark_packed(copied)
        return copied
    return whole_class(type(param))(empty, param.requires_grad)  # type: ignore[no-any-return]


_ATTRIBUTES = (OWNER, "__getstate__", "__reduce_ex__", "__deepcopy__")


def register(unit: Unit) -> None:
    """Make ``unit`` the owner of its parameters, which leave their former units; local."""
    for index, param in enumerate(unit.params):
        if param is not None:
            unregister(param)
            for shown in with_outer(param):
                _own(unit, index, shown)
    unit.listener.state_changed(unit.params, unit.state)
    unit.listener.stays_unsharded(unit.params, not unit.reshards)


def _own(unit: Unit, index: int, param: Any) -> None:
    setattr(param, OWNER, (unit, index))
    set_class(param, empty=is_sharded(param))
    # torch.save of a parameter itself (on a CPU `param.cpu()` is the parameter) writes its attributes too, process groups included.
    vars(param)["__getstate__"] = partial(_foreign_state, ref(param))
    if whole_class(type(param)) is nn.Parameter:
        vars(param)["__reduce_ex__"] = partial(_reduced, ref(param))
    if unit.reshards:
        vars(param)["__deepcopy__"] = partial(_deep_copy, ref(param))
    unit.listener.registered(param, full_shape(param), unit.shard_part(index, unit.shard), unit.collectives)


_loose: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameters of engines' models outside all units -> their network and name
_written_loose: WeakKeyDictionary[Collectives, NotedWrites[str]] = WeakKeyDictionary()


def register_loose(param: torch.Tensor, network: Collectives, name: str) -> None:
    """Record the ranks that hold the same values of ``param``, a parameter in no unit, and its name in the model; local."""
    _loose[param] = network, name


def network_of_loose(param: torch.Tensor) -> Collectives | None:
    """Return the network that ``register_loose`` recorded for ``param``; None for a parameter that no engine knows."""
    found: tuple[Collectives, str] | None = _loose.get(param)
    return None if found is None else found[0]


def noted_loose(param: torch.Tensor) -> tuple[NotedWrites[str], str]:
    """Return the records of writes that the next step or save compares, and the name of ``param`` in it, which ``register_loose``
    recorded.
    """
    network, name = _loose[param]
    return _written_loose.setdefault(network, NotedWrites()), name


def loose_params(network: Collectives) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of the parameters that ``register_loose`` recorded for ``network``, and that are in no unit now."""
    for param, (recorded, name) in list(_loose.items()):
        if recorded is network and find_unit(param) is None:
            yield name, param


def take_written_loose(network: Collectives) -> dict[str, int]:
    """Return and clear the records of written parameters outside all units, by name, for the ranks of ``network``; local."""
    noted = _written_loose.get(network)
    return {} if noted is None else noted.take()


def unregister(param: torch.Tensor) -> None:
    """Turn a parameter of a unit into an ordinary parameter; the caller sets its values."""
    owner = find_unit(param)
    if owner is not None:
        unit, index = owner
        training = unit.belongs_to() if unit.belongs_to is not None else None
        if training is not None and unit.trainable:
            training.release_param(unit, index)
        unit.params[index] = None
        for name in (*_ATTRIBUTES, *unit.listener.attributes):
            for shown in with_outer(param):
                vars(shown).pop(name, None)
        set_class(param, empty=False)


def _foreign_state(itself: ref[Any]) -> dict[str, Any] | None:
    """Return the attributes that a pickled parameter keeps besides its values: all except those that this package and the listener set.

    Raises:
        StateError: The parameter is sharded, so that no values would be written.
    """
    param: Any = itself()
    owner = find_unit(param)
    if owner is not None and is_sharded(param):
        raise refusal(owner[0].layout.slots[owner[1]].name)
    theirs = getattr(type(param), "__getstate__", None)  # a subclass may write more than its attributes
    state = None if theirs in (None, getattr(object, "__getstate__", None)) else theirs(param)
    return _of_others(param, vars(param) if state is None else state) or None


def _reduced(itself: ref[Any], protocol: Any) -> Any:
    """Return the form in which ``pickle`` writes a parameter: an ordinary parameter with its own memory, not its unit's.

    Raises:
        StateError: The parameter is sharded.
    """
    param: Any = itself()
    others = _foreign_state(itself)
    plain = nn.Parameter(param.detach().clone(), param.requires_grad)
    vars(plain).update(others or {})
    return plain.__reduce_ex__(protocol)


def _of_others(param: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
    owner = find_unit(param)
    ours = (*_ATTRIBUTES, OUTER, *(owner[0].listener.attributes if owner is not None else ()))
    return {name: value for name, value in state.items() if name not in ours}


def _deep_copy(itself: ref[Any], memo: dict[int, Any]) -> Any:
    """Return the result of ``copy.deepcopy`` for a parameter that is resharded between uses.

    [Note: deep copies] Scripts copy a model to average its weights or to compare with it. The copy of a parameter that is unsharded, inside
    ``GatheredParameters``, is an ordinary complete parameter, as in torch. The copy of a sharded parameter is sharded and belongs to a copy
    of its unit, with copies of all parameters of that unit: nothing is sent, and the copy of a model can be unsharded, saved and passed to
    its own ``initialize``.
    """
    param: Any = itself()
    if is_wrapped(param):
        return _copy_of_wrapped(param, memo)
    owner = find_unit(param)
    if owner is not None and not is_sharded(param) and not isinstance(param, torch.nn.Parameter):
        return param.detach().clone()  # scales of a packed weight; torch would copy the engine's attributes too
    if owner is None or not is_sharded(param):
        return type(param).__deepcopy__(param, memo)
    unit, index = owner
    copied = copy_unit(unit)
    register(copied)
    for original, copied_param in zip(unit.params, copied.params, strict=True):
        if original is not None:
            memo.setdefault(id(original), copied_param)
    for original, copied_param in zip(unit.params, copied.params, strict=True):
        if original is not None and is_packed(original):  # the library's attributes say how to read its bytes
            vars(copied_param).update(deepcopy(_of_others(original, vars(original)), memo))
    return copied.params[index]


def _copy_of_wrapped(param: Any, memo: dict[int, Any]) -> Any:
    """Return a parameter of the same class around copies of its inner tensors, registered with the unit of these copies, if there is
    one.
    """
    _, context = param.__tensor_flatten__()
    inner = {name: deepcopy(tensor, memo) for name, tensor in inner_tensors(param).items()}
    copied = type(param).__tensor_unflatten__(inner, context, param.size(), param.stride())
    copied._is_param = True  # as nn.Parameter marks tensors of other classes; nn.Parameter() would detach it, and lose the inner tensors
    owner = find_unit(next(iter(inner.values())))
    if owner is not None:
        mark_inner(copied)
        _own(*owner, copied)
        owner[0].listener.state_changed([copied], owner[0].state)
        owner[0].listener.stays_unsharded([copied], not owner[0].reshards)
    return copied


_OURS = __name__.partition(".")[0]
_STATE, _COPY = "__getstate__", "__deepcopy__"
_OF_HOOKS = ("_with_kwargs", "_always_called")  # dicts of torch by the number of a hook


def make_picklable(module: nn.Module) -> None:
    """Make ``pickle`` and ``torch.save`` write ``module`` and the modules inside it without an engine's additions.

    [Note: plain pickles] A pickle looks up how to write an object on the object itself, so each module gets a method of its own. The
    parameters write their present values (``units/registration.py``); a sharded one raises an error that says how to gather it. Deep
    copies, which ask in the same way, keep all attributes: a copy with sharded parameters must refuse to run.
    """
    for inner in module.modules():
        _equip(inner)


def _equip(module: nn.Module) -> None:
    vars(module).update({_STATE: MethodType(_state, module), _COPY: MethodType(_copy, module)})


def remove_pickling(module: nn.Module) -> None:
    """Undo ``make_picklable``."""
    for inner in module.modules():
        for name in (_STATE, _COPY):
            vars(inner).pop(name, None)


def _copy(module: nn.Module, memo: dict[int, Any]) -> Any:
    """Return the result of ``copy.deepcopy`` without the methods of this file."""
    own = {name: vars(module)[name] for name in (_STATE, _COPY) if name in vars(module)}
    # Not deleted: PEFT's modules look for a missing attribute in the module inside, and would be copied as that one.
    vars(module).update({_STATE: MethodType(_state_of_class, module), _COPY: None})
    copier = getattr(type(module), _COPY, None)
    try:
        copied = deepcopy(module, memo) if copier is None else copier(module, memo)
    finally:
        vars(module).update(own)
    if isinstance(copied, nn.Module):
        _equip(copied)
    return copied


def _state_of_class(module: nn.Module) -> Any:
    """Return the state of a module as its class gives it."""
    own = getattr(type(module), _STATE, None)
    state = dict(vars(module)) if own in (None, getattr(object, _STATE, None)) else own(module)
    return {key: value for key, value in state.items() if key not in (_STATE, _COPY)} if isinstance(state, dict) else state


def _state(module: nn.Module) -> Any:
    """Return the state of a module for a pickle."""
    state = _state_of_class(module)
    if not isinstance(state, dict):
        return state
    plain = {name: _plain(value) for name, value in state.items() if not _is_ours(value)}
    for name, value in state.items():
        for ending in _OF_HOOKS:
            if name.endswith(ending) and isinstance(value, dict):
                plain[name] = type(value)((key, flag) for key, flag in value.items() if key in plain[name.removesuffix(ending)])
    replaced = getattr(state.get("generate"), "replaced", None)
    return plain if replaced is None else {**plain, "generate": replaced}


def _plain(value: Any) -> Any:
    """Return ``value``; hooks without those of an engine, parameters in a plain dict."""
    if not isinstance(value, dict):
        return value
    if type(value).__module__.partition(".")[0] == _OURS:
        return dict(value.items())
    return type(value)((key, item) for key, item in value.items() if not _is_ours(item)) if any(map(_is_ours, value.values())) else value


def _is_ours(value: Any) -> bool:
    """Return whether ``value`` is a hook or a wrapper of this package, or an object that only an engine has put into a module."""
    if isinstance(value, (dict, nn.Module, torch.Tensor)):
        return False
    called = value
    while isinstance(called, (partial, MethodType)) or hasattr(called, "hook"):
        called = called.func if isinstance(called, partial) else called.__func__ if isinstance(called, MethodType) else called.hook
    where = getattr(called, "__module__", None) if callable(called) else type(called).__module__
    return isinstance(where, str) and where.partition(".")[0] == _OURS
