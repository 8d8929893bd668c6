"""Whether this process only plans: tensors have sizes and no values, and the other ranks are not there.

`hf-zero plan` runs the engine itself on such tensors. What reaches past torch (kernels, pages of the kernel, files, peers) asks here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

DEVICE = "planned"
"""torch's name of the accelerator that a plan pretends."""

Told = dict[str, list[Any]]
"""What ranks that were planned before have told others, by its name, in order."""

_depth = 0
_place = ""
_told: Told | None = None
_heard: Counter[str] = Counter()


def planning() -> bool:
    """Return whether it does."""
    return _depth > 0


@contextmanager
def only_planning(told: Told | None = None) -> Iterator[None]:
    """Inside, this process only plans.

    Args:
        told: Of ranks of one world that are planned one after the other: gets what this one tells, and has what those before it told.
    """
    global _depth, _told, _heard
    before = _told, _heard
    _depth, _told, _heard = _depth + 1, told, Counter()
    try:
        yield
    finally:
        _depth, (_told, _heard) = _depth - 1, before


@contextmanager
def looking_aside() -> Iterator[None]:
    """Inside, new tensors are what they are without a plan: for traces of a model, which are to find what they find in a run."""
    if not _depth:
        yield
        return
    with _disable_current_modes():
        yield


def with_values(tree: Any) -> Any:
    """``tree`` with zeros on the host in place of tensors that have no values in a plan; elsewhere as it is.

    Activations may be large, and nobody writes into those that are given to a trace: one zero, seen many times, is in no memory.
    """
    if not _depth:
        return tree
    return tree_map_only(torch.Tensor, _zeros_like, tree)


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        return torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")


def told_by(own: bool, value: Any, name: str) -> Any:
    """What everybody gets where one rank tells ``value``: what it told when it was planned; of a rank that was not, this one's own.

    Args:
        own: This rank is the one.
        value: What it tells.
        name: Of the message.
    """
    if _told is None:
        return value
    if own:
        _told.setdefault(name, []).append(value)
        return value
    place, _heard[name] = _heard[name], _heard[name] + 1
    known = _told.get(name, [])
    return known[place] if place < len(known) else value


@contextmanager
def placed(tier: str) -> Iterator[None]:
    """What is allocated inside stands for memory of ``tier``, whatever device it names."""
    global _place
    before, _place = _place, tier
    try:
        yield
    finally:
        _place = before


def place() -> str:
    """Return the tier that ``placed`` names now; "" where none does."""
    return _place
