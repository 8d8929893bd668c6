"""Check the types of values that were read from files of other libraries.

Each function returns its value or raises ``ValueError`` with the name ``what`` of the value and the value that was found. The context
manager ``hf_zero.system.reading.reading`` adds the path of the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_zero.system.reading import shown


def _refused(value: Any, what: str, expected: str) -> ValueError:
    return ValueError(f"{what} is {shown(value)}, expected {expected}")


def mapping(value: Any, what: str) -> Mapping[Any, Any]:
    """Return ``value`` if it is a dict."""
    if not isinstance(value, Mapping):
        raise _refused(value, what, "a dict")
    return value


def sequence(value: Any, what: str) -> Sequence[Any]:
    """Return ``value`` if it is a list or tuple."""
    if not isinstance(value, (list, tuple)):
        raise _refused(value, what, "a list")
    return value


def integer(value: Any, what: str, least: int = 0) -> int:
    """Return ``value`` if it is a whole number of at least ``least``."""
    if type(value) is not int or value < least:
        raise _refused(value, what, f"a whole number from {least} on")
    return value


def integers(value: Any, what: str) -> list[int]:
    """Return ``value`` as a list if it is a non-empty list of whole numbers of at least 1."""
    if not value:
        raise _refused(value, what, "whole numbers")
    return [integer(item, what, 1) for item in sequence(value, what)]


def sizes(value: Any, what: str) -> tuple[int, ...]:
    """Return ``value`` as a tuple if it is a shape: whole numbers of at least 0."""
    return tuple(integer(item, what) for item in sequence(value, what))


def number(value: Any, what: str) -> float:
    """Return ``value`` as an int or float if it is a real number or a tensor of one real number."""
    found = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex() else value
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise _refused(value, what, "a number")
    return found


def tensor(value: Any, what: str) -> torch.Tensor:
    """Return ``value`` if it is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise _refused(value, what, "a tensor")
    return value


def rows(value: Any, what: str) -> list[torch.Tensor]:
    """Return ``value`` if it is a list of 1-dim tensors."""
    found = [tensor(item, what) for item in sequence(value, what)]
    if any(row.ndim != 1 for row in found):
        raise _refused([tuple(row.shape) for row in found], f"the shapes of {what}", "one dimension")
    return found
