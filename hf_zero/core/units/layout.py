"""Pure arithmetic of flat units: offsets, padding, rank ranges, group segments. No tensor is touched here."""

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
        """The same range counted from another origin."""
        return Range(self.start + by, self.stop + by)


@dataclass(frozen=True)
class ParamSlot:
    """Where one parameter lies inside its unit.

    Attributes:
        name: Dotted name in the model.
        shape: Full shape.
        numel: Elements of the unit that the full parameter takes (may be 0).
        offset: First element inside the unit.
        group: Index of the optimizer's param group, or ``FROZEN``.
        shown_as: Its own element type where that is not the unit's: scales beside packed weights, whose bytes the unit holds.
    """

    name: str
    shape: torch.Size
    numel: int
    offset: int
    group: int
    shown_as: torch.dtype | None = None

    @cached_property
    def range(self) -> Range:
        """Its elements inside the unit."""
        return Range(self.offset, self.offset + self.numel)


@dataclass(frozen=True)
class Segment:
    """Contiguous elements of one param group inside one rank's shard, counted from the start of the unit."""

    group: int
    range: Range


@dataclass(frozen=True)
class UnitLayout:
    """One flat buffer: its parameters, its padding and its division over ranks.

    Attributes:
        name: Name of the unit.
        slots: Parameters by rising offset; those of one group lie side by side.
        padded_numel: Elements of the whole buffer, a multiple of ``world * ALIGNMENT``.
        world: Ranks that share it.
        dtype: Type of the parameters.
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
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of the elements that belong to no parameter: between them, and the padding."""
        starts = [0, *(slot.offset + slot.numel for slot in self.slots)]
        stops = [*(slot.offset for slot in self.slots), self.padded_numel]
        return tuple((start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop)

    def shard_range(self, rank: int) -> Range:
        """Return elements that ``rank`` owns."""
        return Range(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """Return the parts of ``rank``'s shard, one per param group that reaches into it; ``FROZEN`` is left out.

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
    """Places parameters in a flat buffer, param group by param group and in the given order within one.

    Args:
        name: Name of the unit.
        params: (dotted name, full shape) of each parameter.
        groups: Param group of each parameter, ``FROZEN`` for none.
        dtype: Their common type.
        world: Ranks that will share the buffer.
        pieces: A multiple of ``world``: the buffer can be cut into so many equal parts too.
        shown_as: Element type of each parameter where they differ; the buffer holds their bytes.

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
    """Where a unit's parameters are; the values are labels in traces. Written by ``Unit`` alone."""

    SHARDED = "sharded"  # each rank holds 1/world; parameters are empty tensors
    UNSHARDING = "gathering"  # the whole buffer is allocated, the all-gather is in flight
    UNSHARDED = "gathered"  # the whole buffer is there, parameters are views of it
