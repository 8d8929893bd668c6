"""Writing of the files of one save: past the page cache where the file system allows it, with one sync of all files at the end."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hf_zero.system import own_files
from hf_zero.system.folder import Folder
from hf_zero.system.object_store import Place
from hf_zero.system.process import linux_function

try:
    import fcntl
except ImportError:  # no such system has O_DIRECT
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")

# Smaller files go through the page cache.
DIRECT_FROM = 8 << 20
_BLOCK_BYTES = 4096  # positions, sizes and addresses of direct writes are multiples of this
_BUFFER_BYTES = 4 << 20
_BUFFERS = 3  # two on their way to the disk while the third is filled
_SYNC_FILE_RANGE_WRITE = 2


class Disk:
    """The files of one save, until ``sync``. The end of the ``with`` closes files that ``sync`` has not handled.

    [Note: past the page cache] A checkpoint is not read again soon, and copying it into the page cache takes the processor longer than
    a fast disk takes to store it. Large files are therefore written with O_DIRECT: from buffers of 4 MiB that are filled and summed
    while others are on their way. Where the file system does not take that, and for small files, writes go through the page cache,
    and the kernel is asked to start storing them at once.

    A file that the file system refuses is removed, so that a full disk has room for messages.

    Args:
        direct: Bypass the page cache where that can be.
        former: Folder of files that nobody needs any more. A new file takes the place of the one with its name there, and is written over
            it: to free the pages of a file in memory and to get others takes longer than to overwrite them.
    """

    def __init__(self, direct: bool = True, former: Path | None = None) -> None:
        self._former = former
        self._direct = direct and fcntl is not None and hasattr(os, "O_DIRECT")
        self._files: list[DiskFile] = []
        self._free: list[mmap.mmap] | None = None
        self._pending: list[tuple[Future[None], mmap.mmap]] = []
        # A thread in the background has others to share the processor with, and may outlive the main thread, when no pool takes work
        # any more: it waits for each of its writes.
        alone = threading.current_thread() is not threading.main_thread()
        self._helpers = None if alone else ThreadPoolExecutor(_BUFFERS - 1, thread_name_prefix="hf_zero disk")

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *_outcome: object) -> None:
        for future, _ in self._pending:
            with contextlib.suppress(OSError):
                future.result()
        if self._helpers is not None:
            self._helpers.shutdown()
        for file in self._files:
            os.close(file.descriptor)
        self._files, self._pending, self._free = [], [], None

    def each(self, works: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Return the results of ``works``, one after the other: a disk is written fastest front to back."""
        return {name: work() for name, work in works.items()}

    def repeated(self, _path: Place, work: Callable[[], T]) -> T:
        """Return the result of ``work``, which writes a file; a disk that refuses once is not asked again."""
        return work()

    @contextmanager
    def writing(self, path: Place, nbytes: int, folder: Folder | None = None) -> Iterator[DiskFile]:
        """Write the new file ``path`` of ``nbytes`` in a context, which gives the open file. ``folder`` is its folder, if that is open.

        Raises:
            FileExistsError: It is there.
            OSError: The file system refuses; names the file.
        """
        if not isinstance(path, Path):
            raise TypeError(f"{path} is no file of a disk")
        with contextlib.ExitStack() as stack:
            place = folder if folder is not None else stack.enter_context(Folder(path.parent))
            descriptor = self._take_former(place, path.name, nbytes)
            if descriptor is None:
                descriptor = place.create(path.name)
        file = DiskFile(self, path, descriptor, self._direct and nbytes >= DIRECT_FROM and _make_direct(descriptor))
        self._files.append(file)
        with file.named():
            yield file
            file.flush()

    def _take_former(self, place: Folder, name: str, nbytes: int) -> int | None:
        """Move the former file ``name`` to ``place`` and cut it to ``nbytes``; return its descriptor, open for writing. Return None if
        there is none that can be written over.
        """
        if self._former is None or place.has(name):
            return None
        try:
            with Folder(self._former, ours=True) as former:
                descriptor = former.reopen(name)
                try:
                    if os.fstat(descriptor).st_size > nbytes:
                        os.ftruncate(descriptor, nbytes)
                    former.move(name, name, place)
                except OSError:
                    os.close(descriptor)
                    raise
        except OSError:
            return None
        return descriptor

    def sync(self) -> None:
        """Forces all files to the disk and closes them.

        Raises:
            OSError: The file system refuses; names the file.
        """
        self._drain()
        while self._files:
            file = self._files.pop(0)
            try:
                with file.named():
                    file.end()
                    os.fsync(file.descriptor)
            finally:
                os.close(file.descriptor)

    # -- buffers

    def buffer(self) -> mmap.mmap:
        """Return a buffer that no pending write reads any more."""
        if self._free is None:
            self._free = [_aligned() for _ in range(_BUFFERS if self._helpers is not None else 1)]
        while not self._free:
            future, buffer = self._pending.pop(0)
            self._free.append(buffer)
            future.result()
        return self._free.pop()

    def store(self, buffer: mmap.mmap, work: Callable[[], None]) -> None:
        """Submit ``work``, which writes the content of ``buffer``; the buffer is free afterwards."""
        if self._helpers is not None:
            self._pending.append((self._helpers.submit(work), buffer))
            return
        self.give_back(buffer)
        work()

    def give_back(self, buffer: mmap.mmap) -> None:
        """Take back a buffer whose bytes will not be written."""
        if self._free is not None:
            self._free.append(buffer)

    def _drain(self) -> None:
        while self._pending:
            future, buffer = self._pending.pop(0)
            self.give_back(buffer)
            future.result()


@dataclass
class DiskFile:
    """A new file that is written front to back.

    Attributes:
        disk: Disk to which it belongs.
        path: Path of the file.
        descriptor: Its descriptor, open for writing.
        direct: Whether writes bypass the page cache.
    """

    disk: Disk
    path: Path
    descriptor: int
    direct: bool

    def __post_init__(self) -> None:
        self._position = 0  # place in the file of the buffer's first byte
        self._begun = 0  # bytes that the kernel was asked to store
        self._buffer: mmap.mmap | None = None
        self._filled = 0
        self._tail = b""  # less than a block

    def write(self, data: memoryview) -> None:
        """Appends ``data``, which may change afterwards."""
        if not self.direct:
            _put(self.descriptor, data, self._position)
            self._position += len(data)
            return
        while data:
            if self._buffer is None:
                self._buffer, self._filled = self.disk.buffer(), 0
            part = data[: _BUFFER_BYTES - self._filled]
            place = np.frombuffer(self._buffer, np.uint8, len(part), self._filled)
            np.copyto(place, np.frombuffer(part, np.uint8))  # the only copy, and other threads run meanwhile
            self._filled += len(part)
            if self._filled == _BUFFER_BYTES:
                self._store(self._buffer, self._filled)
            data = data[len(part) :]

    def start_writeback(self) -> None:
        """Ask the kernel to begin to store the bytes written so far, so that ``fsync`` waits less. It is only a hint."""
        function = _sync_file_range()
        if not self.direct and function is not None:
            function(self.descriptor, self._begun, self._position - self._begun, _SYNC_FILE_RANGE_WRITE)
            self._begun = self._position

    def flush(self) -> None:
        """Write the remaining bytes to the disk, except the last incomplete block, which ``end`` writes."""
        if self._buffer is None:
            return
        whole = self._filled // _BLOCK_BYTES * _BLOCK_BYTES
        self._tail = self._buffer[whole : self._filled]
        if whole:
            self._store(self._buffer, whole)
        else:
            self.disk.give_back(self._buffer)
            self._buffer = None

    def end(self) -> None:
        """Write the end of the file, after all other bytes have been written."""
        if self._tail:
            _through_the_cache(self.descriptor)
            _put(self.descriptor, memoryview(self._tail), self._position)

    def _store(self, buffer: mmap.mmap, nbytes: int) -> None:
        position = self._position
        self._buffer, self._position = None, position + nbytes

        def work() -> None:
            with self.named():
                _put(self.descriptor, memoryview(buffer)[:nbytes], position)

        self.disk.store(buffer, work)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Add the name of the file to an ``OSError``, and remove the file."""
        try:
            yield
        except OSError as error:
            if error.filename is None:  # else it is another file's
                own_files.remove_file(self.path)
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            raise


def _aligned() -> mmap.mmap:
    """Return memory that begins at a page."""
    return mmap.mmap(-1, _BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _put(descriptor: int, data: memoryview, position: int) -> None:
    """Write all of ``data`` at ``position``."""
    refused = False
    while data:
        try:
            count = os.pwrite(descriptor, data, position)
        except OSError as error:
            if error.errno != errno.EINVAL or refused:
                raise
            refused = True  # some file systems take the flag and refuse the writes
            _through_the_cache(descriptor)
            continue
        data, position = data[count:], position + count


def _make_direct(descriptor: int) -> bool:
    """Has writes bypass the page cache; whether the file system takes that."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


def _through_the_cache(descriptor: int) -> None:
    """Has writes go through the page cache again."""
    if fcntl is not None and hasattr(os, "O_DIRECT"):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)


@cache
def _sync_file_range() -> Any:
    """Return Linux's call of that name; None elsewhere."""
    return linux_function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
