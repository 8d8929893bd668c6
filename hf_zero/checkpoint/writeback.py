"""When files reach the disk: while they grow, so that ``fsync`` has little left to wait for, and all of a save together."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
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


class Unsynced:
    """Files that are written and may not be on the disk yet. Those that ``sync`` has not seen are closed at the end of the ``with``.

    A file that the file system refuses is removed, so that a full disk has room for messages.
    """

    def __init__(self) -> None:
        self._files: list[tuple[Path, int]] = []

    def __enter__(self) -> Unsynced:
        return self

    def __exit__(self, *_outcome: object) -> None:
        for _path, descriptor in self._files:
            os.close(descriptor)
        self._files = []

    @contextmanager
    def writing(self, path: Path) -> Iterator[int]:
        """A descriptor of the new file ``path``, which is one of these when the ``with`` has ended well.

        Raises:
            FileExistsError: It is there.
            OSError: The file system refuses; names the file.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            with _named(path):
                yield descriptor
        except BaseException:
            os.close(descriptor)
            raise
        self._files.append((path, descriptor))

    def take(self, others: Unsynced) -> None:
        """Takes over the files of ``others``."""
        self._files += others._files
        others._files = []

    def sync(self) -> None:
        """Forces all of them to the disk.

        Raises:
            OSError: The file system refuses; names the file.
        """
        while self._files:
            path, descriptor = self._files.pop(0)
            try:
                with _named(path):
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Gives an ``OSError`` the name of the file, and removes that."""
    try:
        yield
    except OSError as error:
        path.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
