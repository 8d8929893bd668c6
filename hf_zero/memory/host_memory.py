"""Control host memory: large buffers on huge pages, memory that is mapped from files, and the memory that the C library's heap keeps.

[Note: permanent blocks in the heap] While a sharded model is built and loaded, unsharded tensors are allocated and freed between permanent
shards. After the first few, the C library takes them all from one heap, and cannot return memory below a permanent block: a rank that
should have held half of a model of 260 MiB held 290 MiB. Separately mapped blocks are returned at once, but cost page faults, so the
library's usual limits are restored once an engine exists. Limits that the user has set in the environment are not changed.

[Note: memory that a step frees] On a host, every step frees the same temporary tensors and allocates them again. With the usual limit, the
heap returns its end to the system in between: 10,000 page faults and 30 ms of processor time in a step of 1 s, for a GPT-2 of 24 M
parameters. So the heap is allowed to keep more.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hf_zero.system.planning import planning
from hf_zero.system.process import linux_function

_HUGE_PAGE = 2 << 20  # bytes; x86-64 and aarch64 with 4 KiB pages
_MADV_HUGEPAGE = 14
# Parameters of mallopt, and the values that the library sets itself after a few large blocks were freed.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_USUAL_TRIM, _USUAL_MMAP = 64 << 20, 32 << 20
_TRAINING_TRIM = 256 << 20  # settings belong to the process
_BUILDING = 1 << 20

_returning = False


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialised (numel,) tensor, on huge pages if it is large and on a host."""
    return on_huge_pages(torch.empty(numel, dtype=dtype, device=device))


def passing(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialised (numel,) tensor for use during a part of a step; if it is large and on a host, it begins at a huge page.

    Such a tensor is a view of slightly larger memory. Unaligned, on average 2 MiB of a buffer would be on small pages. Permanent memory
    does not justify the extra address space. No code writes to the rest, so it takes no memory, and a plan leaves it out.
    """
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or nbytes < 2 * _HUGE_PAGE or planning() or _advise() is None:
        return empty(numel, dtype, device)
    # A rest of more than half a page gets a page of its own too.
    paged = nbytes if nbytes % _HUGE_PAGE < _HUGE_PAGE // 2 else -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
    room = torch.empty(paged + _HUGE_PAGE, dtype=torch.uint8)
    aligned = room[-room.data_ptr() % _HUGE_PAGE :][:paged]
    return on_huge_pages(aligned)[:nbytes].view(dtype)


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of ``tensor`` on huge pages; ``tensor`` itself if a copy would gain nothing."""
    if tensor.device.type != "cpu" or tensor.nbytes < 2 * _HUGE_PAGE or _advise() is None:
        return tensor
    return on_huge_pages(torch.empty_like(tensor, memory_format=torch.contiguous_format)).copy_(tensor)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous copy of 1D ``tensor`` in another dtype."""
    return empty(tensor.numel(), dtype, tensor.device).copy_(tensor)


def on_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Ask the kernel to back ``tensor``, not yet written to, with huge pages, and return it.

    [Note: huge pages] A flat buffer is written and read completely once per step. Fresh memory costs a page fault per page, and every pass
    costs look-ups in the page table, most of all in a virtual machine. In one measurement, filling 24 MiB of fresh memory took 10.5 ms on
    pages of 4 KiB and 2.1 ms on pages of 2 MiB (4.8 ms for 24 MiB that were in use before). A kernel that ignores the advice changes
    nothing.
    """
    size = tensor.nbytes
    advise = _advise() if size >= _HUGE_PAGE else None
    if advise is not None and tensor.device.type == "cpu":
        start = tensor.data_ptr()
        first = -(-start // _HUGE_PAGE) * _HUGE_PAGE
        whole = (start + size - first) // _HUGE_PAGE * _HUGE_PAGE
        if whole > 0:
            advise(first, whole, _MADV_HUGEPAGE)
    return tensor


@cache
def _advise() -> Any:
    """Return the C library's madvise; None if it is missing or does not know this advice."""
    return linux_function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def mapped_files() -> list[tuple[int, int]]:
    """Return the address ranges (start, stop) of this process that are pages of files; empty if the kernel does not report them."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    fields = [line.split(maxsplit=5) for line in lines]
    found = [words[0].split("-") for words in fields if len(words) == 6 and words[5].startswith("/")]
    return [(int(start, 16), int(stop, 16)) for start, stop in found]


def return_large_blocks() -> None:
    """Return every large block to the system as soon as it is freed, from now on."""
    global _returning
    _returning = True
    _set_limits(_BUILDING, _BUILDING)


def keep_large_blocks(on_host: bool) -> None:
    """Undo ``return_large_blocks``.

    Args:
        on_host: Whether the model runs in host memory, so that the heap keeps memory that a step frees for the next step.
    """
    global _returning
    if on_host or _returning:
        _returning = False
        _set_limits(_USUAL_MMAP, _TRAINING_TRIM if on_host else _USUAL_TRIM)


def _set_limits(mmap: int, trim: int) -> None:
    set_limit = _mallopt()
    if set_limit is not None and not any(
        name in os.environ for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
    ):
        set_limit(_M_MMAP_THRESHOLD, mmap)
        set_limit(_M_TRIM_THRESHOLD, trim)


@cache
def _mallopt() -> Any:
    """Return glibc's mallopt; None with another C library."""
    try:
        library = ctypes.CDLL(None)
        return library.mallopt if hasattr(library, "gnu_get_libc_version") else None
    except (OSError, AttributeError):
        return None
