"""Mark device memory that offloading of activations must not move to the host.

Autograd functions save weights, and views of them, together with activations. The engine frees and gathers a unit's whole buffer itself: a
copy of a weight on the host would be a second copy of the model in each forward, and would free no memory on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import torch

_MARK = "_hf_zero_stays"  # attribute of a storage; torch keeps the storage's object as long as the storage


def mark_resident(tensor: torch.Tensor) -> None:
    """Mark the memory of ``tensor``; the mark stays when its storage is freed and allocated again."""
    setattr(tensor.untyped_storage(), _MARK, True)


def mark_residents(tensors: Iterable[torch.Tensor]) -> None:
    """Mark the memory of ``tensors``; skip those without their own storage (sparse tensors, subclasses)."""
    for tensor in tensors:
        with suppress(RuntimeError, NotImplementedError):
            mark_resident(tensor)


def is_resident(tensor: torch.Tensor) -> bool:
    """Return whether the memory of ``tensor``, which may be a view, is marked."""
    return getattr(tensor.untyped_storage(), _MARK, False)
