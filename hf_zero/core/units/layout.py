"""Compute the layout of flat units: offsets, padding, rank ranges, group segments. No tensor is touched here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch

# A parameter starts at a multiple of this many elements: 32 bytes in 16 bit, 64 bytes in fp32. cuBLAS wants 16 bytes for its
# fast paths, AVX-512 loads are 64 bytes, and a shard that starts aligned can be sliced by any kernel.
ALIGNMENT = 16

FROZEN = -1  # group of parameters that no optimizer updates


@dataclass(frozen=True)
class Range:
    """Half-open range of element positions inside a unit."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Return the number of elements; 0 when empty."""
        return max(0, self.stop - self.start)

    def intersect(self, other: Range) -> Range:
        """Return the common part; empty (``numel == 0``) when there is none."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))

    def shift(self, by: int) -> Range:
        """Return the range moved by ``by`` elements, to count it from another origin."""
        return Range(self.start + by, self.stop + by)


@dataclass(frozen=True)
class ParamSlot:
    """Place of one parameter inside its unit.

    Attributes:
        name: Dotted name in the model.
        shape: Full shape.
        numel: Number of the unit's elements that the full parameter takes (may be 0).
        offset: First element inside the unit.
        group: Index of the optimizer's param group, or ``FROZEN``.
        shown_as: Dtype of the parameter if it differs from the unit's (scales of packed weights, which the unit holds as bytes); else None.
    """

    name: str
    shape: torch.Size
    numel: int
    offset: int
    group: int
    shown_as: torch.dtype | None = None

    @cached_property
    def range(self) -> Range:
        """Return the range of the parameter's elements inside the unit."""
        return Range(self.offset, self.offset + self.numel)


@dataclass(frozen=True)
class Segment:
    """Contiguous elements of one param group inside one rank's shard, counted from the start of the unit."""

    group: int
    range: Range


@dataclass(frozen=True)
class UnitLayout:
    """Layout of one flat buffer: its parameters, its padding and its division over ranks.

    Attributes:
        name: Name of the unit.
        slots: Parameters by rising offset; the parameters of one group are adjacent.
        padded_numel: Number of elements of the whole buffer, a multiple of ``world * ALIGNMENT``.
        world: Number of ranks that the buffer is divided over.
        dtype: Dtype of the buffer.
    """

    name: str
    slots: tuple[ParamSlot, ...]
    padded_numel: int
    world: int
    dtype: torch.dtype

    @property
    def shard_numel(self) -> int:
        """Return the number of elements of one rank's shard."""
        return self.padded_numel // self.world

    @cached_property
    def numel(self) -> int:
        """Return the number of elements that belong to parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Return (start, stop) of the elements of each parameter."""
        return tuple((slot.range.start, slot.range.stop) for slot in self.slots)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Return (start, stop) of the elements that belong to no parameter: gaps between parameters, and the padding."""
        starts = [0, *(slot.offset + slot.numel for slot in self.slots)]
        stops = [*(slot.offset for slot in self.slots), self.padded_numel]
        return tuple((start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop)

    def shard_range(self, rank: int) -> Range:
        """Return the range of elements that ``rank`` owns."""
        return Range(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """Return the parts of ``rank``'s shard, one per param group that has elements in it; ``FROZEN`` is left out.

        A segment covers the alignment gaps between its parameters: they hold zeros and an element-wise optimizer keeps them zero.
        """
        extents: dict[int, Range] = {}
        for slot in self.slots:
            if slot.group == FROZEN or slot.numel == 0:
                continue
            known = extents.get(slot.group)
            extents[slot.group] = Range(known.start if known else slot.range.start, slot.range.stop)
        shard = self.shard_range(rank)
        parts = ((group, extent.intersect(shard)) for group, extent in extents.items())
        return tuple(Segment(group, part) for group, part in parts if part.numel)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return math.ceil(value / multiple) * multiple


def build_layout(
    name: str,
    params: Sequence[tuple[str, torch.Size]],
    groups: Sequence[int],
    dtype: torch.dtype,
    world: int,
    pieces: int = 1,
    shown_as: Sequence[torch.dtype] | None = None,
) -> tuple[UnitLayout, tuple[int, ...]]:
    """Compute the layout of parameters in a flat buffer, ordered by param group, and in the given order inside each group.

    Args:
        name: Name of the unit.
        params: (dotted name, full shape) of each parameter.
        groups: Param group of each parameter, ``FROZEN`` for none.
        dtype: Dtype of the buffer.
        world: Number of ranks that the buffer is divided over.
        pieces: A multiple of ``world``: the buffer can also be cut into ``pieces`` equal parts.
        shown_as: Dtype of each parameter if the dtypes differ; the buffer holds their bytes.

    Returns:
        The layout, and for each of its slots the index into ``params``.
    """
    order = tuple(sorted(range(len(params)), key=lambda index: groups[index]))  # stable: keeps the order within a group
    slots, offset = [], 0
    for index in order:
        param_name, shape = params[index]
        numel, own = math.prod(shape), None
        if shown_as is not None and shown_as[index] != dtype:
            own = shown_as[index]
            numel = math.ceil(numel * own.itemsize / dtype.itemsize)
        slots.append(ParamSlot(param_name, torch.Size(shape), numel, offset, groups[index], own))
        offset = round_up(offset + numel, ALIGNMENT)
    multiple = max(world, pieces) * ALIGNMENT
    padded = max(round_up(offset, multiple), multiple)
    return UnitLayout(name, tuple(slots), padded, world, dtype), order


class UnitState(Enum):
    """State of a unit's parameters; the values are labels in traces. Only ``Unit`` changes it."""

    SHARDED = "sharded"  # each rank holds 1/world; parameters are empty tensors
    UNSHARDING = "gathering"  # the whole buffer is allocated, the all-gather is in flight
    UNSHARDED = "gathered"  # the whole buffer is filled, parameters are views of it
