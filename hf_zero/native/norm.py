"""Compute the sum of squares of a flat range in double precision, which also shows whether every element is finite."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hf_zero.errors import HfZeroError
from hf_zero.native.library import ELEMENT_TYPES, announce, library, total_of
from hf_zero.native.passes import address

# Equal to HFZ_BLOCK: every block has a sum of its own, so that threads do not change the result.
BLOCK_NUMEL = 65536


def squared_norm(values: Tensor, *, threads: int = 1) -> float:
    """Return the sum of squares of fp32, bf16 or fp16 values in host memory.

    Squares of these types are exact in double and their sums cannot overflow, so the result is finite if and only if every
    element is. It does not depend on ``threads`` nor on the instruction set.

    Args:
        values: Contiguous, any shape.
        threads: Maximum number of threads.

    Raises:
        HfZeroError: The kernel does not support the dtype or layout.
    """
    if values.dtype not in ELEMENT_TYPES or not values.is_contiguous() or values.device.type != "cpu":
        raise HfZeroError(
            f"squared_norm: values are {values.dtype} on {values.device} (contiguous: {values.is_contiguous()}); "
            "fp32, bf16 or fp16, contiguous and in host memory is expected"
        )
    native = library()
    if native is None:
        announce()
        return squared_norm_reference(values)
    count = values.numel()
    arguments = (ctypes.c_int64(count), address(values), ELEMENT_TYPES[values.dtype])
    return native.sum_threaded("hfz_threaded_norm", "hfz_squared_norm", threads, -(-count // BLOCK_NUMEL), *arguments)


def squared_norm_reference(values: Tensor) -> float:
    """Compute ``squared_norm`` in plain torch."""
    pieces = values.detach().view(-1).split(BLOCK_NUMEL)
    return total_of(torch.stack([piece.double().square().sum() for piece in pieces]))
