"""Cut a range of elements into one range per thread. The kernels' results do not depend on the cuts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# Ranges begin at multiples of this many elements, so that no range of an aligned tensor begins in the middle of a cache line.
_STEP = 4096
# With fewer elements than this per thread, waking a thread takes longer than it saves.
_LEAST = 1 << 15

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def for_thread_ranges(count: int, threads: int, work: Callable[[int, int], None], *, step: int = _STEP) -> None:
    """Call ``work(start, stop)`` for ranges that cover ``range(count)``, on the calling thread and up to ``threads - 1`` others.

    Args:
        count: Number of elements.
        threads: Maximum number of threads; few elements use fewer.
        work: Function that must release the GIL to run in parallel, as ctypes calls do. Its error is raised here, after all calls have
            ended.
        step: Ranges begin at multiples of this many elements.
    """
    threads = max(1, min(threads, count // _LEAST))
    if threads == 1:
        work(0, count)
        return
    size = -(-count // threads)
    size += -size % step
    starts = range(0, count, size)
    futures = [_executor().submit(work, start, min(start + size, count)) for start in starts[1:]]
    try:
        work(0, size)
    finally:
        errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error


def _executor() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="hf_zero kernel")
        return _pool


def _forget() -> None:
    """Reset the pool in a forked child, which has none of its threads."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
