"""Memory that a call adds to this process at its peak."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

STATUS = Path("/proc/self/status")


def peak_growth(call: Callable[[], object]) -> int:
    """Bytes of anonymous memory (not of mapped files) that ``call`` adds at its peak; skips where the kernel does not tell."""
    gc.collect()
    if not STATUS.exists():
        pytest.skip("needs /proc/self/status")
    before = peak = anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        call()
    finally:
        done.set()
        watcher.join()
    return peak - before


def anonymous_bytes() -> int:
    """Bytes of this process in memory that are no mapped file."""
    return 1024 * int(next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon")).split()[1])
