"""Recognises a forward that a script runs again after it raised, by what it is given."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


class RunAgain:
    """What the last forward was given, if it raised.

    [Note: a forward and its second try] A forward that ran out of memory, was caught and is run again is one micro-step, and so counts
    once. One that is given another batch is the next micro-step: the rank has skipped one (``core/step/same_pace.py``). The values
    are compared, because a script may bring its batch to the device anew; only after an error, so nothing else costs anything.
    """

    def __init__(self) -> None:
        self._raised: str | None = None

    def raised(self, given: Any) -> None:
        """A forward that was ``given`` this has raised."""
        self._raised = _digest(given)

    def is_of(self, given: Any) -> bool:
        """Whether a forward that is ``given`` this is the one that raised, which is forgotten."""
        if self._raised is None:
            return False
        raised, self._raised = self._raised, None
        return raised == _digest(given)


def _digest(given: Any) -> str:
    """Equal for equal tensors and plain values in nested containers; of other objects the class alone counts."""
    found = hashlib.sha256()
    for leaf in tree_leaves(given):
        if isinstance(leaf, torch.Tensor):
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout is torch.strided and not leaf.is_meta:
                found.update(leaf.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        else:
            found.update(repr(leaf).encode() if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__name__.encode())
    return found.hexdigest()
