"""Memory of this process: what a call adds at its peak, and what tensors hold."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

STATUS = Path("/proc/self/status")


def peak_growth(call: Callable[[], object], kind: str = "RssAnon") -> int:
    """Bytes of anonymous memory (``RssFile``: of mapped files) that ``call`` adds at its peak; skips where the kernel does not tell."""
    gc.collect()
    if not STATUS.exists():
        pytest.skip("needs /proc/self/status")
    before = peak = resident_bytes(kind)
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, resident_bytes(kind))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        call()
    finally:
        done.set()
        watcher.join()
    return peak - before


def resident_bytes(kind: str) -> int:
    """Bytes of this process in memory: ``RssAnon`` are those of its own, ``RssFile`` those of mapped files."""
    return 1024 * int(next(line for line in STATUS.read_text().splitlines() if line.startswith(kind)).split()[1])


def live_bytes() -> int:
    """Bytes of all tensor storages that Python objects of this process keep alive."""
    gc.collect()
    storages: dict[int, int] = {}
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), torch.Tensor):
            continue
        for tensor in (candidate, candidate.grad if candidate.is_leaf else None):
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
