"""JSON objects as dataclasses: exactly the keys of the class, each of its type."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hf_zero.errors import CheckpointError
from hf_zero.system.reading import shown

T = TypeVar("T")
_HINTS: dict[Any, dict[str, Any]] = {}


def read_record(kind: type[T], data: Any, where: str) -> T:
    """Makes a record of a JSON object.

    Raises:
        CheckpointError: A key is missing, unknown or of another type; names ``where`` and the key.
    """
    if not isinstance(data, dict):
        raise CheckpointError(f"{where} is {shown(data)}, expected an object")
    hints = _HINTS.get(kind) or _HINTS.setdefault(kind, get_type_hints(kind))
    for name in hints:
        if name not in data:
            raise CheckpointError(f"{where}: key {name!r} is missing")
    if len(data) != len(hints):
        unknown = sorted(set(data) - set(hints))
        raise CheckpointError(f"{where}: key {shown(unknown[0])} is unknown, allowed are {list(hints)}")
    return kind(**{name: _value(hint, data[name], f"{where}: {name}") for name, hint in hints.items()})


def _value(hint: Any, data: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return data
    if dataclasses.is_dataclass(hint):
        return read_record(hint, data, where)  # type: ignore[arg-type]
    if type(None) in arguments:
        return None if data is None else _value(arguments[0], data, where)
    if origin is tuple:
        if not isinstance(data, list):
            raise CheckpointError(f"{where} is {shown(data)}, expected a list")
        return tuple(_value(arguments[0], item, f"{where}[{position}]") for position, item in enumerate(data))
    if origin is dict:
        if not isinstance(data, dict):
            raise CheckpointError(f"{where} is {shown(data)}, expected an object")
        return {key: _value(arguments[1], item, f"{where}[{shown(key)}]") for key, item in data.items()}
    if type(data) is not hint:
        raise CheckpointError(f"{where} is {shown(data)}, expected {hint.__name__}")
    return data
