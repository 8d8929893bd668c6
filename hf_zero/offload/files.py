"""Swap files: plain files of one rank, read and written in aligned pieces by a few threads, past the page cache where possible.

A memory plan uses replacements that have sizes but no disk.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import mmap
import multiprocessing.util
import os
import platform
import shutil
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_zero.config.schema.storage import Aio
from hf_zero.errors import OffloadError
from hf_zero.memory.buffers import ALIGNMENT
from hf_zero.observe import log_rank0, logger, warn_once
from hf_zero.system import own_files
from hf_zero.system.folder import Folder
from hf_zero.system.planning import placed
from hf_zero.system.sizes import gib

_PREFIX = "hf_zero_swap_"
_LOCK_FILE = "in_use"
FILES = ("optimizer.bin", "parameters.bin")  # no other file is created in a swap folder, and no other is deleted
# Mapped parts of a file begin at a multiple of this; some machines need 64 KiB.
GRANULARITY = max(ALIGNMENT, mmap.ALLOCATIONGRANULARITY)


class SwapFolder:
    """A folder of this process below ``nvme_path``; it is removed with its files at exit, also after an exception.

    [Note: what a killed process leaves] A process cannot clean up after SIGKILL. So each folder holds a lock that the kernel releases when
    the process ends, and a process that makes a folder first removes folders beside it, of the same machine, whose lock is free. A folder
    gets a name by which it can be found only after its lock is held.

    Attributes:
        path: The folder.

    Args:
        root: ``nvme_path``; created if missing.
        rank: Rank of this process, for the name.

    Raises:
        OffloadError: The folder cannot be made.
    """

    def __init__(self, root: str | os.PathLike[str], rank: int) -> None:
        base = Path(root).expanduser()
        machine = f"{_PREFIX}{platform.node()}_"
        try:
            _make_root(base)
            _remove_abandoned(base, machine)
            self.path, lock = _make_locked(base / f"{machine}rank{rank}_{os.urandom(6).hex()}")
        except OSError as error:
            raise OffloadError(
                f"no swap files can be made in nvme_path {str(base)!r}: {error}. Name a folder that can be written to"
            ) from error
        self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())
        # The finalizer also runs at the end of a child of multiprocessing, which skips atexit handlers.
        multiprocessing.util.Finalize(None, self._finalizer, exitpriority=0)

    def remove(self) -> None:
        """Remove the folder and its files; a second call does nothing."""
        self._finalizer()


def _make_root(base: Path) -> None:
    """Create the folder ``base`` if it does not exist; the process of this machine that creates it warns, because its name may be wrong."""
    if own_files.make_folders(base):
        free = gib(shutil.disk_usage(base).free)
        logger.warning("nvme_path %r did not exist: it is created, on a file system with %s free. Check the name", str(base), free)


class _Lock(enum.Enum):
    """Result of an attempt to lock a file; unknown without support for locks, so that no folder is then treated as abandoned."""

    HELD = enum.auto()
    TAKEN = enum.auto()
    UNKNOWN = enum.auto()


def _try_lock(descriptor: int) -> _Lock:
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _Lock.TAKEN
    except (ImportError, OSError):
        return _Lock.UNKNOWN
    return _Lock.HELD


def _make_locked(path: Path) -> tuple[Path, int]:
    """Create the folder ``path``, locked before it has this name; return it and the descriptor that holds the lock."""
    made = path.with_name(own_files.hidden_name(path.name))
    lock: int | None = None
    with Folder(path.parent) as above:
        above.make_folder(made.name, 0o700)
    try:
        with Folder(made, ours=True) as inner:
            lock = inner.create(_LOCK_FILE, 0o600, reads=True)
        outcome = _try_lock(lock)
        if outcome is _Lock.TAKEN:
            raise OSError(errno.EWOULDBLOCK, "another process has locked it", str(made / _LOCK_FILE))
        if outcome is _Lock.UNKNOWN:
            warn_once(f"{path.parent}: its file system has no locks, so swap files that a killed run leaves there are never removed")
        own_files.move(made, path)
    except OSError:
        own_files.remove_folder(made, _is_ours, last=_LOCK_FILE)
        if lock is not None:
            os.close(lock)
        raise
    return path, lock


def _is_ours(name: str) -> bool:
    return name == _LOCK_FILE or name in FILES


def _remove(path: Path, lock: int, maker: int) -> None:
    own_files.remove_folder(path, _is_ours, last=_LOCK_FILE, maker=maker)
    with contextlib.suppress(OSError):
        os.close(lock)


def _remove_abandoned(base: Path, machine: str) -> None:
    own_files.sweep(base, _is_ours)
    for folder in base.glob(f"{machine}*"):
        with contextlib.suppress(OSError):
            with Folder(folder, ours=True) as opened:
                descriptor = opened.reopen(_LOCK_FILE)
                try:
                    if _try_lock(descriptor) is _Lock.HELD:
                        log_rank0("removing swap files that a killed run left in %s", folder)
                        own_files.remove_folder(folder, _is_ours, last=_LOCK_FILE, opened=opened)
                finally:
                    os.close(descriptor)


@dataclass
class Transfer:
    """Reads or writes in flight; call ``wait`` before the buffer is used."""

    futures: list[Future[None]]

    def wait(self) -> None:
        """Wait until the transfer is done. After an interrupt of the wait, the next call waits for the rest; an error is raised once.

        Raises:
            OffloadError: A part of the transfer failed.
        """
        # Wait for all parts, so that the buffer is free when the first error is raised.
        failures = [failure for future in self.futures if (failure := future.exception()) is not None]
        self.futures = []
        if failures:
            raise failures[0]


class SwapFile:
    """One file of regions; a pool of threads reads and writes it from aligned buffers.

    Attributes:
        path: Path of the file.
        nbytes: Total bytes of its regions.
        direct: Access bypasses the page cache.

    Args:
        path: Path of a file that does not exist yet.
        settings: Size and number of requests; None takes the defaults.

    Raises:
        OffloadError: The file cannot be created.
    """

    def __init__(self, path: Path, settings: Aio | None = None) -> None:
        self.path = path
        self.nbytes = 0
        self._room = 0
        self.settings = settings or Aio()
        self.direct = True
        try:
            with Folder(path.parent, ours=True) as folder:
                self._buffered = folder.create(path.name, 0o600, reads=True)
                try:
                    self._unbuffered = folder.reopen(path.name, os.O_RDWR | getattr(os, "O_DIRECT", 0))
                    self.direct = hasattr(os, "O_DIRECT")
                except OSError:  # tmpfs and other file systems without O_DIRECT: use the page cache
                    self._unbuffered = folder.reopen(path.name)
                    self.direct = False
        except OSError as error:
            raise self._error("make", 0, 0, error) from error
        if not self.direct:
            warn_once(f"the file system of {path.parent} has no unbuffered access: swap files go through the page cache")
        self._pool = ThreadPoolExecutor(self.settings.queue_depth, thread_name_prefix="hf_zero_nvme")
        self._finalizer = weakref.finalize(self, _close_file, self._pool, (self._buffered, self._unbuffered))

    def make_room(self, nbytes: int) -> None:
        """Make the file at least ``nbytes`` long, in one call, so that the disk has room for all of it from now on.

        Raises:
            OffloadError: The disk has too little room.
        """
        if nbytes <= self._room:
            return
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._buffered, self._room, nbytes - self._room)
            else:
                os.truncate(self._buffered, nbytes)
        except OSError as error:
            raise self._error("reserve", nbytes - self._room, self._room, error) from error
        self._room = nbytes

    def reserve(self, nbytes: int) -> int:
        """Return the offset of a new region of ``nbytes`` zeros, for which the disk has room from now on.

        Raises:
            OffloadError: The disk has too little room.
        """
        offset = self.nbytes
        end = offset + -(-nbytes // GRANULARITY) * GRANULARITY
        self.make_room(end)
        self.nbytes = end
        return offset

    def map(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a (numel,) tensor that *is* the file's content from ``offset`` on: pages are read on access, and written back by the
        kernel.

        [Note: mapped and direct access] Linux keeps both coherent: unbuffered reads write changed pages back first, unbuffered writes drop
        pages. A tensor that is not in a buffer is a mapped tensor: it takes no memory, and code that needs its value (a checkpoint,
        ``safe_get_full_fp32_param``) just reads it. Between steps nothing is in flight, so no reader sees half of a write.
        """
        nbytes = numel * dtype.itemsize
        if not nbytes:
            return torch.empty(0, dtype=dtype)
        view = mmap.mmap(self._buffered, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
        return torch.frombuffer(view, dtype=dtype)

    def read(self, offset: int, buffer: torch.Tensor) -> Transfer:
        """Start to read the file from ``offset`` on into ``buffer``, a uint8 tensor; offset, address and size must be multiples of
        ``ALIGNMENT``.
        """
        return self._submit(self._read_part, offset, buffer)

    def write(self, offset: int, buffer: torch.Tensor) -> Transfer:
        """Start to write ``buffer``, a uint8 tensor, to the file from ``offset`` on; offset, address and size must be multiples of
        ``ALIGNMENT``.
        """
        return self._submit(self._write_part, offset, buffer)

    def _submit(self, work: Callable[[int, memoryview], None], offset: int, buffer: torch.Tensor) -> Transfer:
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]
        step = max(ALIGNMENT, self.settings.block_size // ALIGNMENT * ALIGNMENT)
        parts = range(0, len(view), step)
        return Transfer([self._pool.submit(work, offset + start, view[start : start + step]) for start in parts])

    def _read_part(self, offset: int, view: memoryview) -> None:
        self._complete("read", lambda descriptor, rest, place: os.preadv(descriptor, [rest], place), offset, view)

    def _write_part(self, offset: int, view: memoryview) -> None:
        self._complete("write", lambda descriptor, rest, place: os.pwrite(descriptor, rest, place), offset, view)

    def _complete(self, what: str, call: Callable[[int, memoryview, int], int], offset: int, view: memoryview) -> None:
        """Repeat ``call`` until all of ``view`` is transferred; use the page cache where the file system refuses unbuffered access."""
        done, descriptor = 0, self._unbuffered
        while done < len(view):
            try:
                count = call(descriptor, view[done:], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and descriptor != self._buffered:
                    descriptor = self._buffered
                    continue
                raise self._error(what, len(view) - done, offset + done, error) from error
            if count <= 0:
                raise self._error(what, len(view) - done, offset + done, OSError(errno.EIO, "the file ends there"))
            done += count
            if done % ALIGNMENT:
                descriptor = self._buffered  # after a short transfer the remainder is not aligned

    def _error(self, what: str, nbytes: int, offset: int, error: OSError) -> OffloadError:
        space = ""
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(self.path.parent)
            space = f" ({gib(usage.free)} of {gib(usage.total)} are free there)"
        where = f"{gib(nbytes)} at byte {offset} of the swap file {self.path}"
        return OffloadError(f"cannot {what} {where}: {error}{space}. Make room, or set nvme_path to another disk")

    def close(self) -> None:
        """Wait for transfers in flight and close the file; mapped tensors stay readable until they are dropped."""
        self._finalizer()


def _close_file(pool: ThreadPoolExecutor, descriptors: tuple[int, ...]) -> None:
    pool.shutdown(wait=True)
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


class PlannedFolder(SwapFolder):
    """Replacement of ``SwapFolder`` in a memory plan, without a folder."""

    def __init__(self) -> None:
        self.path = Path()

    def remove(self) -> None:
        """Do nothing: there is no folder."""


class PlannedFile(SwapFile):
    """Replacement of ``SwapFile`` in a memory plan: regions are tensors without values, in the tier "disk"."""

    def __init__(self) -> None:
        self.path, self.nbytes, self.settings, self.direct = Path(), 0, Aio(), True
        self._regions: dict[int, torch.Tensor] = {}

    def make_room(self, nbytes: int) -> None:
        """Do nothing: the plan checks at its end whether there is room."""

    def reserve(self, nbytes: int) -> int:
        offset = self.nbytes
        self.nbytes += -(-nbytes // GRANULARITY) * GRANULARITY
        with placed("disk"):
            self._regions[offset] = torch.empty(self.nbytes - offset, dtype=torch.uint8, device="cpu")
        return offset

    def map(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        start = max(begin for begin in self._regions if begin <= offset)
        return self._regions[start][offset - start : offset - start + numel * dtype.itemsize].view(dtype)

    def read(self, offset: int, buffer: torch.Tensor) -> Transfer:
        return Transfer([])

    write = read

    def close(self) -> None:
        self._regions.clear()
