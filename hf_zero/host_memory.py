"""Host memory: large buffers on huge pages, blocks given back, and what is mapped from files."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

_HUGE_PAGE = 2 << 20  # bytes; x86-64 and aarch64 with 4 KiB pages
_MADV_HUGEPAGE = 14
# Of the C library's mallopt, and what it sets itself once a few large blocks have come and gone.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_USUAL_TRIM, _USUAL_MMAP = 64 << 20, 32 << 20
_BUILDING_MMAP = 1 << 20


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised (numel,) tensor, on huge pages if it is large and on a host."""
    return on_huge_pages(torch.empty(numel, dtype=dtype, device=device))


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of ``tensor`` on huge pages; ``tensor`` itself where that would gain nothing."""
    if tensor.device.type != "cpu" or tensor.nbytes < 2 * _HUGE_PAGE or _advise() is None:
        return tensor
    return on_huge_pages(torch.empty_like(tensor, memory_format=torch.contiguous_format)).copy_(tensor)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous copy of 1D ``tensor`` in another element type."""
    return empty(tensor.numel(), dtype, tensor.device).copy_(tensor)


def on_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Asks the kernel to back ``tensor``, not yet written to, with huge pages; returns it.

    [Note: huge pages] A flat buffer is written and read from end to end once a step. Fresh memory costs a fault per page, and
    walking the page table costs again on every pass, most of all in a virtual machine. Filling 24 MiB of fresh memory took 10.5 ms
    on pages of 4 KiB and 2.1 ms on pages of 2 MiB where this was written (24 MiB in use already: 4.8 ms). It is advice: where the
    kernel does not take it nothing changes.
    """
    advise = _advise()
    if advise is not None and tensor.device.type == "cpu":
        start, size = tensor.data_ptr(), tensor.nbytes
        first = -(-start // _HUGE_PAGE) * _HUGE_PAGE
        whole = (start + size - first) // _HUGE_PAGE * _HUGE_PAGE
        if whole > 0:
            advise(first, whole, _MADV_HUGEPAGE)
    return tensor


@cache
def _advise() -> Any:
    """The C library's madvise; None where there is none or it has no such advice."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def mapped_files() -> list[tuple[int, int]]:
    """Address ranges of this process that are pages of files, (start, stop); empty where the kernel does not tell."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    fields = [line.split(maxsplit=5) for line in lines]
    found = [words[0].split("-") for words in fields if len(words) == 6 and words[5].startswith("/")]
    return [(int(start, 16), int(stop, 16)) for start, stop in found]


def give_back_large_blocks(begins: bool) -> None:
    """Has the C library return every large block as soon as it is freed, from the moment a model is built until its engine is.

    [Note: what stays between what goes] While a sharded model is built and loaded, whole tensors come and go between shards that stay.
    The C library serves them from one heap after the first few, and cannot return what lies below a block that stays: a rank that should
    have held half of a model of 260 MiB held 290 MiB. Blocks of their own are returned at once; they cost page faults, so the
    library's usual limits come back when the engine is there. A limit that the user has set in the environment is left alone.
    """
    set_limit = _mallopt()
    if set_limit is not None and not any(name in os.environ for name in ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")):
        set_limit(_M_MMAP_THRESHOLD, _BUILDING_MMAP if begins else _USUAL_MMAP)
        set_limit(_M_TRIM_THRESHOLD, _BUILDING_MMAP if begins else _USUAL_TRIM)


@cache
def _mallopt() -> Any:
    """glibc's mallopt; None with another C library."""
    try:
        library = ctypes.CDLL(None)
        return library.mallopt if hasattr(library, "gnu_get_libc_version") else None
    except (OSError, AttributeError):
        return None
