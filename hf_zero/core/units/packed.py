"""Handle packed weights: parameters whose elements are the bytes of a quantized weight, in whatever dtype a library stores them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import ref

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_zero.comm.collectives import is_narrow

_PACKED = "_hf_zero_packed"
OUTER = "_hf_zero_outer"
_FLOAT8 = "_hf_zero_float8"


def mark_packed(param: torch.Tensor) -> None:
    """Mark ``param`` as packed: its elements are not numbers to compute with; they are sharded and gathered unchanged, and never cast."""
    setattr(param, _PACKED, True)


def is_packed(param: torch.Tensor) -> bool:
    """Return whether ``param`` was marked as packed, or has a floating-point dtype of one byte (its scales are separate tensors)."""
    return getattr(param, _PACKED, False) or is_narrow(param)


def mark_float8(param: torch.Tensor, dtype: torch.dtype) -> None:
    """Mark ``param`` as a weight that its layer casts to ``dtype`` with one scale, so that a gather may send these values."""
    setattr(param, _FLOAT8, dtype)


def float8_type(param: torch.Tensor) -> torch.dtype | None:
    """Return the float8 dtype that ``param`` was marked with; None without."""
    found: torch.dtype | None = getattr(param, _FLOAT8, None)
    return found


def is_wrapped(param: torch.Tensor) -> bool:
    """Return whether ``param`` is a tensor of a library's own class around other tensors (torchao): it has no flat elements to shard.

    [Note: inner tensors] The tensors inside a wrapped parameter can be sharded: codes and scales are plain tensors, which are adjacent in a
    unit of packed weights. They are sharded and unsharded; the outer parameter keeps its shape, belongs to the unit of its first inner
    tensor, and counts as unsharded when they are.
    """
    if not is_traceable_wrapper_subclass(param):
        return False
    from torch.distributed.tensor import DTensor  # the import takes half a second; only users of wrapped tensors pay it

    return not isinstance(param, DTensor)


def inner_tensors(outer: Any) -> dict[str, torch.Tensor]:
    """Return the inner tensors of a wrapped one, by the names of its attributes."""
    names, _ = outer.__tensor_flatten__()
    return {name: getattr(outer, name) for name in names}


def mark_inner(outer: torch.Tensor) -> bool:
    """Mark the inner tensors of a wrapped parameter as packed, see [Note: inner tensors]; return whether it can be sharded, that is,
    whether all of them are plain tensors with values.
    """
    inner = list(inner_tensors(outer).values())
    if not inner or any(type(tensor) is not torch.Tensor or tensor.is_meta for tensor in inner):
        return False
    for tensor in inner:
        mark_packed(tensor)
    setattr(inner[0], OUTER, ref(outer))  # weak, because the outer tensor references the inner one
    return True


def with_outer(param: torch.Tensor) -> Iterator[Any]:
    """Yield ``param``, and the wrapped parameter whose first inner tensor it is, if there is one."""
    yield param
    outer = getattr(param, OUTER, None)
    if outer is not None and (found := outer()) is not None:
        yield found


def bytes_as(part: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """Return the first bytes of ``part``, 1D and contiguous, as a tensor of another dtype and ``shape``; shares its memory."""
    return part.view(torch.uint8)[: shape.numel() * dtype.itemsize].view(dtype).view(shape)
