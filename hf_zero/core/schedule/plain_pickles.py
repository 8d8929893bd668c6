"""Pickle a module that an engine trains as the plain module that it is: without hooks and wrappers, with whole parameters."""

from __future__ import annotations

import sys
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

_OURS = __name__.partition(".")[0]
_STATE = "__getstate__"
_OF_HOOKS = ("_with_kwargs", "_always_called")  # dicts of torch by the number of a hook


def make_picklable(module: nn.Module) -> None:
    """Let ``pickle`` and ``torch.save`` write ``module`` and the modules inside it without what an engine has put there.

    [Note: plain pickles] A pickle looks up how to write an object on the object itself, so each module gets a method of its own. The
    parameters write their present values (``units/registration.py``); a sharded one raises an error that says how to gather it. Deep
    copies, which ask in the same way, keep all attributes: a copy with sharded parameters must refuse to run.
    """
    for inner in module.modules():
        vars(inner)[_STATE] = MethodType(_state, inner)  # a deep copy has its own


def undo(module: nn.Module) -> None:
    """Undo ``make_picklable``."""
    for inner in module.modules():
        vars(inner).pop(_STATE, None)


def _state(module: nn.Module) -> Any:
    """Return the state of a module for a copy or a pickle."""
    own = getattr(type(module), _STATE, None)
    state = dict(vars(module)) if own in (None, getattr(object, _STATE, None)) else own(module)
    if sys._getframe(1).f_globals.get("__name__") == "copy" or not isinstance(state, dict):
        return state
    state.pop(_STATE, None)
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
