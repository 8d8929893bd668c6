"""Pickle a module that an engine trains as the plain module that it is: without hooks and wrappers, with whole parameters."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

_OURS = __name__.partition(".")[0]
_STATE, _COPY = "__getstate__", "__deepcopy__"
_OF_HOOKS = ("_with_kwargs", "_always_called")  # dicts of torch by the number of a hook


def make_picklable(module: nn.Module) -> None:
    """Let ``pickle`` and ``torch.save`` write ``module`` and the modules inside it without what an engine has put there.

    [Note: plain pickles] A pickle looks up how to write an object on the object itself, so each module gets a method of its own. The
    parameters write their present values (``units/registration.py``); a sharded one raises an error that says how to gather it. Deep
    copies, which ask in the same way, keep all attributes: a copy with sharded parameters must refuse to run.
    """
    for inner in module.modules():
        _equip(inner)


def _equip(module: nn.Module) -> None:
    vars(module).update({_STATE: MethodType(_state, module), _COPY: MethodType(_copy, module)})


def undo(module: nn.Module) -> None:
    """Undo ``make_picklable``."""
    for inner in module.modules():
        for name in (_STATE, _COPY):
            vars(inner).pop(name, None)


def _copy(module: nn.Module, memo: dict[int, Any]) -> Any:
    """Return the result of ``copy.deepcopy``, which has methods of its own."""
    own = {name: vars(module).pop(name) for name in (_STATE, _COPY) if name in vars(module)}
    try:
        copied = deepcopy(module, memo)
    finally:
        vars(module).update(own)
    if isinstance(copied, nn.Module):
        _equip(copied)
    return copied


def _state(module: nn.Module) -> Any:
    """Return the state of a module for a pickle."""
    own = getattr(type(module), _STATE, None)
    state = dict(vars(module)) if own in (None, getattr(object, _STATE, None)) else own(module)
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
