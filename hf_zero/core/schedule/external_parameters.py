"""Declare parameters that a module reads and another module owns."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

from torch import nn

from hf_zero.errors import StateError

_declared: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that ``module``'s forward reads ``parameter``, which another module owns; before or after ``initialize``.

    Raises:
        StateError: ``parameter`` is not an ``nn.Parameter``.
    """
    if not isinstance(parameter, nn.Parameter):
        raise StateError(f"register_external_parameter takes an nn.Parameter, got {type(parameter).__name__}")
    known = _declared.setdefault(module, [])
    if not any(parameter is other for other in known):
        known.append(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo ``register_external_parameter``; do nothing if it was never called."""
    known = _declared.get(module, [])
    known[:] = [other for other in known if other is not parameter]


def external_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that are declared external to ``module`` itself."""
    yield from _declared.get(module, ())
