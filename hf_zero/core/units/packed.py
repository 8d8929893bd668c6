"""Packed weights: bytes of a quantized weight under whatever element type a library keeps them in."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PACKED = "_hf_zero_packed"


def mark_packed(param: torch.Tensor) -> None:
    """Says that the elements of ``param`` are no numbers to compute with: they are sharded and gathered as they are, and never cast."""
    setattr(param, _PACKED, True)


def is_packed(param: torch.Tensor) -> bool:
    """Whether ``param`` was marked."""
    return getattr(param, _PACKED, False)


def is_wrapped(param: torch.Tensor) -> bool:
    """Whether ``param`` is a tensor of a class of a library's own around other tensors (torchao): it has no row of elements to divide."""
    if not is_traceable_wrapper_subclass(param):
        return False
    from torch.distributed.tensor import DTensor  # half a second, for those who have such tensors

    return not isinstance(param, DTensor)


def bytes_as(part: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """The first bytes of ``part``, 1D and contiguous, as a tensor of another element type and ``shape``; shares its memory."""
    return part.view(torch.uint8)[: shape.numel() * dtype.itemsize].view(dtype).view(shape)
