"""Copy flat ranges of host memory with several threads, and convert between fp32 and bf16 or fp16, bypassing the cache where faster."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hf_zero.errors import HfZeroError
from hf_zero.native.library import ELEMENT_TYPES, library, library_for
from hf_zero.native.passes import address
from hf_zero.native.thread_ranges import for_thread_ranges

_PAIRS = {
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
}


def convert(source: Tensor, target: Tensor, *, threads: int = 1) -> None:
    """Write ``source`` into ``target`` like ``target.copy_(source)``: rounded to nearest even, with denormals kept.

    All bits equal torch's except for NaN: here NaN keeps its sign and the upper bits of its payload; torch's own paths differ from
    each other.

    Args:
        source: fp32, or bf16 or fp16 with an fp32 target; contiguous, any shape.
        target: Contiguous tensor with the same number of elements.
        threads: Maximum number of threads.

    Raises:
        HfZeroError: The tensors do not fit together.
    """
    problem = (source.dtype, target.dtype) not in _PAIRS or source.numel() != target.numel()
    if problem or not (source.is_contiguous() and target.is_contiguous()) or {source.device.type, target.device.type} != {"cpu"}:
        raise HfZeroError(
            f"convert: {source.numel()} elements of {source.dtype} to {target.numel()} of {target.dtype}; fp32 to or from bf16 or fp16, "
            "of one size, contiguous and in host memory is expected"
        )
    native = library_for(source)
    if native is None:
        target.view(-1).copy_(source.detach().view(-1))
        return

    def work(start: int, stop: int) -> None:
        types = ELEMENT_TYPES[source.dtype], ELEMENT_TYPES[target.dtype]
        native.call("hfz_convert", ctypes.c_int64(stop - start), address(source, start), types[0], address(target, start), types[1])

    for_thread_ranges(source.numel(), threads, work)


def copy(target: Tensor, source: Tensor, *, threads: int = 1) -> None:
    """Write ``source`` to ``target``, bit for bit; the version counter of ``target`` does not change.

    Args:
        target: Contiguous tensor in host memory, of the size and dtype of ``source``.
        source: Contiguous tensor in host memory. Other Python threads run meanwhile.
        threads: Maximum number of threads.

    Raises:
        HfZeroError: The tensors do not fit together.
    """
    fits = source.dtype == target.dtype and source.numel() == target.numel() and source.is_contiguous() and target.is_contiguous()
    if not fits or {source.device.type, target.device.type} != {"cpu"}:
        raise HfZeroError(
            f"copy: target is {target.dtype}, {target.numel()} elements on {target.device}, source {source.dtype}, {source.numel()} on "
            f"{source.device}; both must be alike, contiguous and in host memory"
        )
    native = library()
    if native is None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        native.handle.hfz_threaded_copy(ctypes.c_int32(threads), ctypes.c_int64(source.nbytes), address(target), address(source))
