"""Compute which runs of contiguous elements of a tensor each tensor-parallel rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """A run of elements that are contiguous both in the whole tensor and in a shard of it.

    Attributes:
        whole: Index of the first element in the whole tensor, in row-major order.
        local: Index of the first element in the shard, in row-major order.
        numel: Number of elements.
    """

    whole: int
    local: int
    numel: int


@dataclass(frozen=True)
class SavedTpShard:
    """The part of a tensor that one tensor-parallel rank holds: concatenated index ranges along one dimension.

    Attributes:
        shape: Shape of the whole tensor.
        dim: Dimension along which the tensor is divided; None if the rank holds the whole tensor.
        ranges: Ranges [start, stop) along ``dim``; several for fused projections (a rank's part of q, of k and of v).
    """

    shape: tuple[int, ...]
    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of the rank's part."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], sum(stop - start for start, stop in self.ranges), *self.shape[self.dim + 1 :])

    @property
    def numel(self) -> int:
        """Return the number of elements in the rank's part."""
        return math.prod(self.local_shape)

    @property
    def _inner(self) -> int:
        """Return the number of elements per index of ``dim``: the product of all later dimensions."""
        return math.prod(self.shape[self.dim + 1 :]) if self.dim is not None else 1

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """Yield runs that cover the elements ``start`` to ``stop`` of the shard, in ascending order."""
        if self.dim is None or start >= stop:
            if start < stop:
                yield Run(start, start, stop - start)
            return
        inner, wide = self._inner, self.shape[self.dim]
        row = self.local_shape[self.dim] * inner  # elements of the shard per index of the earlier dimensions
        for outer in range(start // row, (stop - 1) // row + 1):
            local = outer * row
            for first, last in self.ranges:
                length = (last - first) * inner
                low, high = max(start, local), min(stop, local + length)
                if low < high:
                    yield Run((outer * wide + first) * inner + low - local, low, high - low)
                local += length

    def find(self, start: int, stop: int) -> Iterator[Run]:
        """Yield the runs of the shard that lie between the elements ``start`` and ``stop`` of the whole tensor."""
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
