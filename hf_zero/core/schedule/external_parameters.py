"""Parameters read by a module that does not own them: declared by hand, or noticed when a released one is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from hf_zero.core.units.state import UnitState
from hf_zero.core.units.unit import OWNER
from hf_zero.errors import StateError

_declared: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Says that ``module``'s forward reads ``parameter``, which another module owns; before or after ``initialize``.

    Raises:
        StateError: ``parameter`` is not an ``nn.Parameter``.
    """
    if not isinstance(parameter, nn.Parameter):
        raise StateError(f"register_external_parameter takes an nn.Parameter, got {type(parameter).__name__}")
    known = _declared.setdefault(module, [])
    if not any(parameter is other for other in known):
        known.append(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Takes back ``register_external_parameter``; does nothing if it was never said."""
    known = _declared.get(module, [])
    known[:] = [other for other in known if other is not parameter]


def external_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters declared external to ``module`` itself."""
    yield from _declared.get(module, ())


class GuardedParameters(dict[str, Any]):
    """A module's ``_parameters`` that calls back when a released parameter is read by name during a forward.

    ``module.weight`` looks the name up here; iteration (``named_parameters``, ``state_dict``) does not.
    """

    def __init__(self, content: dict[str, Any], on_sharded: Callable[[nn.Parameter], None]) -> None:
        super().__init__(content)
        self._on_sharded = on_sharded

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        # As `is_sharded`, in one look: every read of a parameter in a forward passes here.
        owner = None if param is None else getattr(param, OWNER, None)
        if owner is not None and owner[0].state is not UnitState.UNSHARDED:
            self._on_sharded(param)
        return param

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: deepcopy(param, memo) for name, param in self.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


def guard(module: nn.Module, on_sharded: Callable[[nn.Parameter], None]) -> None:
    """Puts guards on ``module`` and everything in it."""
    for inner in module.modules():
        if inner._parameters:
            inner.__dict__["_parameters"] = GuardedParameters(dict(inner._parameters.items()), on_sharded)


def unguard(module: nn.Module) -> None:
    """Gives plain dictionaries back."""
    for inner in module.modules():
        if isinstance(inner._parameters, GuardedParameters):
            inner.__dict__["_parameters"] = dict(inner._parameters.items())
