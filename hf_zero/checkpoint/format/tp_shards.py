"""Parts of a tensor that tensor-parallel ranks hold, as runs of elements: pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """Elements that are contiguous both in the whole tensor and in a shard of it.

    Attributes:
        whole: First element, counted in the whole tensor in row-major order.
        local: First element, counted in the shard.
        numel: How many.
    """

    whole: int
    local: int
    numel: int


@dataclass(frozen=True)
class SavedTpShard:
    """Part of a tensor that one rank holds: index ranges along one dimension, one after the other.

    Attributes:
        shape: Shape of the whole tensor.
        dim: The dimension; None for the whole tensor.
        ranges: [start, stop) along ``dim``; several for fused projections (a rank's part of q, of k and of v).
    """

    shape: tuple[int, ...]
    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of the part that the rank holds."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], sum(stop - start for start, stop in self.ranges), *self.shape[self.dim + 1 :])

    @property
    def numel(self) -> int:
        """Return the number of elements that the rank holds."""
        return math.prod(self.local_shape)

    @property
    def _inner(self) -> int:
        """Return the number of elements per index of ``dim``: the product of all later dimensions."""
        return math.prod(self.shape[self.dim + 1 :]) if self.dim is not None else 1

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """Yield elements ``start`` to ``stop`` of the shard as runs, by rising position in it."""
        if self.dim is None or start >= stop:
            if start < stop:
                yield Run(start, start, stop - start)
            return
        inner, wide = self._inner, self.shape[self.dim]
        row = self.local_shape[self.dim] * inner  # elements of the shard per index of all earlier dimensions
        for outer in range(start // row, (stop - 1) // row + 1):
            local = outer * row
            for first, last in self.ranges:
                length = (last - first) * inner
                low, high = max(start, local), min(stop, local + length)
                if low < high:
                    yield Run((outer * wide + first) * inner + low - local, low, high - low)
                local += length

    def find(self, start: int, stop: int) -> Iterator[Run]:
        """Yield the runs of the shard that are among the elements ``start`` to ``stop`` of the whole tensor."""
        if self.dim is None or start >= stop:
            if start < stop:
                yield Run(start, start, stop - start)
            return
        inner, wide = self._inner, self.shape[self.dim]
        row = self.local_shape[self.dim] * inner
        for outer in range(start // (wide * inner), (stop - 1) // (wide * inner) + 1):
            local = outer * row
            for first, last in self.ranges:
                whole = (outer * wide + first) * inner
                low, high = max(start, whole), min(stop, whole + (last - first) * inner)
                if low < high:
                    yield Run(low, local + low - whole, high - low)
                local += (last - first) * inner
