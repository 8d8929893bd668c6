"""Integers that remember which attribute of which module they come from.

A model's code has ``x.view(batch, length, self.num_heads, self.head_dim)``. When heads are split, ``self.num_heads`` must become the number
of this rank's heads. To find the attributes that hold the size of a split dimension, the attributes of the traced copy are replaced by
``TrackedInt``, an ``int`` that keeps the formula of its arithmetic. Where a ``TrackedInt`` reaches a torch function, its formula can be
evaluated again with another value of the attribute.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn


class Symbol(NamedTuple):
    """An integer attribute: path of the module (None: the module whose code runs), and name ("config.n_head", "shape[0]")."""

    path: str | None
    name: str


Formula = Callable[[Callable[[Symbol], int]], int]


class TrackedInt(int):
    """An ``int`` with the formula that made it."""

    formula: Formula
    symbols: tuple[Symbol, ...]

    def __new__(cls, value: int, formula: Formula, symbols: tuple[Symbol, ...]) -> TrackedInt:
        self = super().__new__(cls, value)
        self.formula = formula
        self.symbols = symbols
        return self

    def __deepcopy__(self, memo: Any) -> TrackedInt:
        return self

    def __neg__(self) -> TrackedInt:
        return TrackedInt(-int(self), lambda env: -evaluate(self, env), self.symbols)

    def __copy__(self) -> TrackedInt:
        return self

    def __reduce__(self) -> Any:
        return (int, (int(self),))


def _binary(function: Callable[[int, int], int], swapped: bool) -> Callable[[TrackedInt, Any], Any]:
    def method(self: TrackedInt, other: Any) -> Any:
        if not isinstance(other, int) or isinstance(other, bool):
            plain = getattr(int, f"__{'r' if swapped else ''}{function.__name__.strip('_')}__")
            return plain(int(self), other)
        left, right = (other, self) if swapped else (self, other)
        value = function(int(left), int(right))
        symbols = tuple(dict.fromkeys((*self.symbols, *(other.symbols if isinstance(other, TrackedInt) else ()))))
        return TrackedInt(value, lambda env: function(evaluate(left, env), evaluate(right, env)), symbols)

    return method


for _operation in (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod):
    _stem = _operation.__name__.strip("_")
    setattr(TrackedInt, f"__{_stem}__", _binary(_operation, False))
    setattr(TrackedInt, f"__r{_stem}__", _binary(_operation, True))


def evaluate(value: int, env: Callable[[Symbol], int]) -> int:
    """Return ``value``, with its formula evaluated on the attributes that ``env`` returns."""
    return value.formula(env) if isinstance(value, TrackedInt) else value


def _tracked(value: int, symbol: Symbol) -> TrackedInt:
    return TrackedInt(value, lambda env: env(symbol), (symbol,))


def _wrapped(value: Any, path: str | None, name: str) -> Any:
    if isinstance(value, int) and not isinstance(value, (bool, TrackedInt)) and value > 1:
        return _tracked(value, Symbol(path, name))
    if type(value) in (tuple, list) and 0 < len(value) <= 8:
        return type(value)(_wrapped(item, path, f"{name}[{position}]") for position, item in enumerate(value))
    return value


def track_attributes(model: nn.Module) -> None:
    """Replace the integer attributes of all modules, and of their configurations, by tracked ones, in place."""
    configs: dict[int, Any] = {}
    for path, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if name.startswith("_") and name not in ("_num_heads",):
                continue
            if name == "config" and hasattr(value, "__dict__"):
                configs[id(value)] = value
            elif isinstance(value, (int, tuple, list)):
                vars(module)[name] = _wrapped(value, path, name)
    for config in configs.values():
        for name, value in list(vars(config).items()):
            if not name.startswith("_") and isinstance(value, int) and not name.endswith("_id"):
                vars(config)[name] = _wrapped(value, None, f"config.{name}")


def get_attribute(module: nn.Module, name: str) -> int:
    """Return the value of an attribute, with a name spelled like ``Symbol.name``."""
    holder, name, position = _locate(module, name)
    value = getattr(holder, name)
    return int(value if position is None else value[position])


def set_attribute(module: nn.Module, name: str, value: int) -> None:
    """Set an attribute; a configuration is copied first, since other modules share it."""
    if name.startswith("config.") and not vars(module).get("_hf_zero_own_config"):
        import copy

        module.config = copy.copy(module.config)
        module._hf_zero_own_config = True  # type: ignore[assignment]
    holder, name, position = _locate(module, name)
    if position is None:
        setattr(holder, name, value)
    else:
        items = list(getattr(holder, name))
        items[position] = value
        setattr(holder, name, type(getattr(holder, name))(items))


def _locate(module: nn.Module, name: str) -> tuple[Any, str, int | None]:
    holder: Any = module
    if name.startswith("config."):
        holder, name = module.config, name.removeprefix("config.")
    if name.endswith("]"):
        name, position = name[:-1].split("[")
        return holder, name, int(position)
    return holder, name, None
