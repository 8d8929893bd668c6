"""Check keyword arguments from a JSON section: convert text to numbers, suggest the nearest known name for an unknown one."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from hf_zero.errors import ConfigError


def unknown_key(section: str, key: str, allowed: Iterable[str], owner: str) -> ConfigError:
    """Return the error for a key that ``owner`` does not take.

    Args:
        section: Dotted path of the section, for example ``optimizer.params``.
        key: A key found in the section.
        allowed: The keys that ``owner`` takes.
        owner: The class that the section builds, as the user wrote it.

    Returns:
        A ``ConfigError`` naming the key, the nearest allowed key if one is near, and all allowed keys.
    """
    names = sorted(allowed)
    near = nearest(key, names)
    hint = f" Did you mean {section}.{near}?" if near else ""
    return ConfigError(f"{section}.{key} is not a parameter of {owner}.{hint} Allowed: {', '.join(names) or 'none'}.")


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name that is most similar to ``name`` (letter case ignored); None when none is similar."""
    folded = {candidate.lower(): candidate for candidate in allowed}
    found = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.6)
    return folded[found[0]] if found else None


def number(key: str, value: object) -> float:
    """Read one finite or infinite number; text such as ``"1e-5"`` is accepted (YAML tools write numbers as text).

    Args:
        key: Dotted key, for the message.
        value: Int, float or text of a number. Integers stay integers.

    Raises:
        ConfigError: ``value`` is a boolean, ``"auto"``, NaN or anything else that is not a number.
    """
    parsed = parse_number(value)
    if parsed is None or math.isnan(parsed):
        remedy = ' Replace "auto" by a number.' if value == "auto" else ""
        raise ConfigError(f"{key} is {value!r}; a number is expected.{remedy}")
    return parsed


def parse_number(value: object) -> float | None:
    """Return ``value`` as int or float; None when it is neither a number nor the text of one."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return value
    if not isinstance(value, str):
        return None
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return None


def at_least(key: str, value: object, lowest: float) -> float:
    """Read a number that must not be below ``lowest``.

    Raises:
        ConfigError: The value is not a number, or is too small.
    """
    parsed = number(key, value)
    if parsed < lowest:
        raise ConfigError(f"{key} is {value!r}; it must be at least {lowest}.")
    return parsed


def boolean(key: str, value: object) -> bool:
    """Read a boolean; the texts ``"true"`` and ``"false"`` (any letter case) and the numbers 0 and 1 are accepted.

    Raises:
        ConfigError: The value is anything else.
    """
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if isinstance(value, (bool, int)) and value in (0, 1):
        return bool(value)
    raise ConfigError(f"{key} is {value!r}; true or false is expected.")


def per_group(key: str, value: object, groups: int) -> list[float]:
    """Return one number per parameter group, from one number or a list of the right length.

    Args:
        key: Dotted key, for the message.
        value: One number, or a list with one number per parameter group.
        groups: Number of the parameter groups of the optimizer.

    Raises:
        ConfigError: The list has another length, or an entry is not a number.
    """
    if not isinstance(value, (list, tuple)):
        return [number(key, value)] * groups
    if len(value) != groups:
        raise ConfigError(
            f"{key} has {len(value)} values but the optimizer has {groups} parameter groups; give one number, or one per group."
        )
    return [number(f"{key}[{index}]", item) for index, item in enumerate(value)]


def plain_values(section: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``params`` in which texts of numbers and booleans are converted, in lists too (lists become tuples).

    Raises:
        ConfigError: A value is still ``"auto"``, which the constructor would take for an option of its own.
    """
    return {key: _plain(f"{section}.{key}", value) for key, value in params.items()}


def _plain(key: str, value: object) -> object:
    """Return one value of ``plain_values``."""
    if isinstance(value, (list, tuple)):
        return tuple(_plain(f"{key}[{index}]", item) for index, item in enumerate(value))
    if not isinstance(value, str):
        return value
    if value == "auto":
        raise ConfigError(f'{key} is still "auto", and hf_zero has no source for its value here. Give it a value.')
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    parsed = parse_number(value)
    return value if parsed is None else parsed
