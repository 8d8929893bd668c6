"""Record whether this process only makes a memory plan: tensors have sizes but no values, and the other ranks do not exist.

``hf-zero plan`` runs the engine itself on such tensors. Code that does more than call torch (native kernels, memory pages, files, peers)
checks it here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

DEVICE = "planned"
"""torch's name of the accelerator that a memory plan simulates."""

Told = dict[str, list[Any]]
"""Messages that previously planned ranks have sent, by message name, in order."""

_depth = 0
_place = ""
_told: Told | None = None
_heard: Counter[str] = Counter()


def planning() -> bool:
    """Return whether this process only makes a memory plan."""
    return _depth > 0


@contextmanager
def only_planning(told: Told | None = None) -> Iterator[None]:
    """Let this process only plan inside the ``with``.

    Args:
        told: For ranks of one world that are planned one after the other: the messages of the earlier ranks; this rank's messages are
            added.
    """
    global _depth, _told, _heard
    before = _told, _heard
    _depth, _told, _heard = _depth + 1, told, Counter()
    try:
        yield
    finally:
        _depth, (_told, _heard) = _depth - 1, before


@contextmanager
def plan_ignored() -> Iterator[None]:
    """Create ordinary tensors inside the ``with``, as without a plan, for traces of a model, which must match the traces of a run."""
    if not _depth:
        yield
        return
    with _disable_current_modes():
        yield


def with_values(tree: Any) -> Any:
    """Return ``tree`` with zeros on the host in place of tensors that have no values in a plan; outside of plans, ``tree`` itself.

    Activations may be large, and a trace does not write to its inputs, so each tensor is one expanded zero, which takes no memory.
    """
    if not _depth:
        return tree
    return tree_map_only(torch.Tensor, _zeros_like, tree)


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether the elements of ``tensor`` can be read; False for the tensors of a memory plan, and on the meta device."""
    return not (isinstance(tensor, FakeTensor) or tensor.is_meta)


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        return torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")


def planned_value(own: bool, value: Any, name: str) -> Any:
    """Return the value that all ranks receive when one rank sends ``value``: the sender's value if it has been planned, else this rank's
    own.

    Args:
        own: This rank is the sender.
        value: The value of this rank.
        name: Name of the message.
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
    """Count allocations inside the ``with`` as memory of ``tier``, on whatever device."""
    global _place
    before, _place = _place, tier
    try:
        yield
    finally:
        _place = before


def place() -> str:
    """Return the tier of the innermost ``placed``; an empty text outside of ``placed``."""
    return _place
