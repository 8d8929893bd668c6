"""Rows of elements, in memory or elsewhere, and the tensors of a file that are made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from hf_zero.checkpoint.format.names import CHUNK_BYTES

# Bytes that travel at once: large enough for a disk, small beside a shard. A multiple of the chunk.
WINDOW_BYTES = 64 * CHUNK_BYTES


@dataclass(frozen=True)
class Elsewhere:
    """A row of elements that is not in memory (NVMe); it can be sliced, read into host tensors and written from them.

    Attributes:
        dtype: Type of the elements.
        count: How many.
        read: (first element, host tensor to fill).
        write: (first element, host tensor of that dtype).
        start: Element of ``read`` and ``write`` at which this row begins.
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
        """Return a new host tensor with all elements; for rows of a window's length."""
        values = torch.empty(self.count, dtype=self.dtype)
        self.read(self.start, values)
        return values

    def store(self, values: torch.Tensor) -> None:
        """Takes ``values``, of any dtype and device."""
        self.write(self.start, values.to("cpu", self.dtype).contiguous())


# One flat array: in memory on any device, elsewhere, or so many zeros.
Row = torch.Tensor | Elsewhere
Piece = torch.Tensor | Elsewhere | int


@dataclass(frozen=True)
class Entry:
    """A tensor to write, as pieces in order; a piece that is a number stands for so many zeros.

    Attributes:
        name: Its name in the file.
        dtype: Type of its elements.
        shape: Its shape.
        pieces: Rows of that dtype, or numbers of zeros; together ``shape``'s elements.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Return bytes of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


def whole(name: str, tensor: torch.Tensor) -> Entry:
    """Return the entry of one tensor as it is."""
    return Entry(name, tensor.dtype, tuple(tensor.shape), (tensor,))


def cut(pieces: Iterable[Piece], start: int, stop: int) -> Iterator[Piece]:
    """Yield elements ``start`` to ``stop`` of rows that lie one behind the other; zeros where they end before ``stop``."""
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
