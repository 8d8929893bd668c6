"""Who else uses the memory of a tensor, and tensors that anybody may use."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def ordinary_tensors() -> AbstractContextManager[None]:
    """A context whose new tensors autograd can work with, inside ``torch.inference_mode`` too; without gradients there."""
    return _ordinary() if torch.is_inference_mode_enabled() else nullcontext()


@contextmanager
def _ordinary() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():  # leaving the mode switches gradients on
        yield


def other_uses(tensor: torch.Tensor) -> int:
    """How many tensors share the memory of ``tensor``, beside itself; what it is a view of counts, and what autograd has saved."""
    return _uses(tensor) - _uses_of_one()


def is_only_view(tensor: torch.Tensor) -> bool:
    """Whether nobody else has the memory of ``tensor``: no view of it, no other tensor but the one of which it is itself a view."""
    return other_uses(tensor) == (tensor._base is not None)


def _uses(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # type: ignore[attr-defined]


@functools.cache
def _uses_of_one() -> int:
    """What a tensor counts that nobody else shares: asking is one more use in newer versions of torch (2.13, not 2.8)."""
    return _uses(torch.empty(1))
