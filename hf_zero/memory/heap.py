"""Control how much memory the C library's heap keeps while a sharded model is built, and while it is trained on a host.

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
from typing import Any

# Parameters of mallopt, and the values that the library sets itself after a few large blocks were freed.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_USUAL_TRIM, _USUAL_MMAP = 64 << 20, 32 << 20
_TRAINING_TRIM = 256 << 20  # settings belong to the process
_BUILDING = 1 << 20

_returning = False


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
