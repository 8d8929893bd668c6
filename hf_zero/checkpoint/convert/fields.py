"""Values out of files of others, each of the kind that is expected.

All raise ``ValueError`` with the name of the key and what was found; ``reading`` adds the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_zero.system.reading import shown


def _refused(value: Any, what: str, expected: str) -> ValueError:
    return ValueError(f"{what} is {shown(value)}, expected {expected}")


def mapping(value: Any, what: str) -> Mapping[Any, Any]:
    """A dict."""
    if not isinstance(value, Mapping):
        raise _refused(value, what, "a dict")
    return value


def sequence(value: Any, what: str) -> Sequence[Any]:
    """A list or tuple."""
    if not isinstance(value, (list, tuple)):
        raise _refused(value, what, "a list")
    return value


def integer(value: Any, what: str, least: int = 0) -> int:
    """A whole number from ``least`` on."""
    if type(value) is not int or value < least:
        raise _refused(value, what, f"a whole number from {least} on")
    return value


def integers(value: Any, what: str) -> list[int]:
    """Whole numbers from 1 on, at least one."""
    if not value:
        raise _refused(value, what, "whole numbers")
    return [integer(item, what, 1) for item in sequence(value, what)]


def sizes(value: Any, what: str) -> tuple[int, ...]:
    """A shape."""
    return tuple(integer(item, what) for item in sequence(value, what))


def number(value: Any, what: str) -> float:
    """A real number, also as a tensor of one."""
    found = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex() else value
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise _refused(value, what, "a number")
    return found


def tensor(value: Any, what: str) -> torch.Tensor:
    """A tensor."""
    if not isinstance(value, torch.Tensor):
        raise _refused(value, what, "a tensor")
    return value


def rows(value: Any, what: str) -> list[torch.Tensor]:
    """Tensors of one dimension."""
    found = [tensor(item, what) for item in sequence(value, what)]
    if any(row.ndim != 1 for row in found):
        raise _refused([tuple(row.shape) for row in found], f"the shapes of {what}", "one dimension")
    return found
