"""Packed weights: bytes of a quantized weight under whatever element type a library keeps them in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import ref

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_zero.comm.collectives import is_narrow

_PACKED = "_hf_zero_packed"
OUTER = "_hf_zero_outer"


def mark_packed(param: torch.Tensor) -> None:
    """Says that the elements of ``param`` are no numbers to compute with: they are sharded and gathered as they are, and never cast."""
    setattr(param, _PACKED, True)


def is_packed(param: torch.Tensor) -> bool:
    """Return whether ``param`` was marked, or is of a floating-point type of one byte, whose scales lie beside it."""
    return getattr(param, _PACKED, False) or is_narrow(param)


def is_wrapped(param: torch.Tensor) -> bool:
    """Whether ``param`` is a tensor of a class of a library's own around other tensors (torchao): it has no row of elements to divide.

    [Note: inner tensors] What it stands around can be divided: codes and scales are plain tensors, which lie in a unit of packed weights
    one after the other. They come and go; the outer parameter keeps its shape, belongs to the unit of its first inner tensor, and
    is whole when they are.
    """
    if not is_traceable_wrapper_subclass(param):
        return False
    from torch.distributed.tensor import DTensor  # half a second, for those who have such tensors

    return not isinstance(param, DTensor)


def inner_tensors(outer: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a wrapped one stands around, by the names of its attributes."""
    names, _ = outer.__tensor_flatten__()
    return {name: getattr(outer, name) for name in names}


def mark_inner(outer: torch.Tensor) -> bool:
    """Lets a wrapped parameter be divided, see [Note: inner tensors]; returns whether it can be: all that it stands around are plain."""
    inner = list(inner_tensors(outer).values())
    if not inner or any(type(tensor) is not torch.Tensor or tensor.is_meta for tensor in inner):
        return False
    for tensor in inner:
        mark_packed(tensor)
    setattr(inner[0], OUTER, ref(outer))  # weak: the outer one holds it
    return True


def with_outer(param: torch.Tensor) -> Iterator[Any]:
    """``param``, and the wrapped parameter whose first inner tensor it is, if it is one."""
    yield param
    outer = getattr(param, OUTER, None)
    if outer is not None and (found := outer()) is not None:
        yield found


def bytes_as(part: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """Return the first bytes of ``part``, 1D and contiguous, as a tensor of another element type and ``shape``; shares its memory."""
    return part.view(torch.uint8)[: shape.numel() * dtype.itemsize].view(dtype).view(shape)
