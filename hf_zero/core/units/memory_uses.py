"""Count the tensors of autograd or a script that still use a tensor's memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def ordinary_tensors() -> AbstractContextManager[None]:
    """Return a context whose new tensors autograd can use, also inside ``torch.inference_mode``; gradients are off in the latter."""
    return _ordinary() if torch.is_inference_mode_enabled() else nullcontext()


@contextmanager
def _ordinary() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():  # leaving the mode switches gradients on
        yield


class HeldMemory:
    """A weak reference to the memory of a flat tensor, which autograd or a script may keep alive."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._like = flat[:0].new_empty(0)
        self._numel = flat.numel()
        self._storage = StorageWeakRef(flat.untyped_storage())

    def tensor(self) -> torch.Tensor | None:
        """Return the tensor, (numel,); None if its memory was freed."""
        storage = None if self._storage.expired() else torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None or storage.nbytes() < self._numel * self._like.element_size():
            return None
        return torch.empty_like(self._like).set_(storage, 0, (self._numel,), (1,))


def other_uses(tensor: torch.Tensor) -> int:
    """Return how many other tensors share the memory of ``tensor``; its base and tensors saved by autograd count."""
    return _uses(tensor) - _uses_of_one()


def is_only_view(tensor: torch.Tensor) -> bool:
    """Return whether no other tensor shares the memory of ``tensor``, except the one of which it is itself a view."""
    return other_uses(tensor) == (tensor._base is not None)


def _uses(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # type: ignore[attr-defined]


@functools.cache
def _uses_of_one() -> int:
    """Return the use count of a tensor that shares its memory with no other tensor; in newer versions of torch (2.13, not 2.8) the query
    itself counts as one more use.
    """
    return _uses(torch.empty(1))
