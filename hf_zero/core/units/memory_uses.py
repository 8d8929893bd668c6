"""Find whether autograd or a script still uses a tensor's memory, and let autograd add gradients to a unit's flat buffer in place."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn


def ordinary_tensors() -> AbstractContextManager[None]:
    """Return a context whose new tensors autograd can use, also inside ``torch.inference_mode``; gradients are off in the latter."""
    return _ordinary() if torch.is_inference_mode_enabled() else nullcontext()


@contextmanager
def _ordinary() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():  # leaving the mode switches gradients on
        yield


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
    """Return the use count of a tensor that shares its memory with no other: in newer versions of torch the query is one more use (2.13,
    not 2.8).
    """
    return _uses(torch.empty(1))


class InPlace:
    """Parameters whose ``grad`` is their place in the flat buffer, until the backward that runs ends.

    [Note: added in place] Where a parameter gets several gradients in one backward (the micro-batches of a pipeline), the first one is
    copied ([Note: stolen gradients]). Autograd adds the others to it, while they are in the cache, without a hook: the same
    sums in the same order, where gradient and buffer are of one type and nothing is scaled.

    Attributes:
        indices: Their positions; the set never changes.

    Args:
        params: Parameters of the unit; None for one that has left it.
    """

    def __init__(self, params: Sequence[nn.Parameter | None]) -> None:
        self._params = params
        self.indices: set[int] = set()

    def begin(self, places: Mapping[int, torch.Tensor]) -> None:
        """Let autograd add the following gradients of these parameters to their places, which hold the first ones."""
        for index, place in places.items():
            param = self._params[index]
            if param is not None:
                param.grad = place
                self.indices.add(index)

    def end(self) -> None:
        """Stop the additions in place."""
        for index in self.indices:
            param = self._params[index]
            if param is not None:
                param.grad = None
        self.indices.clear()


def memory_to_keep(total: torch.Tensor | None, numel: int) -> torch.Tensor | None:
    """Return the memory of a unit's gradient after the step, (numel,), if this rank has all of it and the next step can use it again.

    [Note: kept memory] On a host, fresh memory costs more than writing to it. In a backward of several gradients each (of a pipeline) the
    memory is in use from the first part's backward on, when most activations exist: freeing it gains nothing. Scripts may have kept a view
    of the memory that was shown to them.
    """
    return total if total is not None and total.numel() == numel and is_only_view(total) else None
