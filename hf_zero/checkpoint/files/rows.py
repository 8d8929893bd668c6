"""Define rows of elements, in memory or elsewhere (on NVMe, in a file), and the tensors of a file that consist of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from hf_zero.checkpoint.format.names import CHUNK_BYTES

# Bytes that are copied at a time: enough for a disk's full speed, few compared with a shard; a multiple of CHUNK_BYTES.
WINDOW_BYTES = 64 * CHUNK_BYTES


@dataclass(frozen=True)
class Elsewhere:
    """A row of elements outside of memory (on NVMe, in a file), which can be sliced, read into host tensors and written from them.

    Attributes:
        dtype: Dtype of the elements.
        count: Number of elements.
        read: Function of (first element, host tensor to fill).
        write: Function of (first element, host tensor of dtype ``dtype`` to write).
        start: Index of this row's first element in the numbering of ``read`` and ``write``.
    """

    dtype: torch.dtype
    count: int
    read: Callable[[int, torch.Tensor], None]
    write: Callable[[int, torch.Tensor], None]
    start: int = 0

    def numel(self) -> int:
        """Return the number of elements."""
        return self.count

    def __getitem__(self, part: slice) -> Elsewhere:
        start, stop, _ = part.indices(self.count)
        return Elsewhere(self.dtype, max(0, stop - start), self.read, self.write, self.start + start)

    def fetch(self) -> torch.Tensor:
        """Return a new host tensor with all elements, (count,); call this only for rows of at most a window."""
        values = torch.empty(self.count, dtype=self.dtype)
        self.read(self.start, values)
        return values

    def store(self, values: torch.Tensor) -> None:
        """Write ``values``, (count,) of any dtype and device, to the row."""
        self.write(self.start, values.to("cpu", self.dtype).contiguous())


# A flat row of elements: in memory on any device, or elsewhere. A piece may also be a number of zeros.
Row = torch.Tensor | Elsewhere
Piece = torch.Tensor | Elsewhere | int


@dataclass(frozen=True)
class Entry:
    """A tensor to write to a file, as consecutive pieces; an integer n is a piece of n zeros.

    Attributes:
        name: Name of the tensor in the file.
        dtype: Dtype of the tensor.
        shape: Shape of the tensor.
        pieces: Rows of dtype ``dtype`` and numbers of zeros, with as many elements in total as ``shape``.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor's data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def whole(name: str, tensor: torch.Tensor) -> Entry:
    """Return an entry whose only piece is ``tensor``."""
    return Entry(name, tensor.dtype, tuple(tensor.shape), (tensor,))


def cut(pieces: Iterable[Piece], start: int, stop: int) -> Iterator[Piece]:
    """Yield pieces with elements ``start`` to ``stop`` of concatenated ``pieces``; elements after the last piece are zeros."""
    position = start
    end = 0
    for piece in pieces:
        begin, end = end, end + (piece if isinstance(piece, int) else piece.numel())
        low, high = max(start, begin), min(stop, end)
        if low < high:
            yield high - low if isinstance(piece, int) else piece[low - begin : high - begin]
            position = high
    if position < stop:
        yield stop - position
