"""Memory of this process: its own resident pages, the growth of a call at its peak, and the bytes of tensors.

``RssAnon`` counts the private pages of a process; pages of mapped files (``RssFile``: a checkpoint being read) can be dropped at any time.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

STATUS = Path("/proc/self/status")


def resident_bytes(kind: str = "RssAnon") -> int:
    """Return the bytes of this process's resident memory; ``kind`` is a field of /proc/self/status, by default anonymous memory."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {kind} in {STATUS}")


def return_freed() -> None:
    """Return free memory of the C library's heap to the system, so that reusing it counts as growth."""
    gc.collect()
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


class _Statistics(ctypes.Structure):
    """Statistics of the C library's heap (``mallinfo2``, glibc 2.33 and newer)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    )


def heap_tells() -> bool:
    """Return whether the C library reports how much of its heap is in use."""
    return hasattr(ctypes.CDLL(None), "mallinfo2")


def in_use_bytes() -> int:
    """Return the allocated bytes of the C library's heap, without the free memory between them."""
    tell = ctypes.CDLL(None).mallinfo2
    tell.restype = _Statistics
    found = tell()
    return int(found.uordblks + found.hblkhd)


class Peak:
    """The peak of this process's memory since ``restart``.

    Args:
        tell: Function that returns the present bytes; called every millisecond.
    """

    def __init__(self, tell: Callable[[], int] = resident_bytes) -> None:
        self._tell = tell
        self.value = tell()
        self._lock = threading.Lock()  # otherwise a reading from before ``restart`` may be kept after it
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            with self._lock:
                self.value = max(self.value, self._tell())

    def restart(self) -> None:
        with self._lock:
            self.value = self._tell()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


def peak_growth(call: Callable[[], object], kind: str = "RssAnon") -> int:
    """Return the bytes of one kind of memory that ``call`` adds to this process at its peak; skip the test without kernel support."""
    if not STATUS.exists():
        pytest.skip(f"needs {STATUS}")
    return_freed()
    before = resident_bytes(kind)
    peak = Peak(partial(resident_bytes, kind))
    try:
        call()
    finally:
        peak.close()
    return peak.value - before


def live_bytes() -> int:
    """Return the bytes of all tensor storages that Python objects keep alive, once gloo's thread has released its tensors."""
    found = -1
    for _ in range(40):  # gloo's thread keeps the tensors of a collective a moment longer than it runs
        before, found = found, _live_bytes()
        if found == before:
            break
        time.sleep(0.05)
    return found


def _live_bytes() -> int:
    gc.collect()
    storages: dict[int, int] = {}
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), torch.Tensor):
            continue
        with torch._C.DisableTorchFunctionSubclass():  # tensors of optimizer.param_groups refuse to show gradients before a step
            grad = candidate.grad if candidate.is_leaf else None
        for tensor in (candidate, grad):
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
