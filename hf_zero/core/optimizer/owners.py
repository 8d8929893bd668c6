"""Which rank updates which parameter when an optimizer needs whole tensors. Arithmetic only: no tensor is touched here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_zero.core.optimizer.balance import largest_first
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

    def holder(piece: int, loads: list[int]) -> int | None:
        unit, slot = slots[piece]
        held = [part.numel for part in holders(layouts[unit], slot.range, world)]
        rank = max(range(world), key=lambda rank: (held[rank], -loads[rank]))
        return rank if held[rank] > 0 and loads[rank] + slot.numel <= share else None

    chosen = largest_first([slot.numel for _, slot in slots], world, holder)
    return tuple(Owned(unit, slot, rank) for (unit, slot), rank in zip(slots, chosen, strict=True))


def holders(layout: UnitLayout, wanted: Range, world: int) -> list[Range]:
    """For each rank the part of ``wanted``, elements of the unit, that its shard holds; all is held everywhere by units of stage 0."""
    if layout.world == 1:
        return [wanted] * world
    return [wanted.intersect(layout.shard_range(rank)) for rank in range(world)]
