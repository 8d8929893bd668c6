"""Read safetensors files by ranges, and verify the checksum of each chunk.

A range is read ahead: by the kernel from a disk, by threads from an object store.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from hf_zero.checkpoint.files.rows import WINDOW_BYTES, Elsewhere, Row
from hf_zero.checkpoint.format.checksum import digits_of, digits_of_range, first_damaged
from hf_zero.checkpoint.format.names import CHUNK_BYTES, DTYPES, ITEM_BYTES
from hf_zero.checkpoint.format.records import FileRecord, TensorRecord
from hf_zero.errors import CheckpointError
from hf_zero.system.object_store import ObjectPath, Place
from hf_zero.system.reading import parse_json, reading, shown
from hf_zero.system.text_file import opened

# Windows that are fetched while one is verified and copied: each request to a store takes a round trip.
_AHEAD_ON_DISK = 2
_AHEAD_IN_STORE = 10  # as many connections as libraries of stores keep open


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


@dataclass(frozen=True)
class Copy:
    """Elements to read: those of tensor ``tensor`` in ``file`` from ``start`` on go to the row ``target``, cast to its dtype."""

    file: str
    tensor: str
    start: int
    target: Row


class RangeReader:
    """Reader of ranges of the tensors of one folder, a window at a time; it verifies the checksum of each chunk.

    Attributes:
        bytes_read: Bytes read from files so far.
    """

    def __init__(self, folder: Place, files: Mapping[str, FileRecord]) -> None:
        self.folder = folder
        self.files = files
        self.bytes_read = 0
        self._verified: set[str] = set()  # files whose header has been read
        self._window = bytearray()  # kept: fresh memory costs a page fault every 4 KiB

    def read(self, copies: Iterable[Copy]) -> None:
        """Carries out ``copies``; ranges of one tensor that lie close are read together.

        Raises:
            CheckpointError: A file is missing, short or damaged; names file, tensor and bytes.
        """
        by_file: dict[str, dict[str, list[Copy]]] = {}
        for copy in copies:
            if copy.target.numel():
                by_file.setdefault(copy.file, {}).setdefault(copy.tensor, []).append(copy)
        for name, tensors in by_file.items():
            with self._opened(name) as source:
                ordered = {tensor: sorted(parts, key=lambda copy: copy.start) for tensor, parts in tensors.items()}
                ahead = _ReadAhead(source, self._ranges(name, ordered))
                for tensor, parts in ordered.items():
                    self._read_tensor(source, name, tensor, parts, ahead)

    @contextmanager
    def _opened(self, name: str) -> Iterator[Ranges]:
        """Open a file in a context, and give its ranges; its size and header have been checked."""
        if name not in self.files:
            raise CheckpointError(f"{self.folder}: the index lists no file {name}")
        try:
            with ranges_of(self.folder / name) as source:
                self._check_header(source, name)
                yield source
        except OSError as error:
            raise CheckpointError(f"cannot read {self.folder / name}: {error}") from error

    def _ranges(self, file: str, copies: Mapping[str, list[Copy]]) -> Iterator[tuple[int, int]]:
        """Yield (position, bytes) of all windows of ``file`` that will be read, in order."""
        for tensor, parts in copies.items():
            record = self.record(file, tensor)
            for start, stop in _spans(parts, ITEM_BYTES[record.dtype], record.nbytes):
                yield record.offset + start, stop - start

    def whole(self, file: str, tensor: str) -> torch.Tensor:
        """Return a new host tensor with all of ``tensor``."""
        record = self.record(file, tensor)
        with self._opened(file):  # its length is checked against the index before memory is allocated
            pass
        value = torch.empty(math.prod(record.shape), dtype=DTYPES[record.dtype])
        self.read([Copy(file, tensor, 0, value)])
        return value.view(record.shape)

    def record(self, file: str, tensor: str) -> TensorRecord:
        """Return the record of a tensor in the index.

        Raises:
            CheckpointError: It lists no such file or tensor.
        """
        record = self.files.get(file)
        if record is None or tensor not in record.tensors:
            raise CheckpointError(f"{self.folder / file} should hold {tensor!r}, but the index lists no such tensor there")
        return record.tensors[tensor]

    def check_sizes(self) -> None:
        """Compares the sizes of all files with the index.

        Raises:
            CheckpointError: A file is missing or has another size.
        """
        listed = self.folder.listed() if isinstance(self.folder, ObjectPath) else None  # one question in place of one for each file
        for name, record in self.files.items():
            path = self.folder / name
            size = (path.stat().st_size if path.is_file() else None) if listed is None else listed.get(name)
            if size is None:
                raise CheckpointError(f"{path} is missing; the index lists it with {record.nbytes} bytes")
            _check_size(path, size, record.nbytes)

    def _check_header(self, source: Ranges, name: str) -> None:
        """Check, before anything is read or allocated, that the file has the length of the index and its header describes the same
        tensors.
        """
        if name in self._verified:
            return
        record, path = self.files[name], self.folder / name
        _check_size(path, source.size(), record.nbytes)
        header = self._read_range(source, memoryview(bytearray(record.header_nbytes)), 0, name)
        if digits_of(header) != record.header_crc32:
            raise CheckpointError(f"{path} is damaged: the checksum of its header does not match the index")
        with reading(path, CheckpointError):
            found = parse_json(str(header[8:], "utf-8"))
            found.pop("__metadata__", None)
            for tensor in found.keys() | record.tensors.keys():
                if tensor not in found or tensor not in record.tensors or found[tensor] != _described(record, tensor):
                    raise CheckpointError(f"{path}: its header describes tensor {tensor!r} as {shown(found.get(tensor))}, unlike the index")
        self._verified.add(name)

    def _read_tensor(self, source: Ranges, file: str, tensor: str, copies: list[Copy], ahead: _ReadAhead) -> None:
        record = self.record(file, tensor)
        itemsize, dtype = ITEM_BYTES[record.dtype], DTYPES[record.dtype]
        numel = record.nbytes // itemsize
        last = max(copy.start + copy.target.numel() for copy in copies)
        if copies[0].start < 0 or last > numel:
            raise CheckpointError(f"{self.folder / file}: elements {copies[0].start} to {last} of {tensor!r} requested, but it has {numel}")
        waiting = 0  # copies before this one are done
        if len(self._window) < min(WINDOW_BYTES, record.nbytes):
            self._window = bytearray(min(WINDOW_BYTES, record.nbytes))
        for start, stop in _spans(copies, itemsize, record.nbytes):
            ahead.advance()
            data = self._read_range(source, memoryview(self._window)[: stop - start], record.offset + start, file)
            self._verify(data, record, start, f"{self.folder / file}: tensor {tensor!r}")
            values = torch.frombuffer(data, dtype=torch.uint8).view(dtype)
            waiting = _deliver(copies, waiting, values, start // itemsize)

    def _read_range(self, source: Ranges, place: memoryview, offset: int, name: str) -> memoryview:
        """Fill ``place`` from the file, and return it."""
        done = 0
        while done < len(place):
            count = source.read_into(place[done:], offset + done)
            if count == 0:
                raise CheckpointError(
                    f"{self.folder / name} is truncated: it ends at byte {offset + done}, the index says {self.files[name].nbytes}"
                )
            done += count
        self.bytes_read += done
        return place

    @staticmethod
    def _verify(data: memoryview, record: TensorRecord, start: int, what: str) -> None:
        position = first_damaged(data, digits_of_range(record.crc32, start, len(data)))
        if position is not None:
            first = record.offset + start + position
            raise CheckpointError(
                f"{what} is damaged: the checksum of the {CHUNK_BYTES} bytes from byte {first} on does not match the index"
            )


def _check_size(path: Place, found: int, expected: int) -> None:
    if found != expected:
        raise CheckpointError(f"{path} has {found} bytes, the index says {expected}: it was truncated or replaced")


def _described(file: FileRecord, tensor: str) -> dict[str, object]:
    """Return the entry that the header of ``file`` must have for a tensor."""
    record = file.tensors[tensor]
    start = record.offset - file.header_nbytes
    return {"dtype": record.dtype, "shape": list(record.shape), "data_offsets": [start, start + record.nbytes]}


class _ReadAhead:
    """Prefetches windows of a file."""

    def __init__(self, source: Ranges, ranges: Iterator[tuple[int, int]]) -> None:
        self._source = source
        self._ranges = ranges
        for _ in range(source.ahead):
            self.advance()

    def advance(self) -> None:
        """Note that one window is being read."""
        offset, nbytes = next(self._ranges, (0, 0))
        if nbytes:
            self._source.fetch(offset, nbytes)


def _spans(copies: list[Copy], itemsize: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield byte ranges (start, stop) of whole chunks that cover sorted ``copies``, each at most a window long."""
    merged: list[list[int]] = []
    for copy in copies:
        start = copy.start * itemsize // CHUNK_BYTES * CHUNK_BYTES
        stop = min(math.ceil((copy.start + copy.target.numel()) * itemsize / CHUNK_BYTES) * CHUNK_BYTES, nbytes)
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    for start, stop in merged:
        for position in range(start, stop, WINDOW_BYTES):
            yield position, min(position + WINDOW_BYTES, stop)


def _deliver(copies: list[Copy], waiting: int, values: torch.Tensor, first: int) -> int:
    """Copy from ``values``, elements ``first`` on of a tensor, the ranges that sorted ``copies`` request.

    Returns:
        The first copy that may want something of later elements.
    """
    last = first + values.numel()
    for copy in copies[waiting:] if waiting else copies:
        if copy.start >= last:
            break
        start = max(copy.start, first)
        stop = min(copy.start + copy.target.numel(), last)
        if stop > start:
            target, source = copy.target[start - copy.start : stop - copy.start], values[start - first : stop - first]
            if isinstance(target, Elsewhere):
                target.store(source)
            else:
                target.copy_(source)
    while waiting < len(copies) and copies[waiting].start + copies[waiting].target.numel() <= last:
        waiting += 1
    return waiting
