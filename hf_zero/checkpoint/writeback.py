"""Has the kernel write to the disk while a file is still growing, so that the ``fsync`` at its end has little left to wait for."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

_SYNC_FILE_RANGE_WRITE = 2


def start_writeback(descriptor: int, offset: int, nbytes: int) -> None:
    """Starts to write ``nbytes`` of a file from ``offset`` on, without waiting for them.

    It is advice: where the kernel does not take it nothing changes, and what goes wrong is reported by ``fsync``.
    """
    sync_file_range = _sync_file_range()
    if sync_file_range is not None:
        sync_file_range(descriptor, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


@cache
def _sync_file_range() -> Any:
    """Linux's call of that name; None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function
