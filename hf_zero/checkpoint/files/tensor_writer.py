"""Write safetensors files straight from shards: the header, the order of tensors, and a checksum per chunk."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch

from hf_zero.checkpoint.files.disk import Disk
from hf_zero.checkpoint.files.rows import WINDOW_BYTES, Elsewhere, Entry, Piece
from hf_zero.checkpoint.files.uploads import Uploads
from hf_zero.checkpoint.format.checksum import Checksum, digits_of
from hf_zero.checkpoint.format.names import CHUNK_BYTES, dtype_name
from hf_zero.checkpoint.format.records import FileRecord, TensorRecord
from hf_zero.errors import CheckpointError
from hf_zero.system.folder import Folder
from hf_zero.system.object_store import Place


class Described(Protocol):
    """Description of a tensor in a header; ``nbytes`` follows from dtype and shape."""

    @property
    def name(self) -> str:
        """Return the name in the file."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape."""

    @property
    def nbytes(self) -> int:
        """Return bytes of its data."""


D = TypeVar("D", bound=Described)


def in_file_order(tensors: Iterable[D]) -> list[D]:
    """Return ``tensors`` with wide elements first, as the safetensors library orders them: every tensor is aligned to its element."""
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


def header_of(tensors: Iterable[Described], file: str) -> bytes:
    """Return length prefix and JSON header of a file with ``tensors`` one after the other, padded with spaces to a multiple of 8 bytes.

    Raises:
        CheckpointError: Two have one name, or an element type that safetensors lacks; names ``file`` or the tensor.
    """
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        if tensor.name in fields:
            raise CheckpointError(f"{file}: two tensors are named {tensor.name!r}; a checkpoint needs one name each")
        stop = start + tensor.nbytes
        fields[tensor.name] = {"dtype": dtype_name(tensor.dtype, tensor.name), "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# Bytes that are summed and written in turn: no more than a core's own cache holds.
_SUMMED_BYTES = 8 * CHUNK_BYTES


def write_tensor_file(
    path: Place,
    entries: Sequence[Entry],
    progress: Callable[[int], object] | None = None,
    disk: Disk | Uploads | None = None,
    folder: Folder | None = None,
) -> FileRecord:
    """Write a new safetensors file and force it to the disk.

    Tensors pass through a window of 4 MiB at a time; none is copied whole.

    Args:
        path: The file; must not exist. In an object store if ``disk`` is an ``Uploads``.
        entries: Tensors to write; names differ.
        progress: Called with the bytes of each window that has been written.
        disk: The save that the file belongs to: its ``sync`` forces the file to the disk, with all others.
        folder: The folder of ``path``, where it is open.

    Returns:
        Where everything is, with checksums.

    Raises:
        CheckpointError: An element type that safetensors lacks.
        OSError: The file system refuses; names the file. Nothing of it is left, so that a full disk has room for messages.
    """
    if disk is not None:
        return disk.repeated(path, lambda: _write_tensor_file(path, entries, progress, disk, folder))
    with Disk() as own:
        record = _write_tensor_file(path, entries, progress, own, folder)
        own.sync()
    return record


def _write_tensor_file(
    path: Place, entries: Sequence[Entry], progress: Callable[[int], object] | None, disk: Disk | Uploads, folder: Folder | None
) -> FileRecord:
    ordered, window_buffer = in_file_order(entries), _HostWindow()
    header = header_of(ordered, path.name)
    tensors, end = {}, len(header)
    with disk.writing(path, end + sum(entry.nbytes for entry in ordered), folder) as file:
        file.write(memoryview(header))
        for entry in ordered:
            checksum = Checksum()
            offset = end
            for window in _windows(entry.pieces, entry.dtype.itemsize, window_buffer):
                for start in range(0, len(window), _SUMMED_BYTES):  # bytes that have been summed are in the cache when they are written
                    part = window[start : start + _SUMMED_BYTES]
                    checksum.update(part)
                    file.write(part)
                file.start_writeback()
                end += len(window)
                if progress is not None:
                    progress(len(window))
            name = dtype_name(entry.dtype, entry.name)
            tensors[entry.name] = TensorRecord(name, entry.shape, offset, end - offset, checksum.digits())
    return FileRecord(end, len(header), digits_of(memoryview(header)), tensors)


class _HostWindow:
    """One buffer for all windows of a file that are not in host memory: a new one each time leaves a heap several times as large."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def of(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor (numel,) with at most the elements of a window; its values are undefined."""
        if not self._buffer.numel():
            self._buffer = torch.empty(WINDOW_BYTES, dtype=torch.uint8)
        return self._buffer[: numel * dtype.itemsize].view(dtype)


_one_reader = threading.Lock()  # of rows that are not in memory: several files may be written at a time


def _windows(pieces: Iterable[Piece], itemsize: int, window_buffer: _HostWindow) -> Iterator[memoryview]:
    """Yield the bytes of ``pieces`` in windows; a window is valid until the next one is requested."""
    step = WINDOW_BYTES // itemsize
    for piece in pieces:
        if isinstance(piece, int):
            zeros = memoryview(bytes(min(WINDOW_BYTES, piece * itemsize)))
            for start in range(0, piece * itemsize, WINDOW_BYTES):
                yield zeros[: piece * itemsize - start]
            continue
        flat = piece if isinstance(piece, Elsewhere) else piece.detach().reshape(-1)
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            if isinstance(part, torch.Tensor) and part.device.type == "cpu":
                window = part
            else:
                window = window_buffer.of(part.numel(), part.dtype)
                if isinstance(part, Elsewhere):
                    with _one_reader:
                        part.read(part.start, window)
                else:
                    window.copy_(part)
            yield memoryview(window.view(torch.uint8).numpy())  # type: ignore[arg-type]
