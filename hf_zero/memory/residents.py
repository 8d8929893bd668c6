"""Mark device memory that stays where it is, whoever wants to move what functions have saved of it.

Functions save their weights, and views of them, beside activations. A unit's whole buffer is freed and gathered by its engine: a copy of a
weight on the host would be a second copy of the model for each forward, and would save nothing on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import torch

_MARK = "_hf_zero_stays"  # attribute of a storage; torch keeps the storage's object as long as the storage


def mark_resident(tensor: torch.Tensor) -> None:
    """Mark the memory of ``tensor``, now and after it was freed and allocated again."""
    setattr(tensor.untyped_storage(), _MARK, True)


def mark_residents(tensors: Iterable[torch.Tensor]) -> None:
    """Mark the memory of ``tensors``; one without a storage of its own (sparse, or of a subclass) is passed over."""
    for tensor in tensors:
        with suppress(RuntimeError, NotImplementedError):
            mark_resident(tensor)


def is_resident(tensor: torch.Tensor) -> bool:
    """Return whether the memory of ``tensor``, which may be a view, is marked."""
    return getattr(tensor.untyped_storage(), _MARK, False)
