"""Which rank updates which parameter when an optimizer needs whole tensors. Arithmetic only: no tensor is touched here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_zero.core.units.layout import FROZEN, ParamSlot, Range, UnitLayout


@dataclass(frozen=True)
class Owned:
    """A trained parameter and the rank that updates it.

    Attributes:
        unit: Position of its unit.
        slot: Where it lies there.
        rank: Its owner.
    """

    unit: int
    slot: ParamSlot
    rank: int


def assign_owners(layouts: Sequence[UnitLayout], world: int) -> tuple[Owned, ...]:
    """Gives every trained parameter to one rank; the same on all ranks.

    From the largest to the smallest, a parameter goes to the rank whose shard holds most of it, as long as that rank stays within an
    equal share of all elements; else to the rank with fewest so far. So no rank has more than an equal share and one parameter, and
    what need not travel stays where it is.

    Args:
        layouts: Of the trained units, in order.
        world: Number of ranks.

    Returns:
        One entry per parameter with elements, by unit and then by offset.
    """
    slots = [(unit, slot) for unit, layout in enumerate(layouts) for slot in layout.slots if slot.group != FROZEN and slot.numel]
    share = sum(slot.numel for _, slot in slots) / world

    def nearest(index: int, loads: Sequence[int]) -> int | None:
        unit, slot = slots[index]
        held = [part.numel for part in holders(layouts[unit], slot.range, world)]
        near = max(range(world), key=lambda rank: (held[rank], -loads[rank]))
        return near if held[near] > 0 and loads[near] + slot.numel <= share else None

    ranks = share_out([slot.numel for _, slot in slots], world, nearest)
    return tuple(Owned(unit, slot, rank) for (unit, slot), rank in zip(slots, ranks, strict=True))


def share_out(sizes: Sequence[int], world: int, wish: Callable[[int, Sequence[int]], int | None] | None = None) -> list[int]:
    """Gives things to ranks, from the largest to the smallest; the same on all ranks.

    Args:
        sizes: Of the things.
        world: Number of ranks.
        wish: The rank that should get a thing, by its position and what each rank has so far; None is the one with least.

    Returns:
        A rank for each thing.
    """
    loads, ranks = [0] * world, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):  # stable
        rank = wish(index, loads) if wish is not None else None
        ranks[index] = rank if rank is not None else loads.index(min(loads))
        loads[ranks[index]] += sizes[index]
    return ranks


def holders(layout: UnitLayout, wanted: Range, world: int) -> list[Range]:
    """For each rank the part of ``wanted``, elements of the unit, that its shard holds; all is held everywhere by units of stage 0."""
    if layout.world == 1:
        return [wanted] * world
    return [wanted.intersect(layout.shard_range(rank)) for rank in range(world)]
