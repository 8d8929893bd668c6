"""Read ranges of bytes of one file: from a disk, where the kernel reads ahead, or from an object store, where threads read ahead."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

from hf_zero.system.object_store import ObjectPath, Place
from hf_zero.system.text_file import opened

# Windows that are fetched while one is verified and copied: each request to a store takes a round trip.
_AHEAD_ON_DISK = 2
_AHEAD_IN_STORE = 4


class Ranges(Protocol):
    """Ranges of bytes of an open file.

    Attributes:
        ahead: Ranges to ask for before the first of them is read.
    """

    ahead: int

    def size(self) -> int:
        """Return the bytes of the file."""

    def fetch(self, offset: int, nbytes: int) -> None:
        """Begin to fetch a range that ``read_into`` will request; a hint."""

    def read_into(self, place: memoryview, offset: int) -> int:
        """Fill ``place``, or the first part of it, with the bytes from ``offset`` on; return their number, 0 at the end of the file."""


@contextmanager
def ranges_of(path: Place) -> Iterator[Ranges]:
    """Open a file for reading in a context.

    Raises:
        OSError: It cannot be opened, or is not a regular file; names it.
    """
    if isinstance(path, ObjectPath):
        found = ObjectRanges(path)
        try:
            yield found
        finally:
            found.close()
        return
    with opened(path) as descriptor:
        yield FileRanges(descriptor)


class FileRanges:
    """Ranges of a file of a disk.

    Args:
        descriptor: The open file.
    """

    ahead = _AHEAD_ON_DISK

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def size(self) -> int:
        """Return the bytes of the file."""
        return os.fstat(self._descriptor).st_size

    def fetch(self, offset: int, nbytes: int) -> None:
        """Advise the kernel to read a range."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def read_into(self, place: memoryview, offset: int) -> int:
        """Fill ``place`` from ``offset`` on; return the number of bytes."""
        return os.preadv(self._descriptor, [place], offset)


class ObjectRanges:
    """Ranges of an object in a store. Threads fetch the requested ranges, and each range is kept until it is read.

    Args:
        path: The object.
    """

    ahead = _AHEAD_IN_STORE

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self._coming: dict[tuple[int, int], Future[bytes]] = {}
        self._helpers: ThreadPoolExecutor | None = None

    def size(self) -> int:
        """Return the bytes of the object."""
        return int(self._path.stat().st_size)

    def fetch(self, offset: int, nbytes: int) -> None:
        """Request a range in a thread. Do nothing outside of the main thread: pools accept no work after the main thread has ended."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(self.ahead, thread_name_prefix="hf_zero store")
        self._coming[offset, nbytes] = self._helpers.submit(self._path.get_range, offset, offset + nbytes)

    def read_into(self, place: memoryview, offset: int) -> int:
        """Fill ``place`` from ``offset`` on; return the number of bytes."""
        coming = self._coming.pop((offset, len(place)), None)
        data = coming.result() if coming is not None else self._path.get_range(offset, offset + len(place))
        place[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Drop the ranges that were fetched and not read."""
        self._coming.clear()
        if self._helpers is not None:
            self._helpers.shutdown(cancel_futures=True)
