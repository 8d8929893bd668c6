"""Memory of this process: its own resident pages, what a call adds at its peak, and what tensors hold.

``RssAnon`` counts what a process has to itself; pages of mapped files (``RssFile``: a checkpoint being read) can be dropped any time.
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
    """Bytes of this process in memory of one kind."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {kind} in {STATUS}")


def return_freed() -> None:
    """Gives what the C library's heap keeps of freed memory back to the system, so that using it again counts."""
    gc.collect()
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


class _Statistics(ctypes.Structure):
    """What the C library says of its heap (``mallinfo2``, glibc 2.33 and newer)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    )


def heap_tells() -> bool:
    """Whether the C library tells what of its heap is in use."""
    return hasattr(ctypes.CDLL(None), "mallinfo2")


def in_use_bytes() -> int:
    """Bytes of the C library's heap that were asked for and not given back; what it keeps between them is not counted."""
    tell = ctypes.CDLL(None).mallinfo2
    tell.restype = _Statistics
    found = tell()
    return int(found.uordblks + found.hblkhd)


class Peak:
    """The most memory this process had at any time since ``restart``.

    Args:
        tell: Says how much it is now; looked at every millisecond.
    """

    def __init__(self, tell: Callable[[], int] = resident_bytes) -> None:
        self._tell = tell
        self.value = tell()
        self._lock = threading.Lock()  # else a reading from before ``restart`` may be kept after it
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
    """Bytes of one kind of memory that ``call`` adds to this process at its peak; skips where the kernel does not tell."""
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
    """Bytes of all tensor storages that Python objects of this process keep alive, when no thread of a network lets go of any more."""
    found = -1
    for _ in range(40):  # gloo's thread holds the tensors of a collective a moment longer than the collective takes
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
        for tensor in (candidate, candidate.grad if candidate.is_leaf else None):
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
