"""Which rank updates which parameter when an optimizer needs whole tensors. Arithmetic only: no tensor is touched here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hf_zero.core.units.layout import FROZEN, ParamSlot, Range, UnitLayout
from hf_zero.core.units.tp_shard import TpShard


@dataclass(frozen=True)
class Piece:
    """Elements of a parameter that lie in a row in the shard of one rank; there may be none.

    Attributes:
        inside: Which they are, counted in the parameter.
        start: Where the first of them lies in the shard.
    """

    inside: Range
    start: int


@dataclass(frozen=True)
class Spread:
    """A trained parameter as the ranks of an axis hold it between them.

    Attributes:
        unit: Position of its unit.
        slot: Its name, group and whole shape.
        pieces: What each rank holds, one behind the other in the order in which ``parts`` are.
        together: So many adjacent ranks hold all of it once: 1 where every rank does.
        parts: What it is made of where its elements do not lie in the order of the pieces: slices along a later dimension.
    """

    unit: int
    slot: ParamSlot
    pieces: tuple[Piece, ...]
    together: int
    parts: tuple[TpShard, ...] = ()


@dataclass(frozen=True)
class Owned:
    """A trained parameter and the rank that updates it.

    Attributes:
        spread: The parameter.
        rank: Its owner.
    """

    spread: Spread
    rank: int

    @property
    def unit(self) -> int:
        """Position of its unit."""
        return self.spread.unit

    @property
    def slot(self) -> ParamSlot:
        """Its name, group and whole shape."""
        return self.spread.slot

    @property
    def travels(self) -> bool:
        """Whether one rank updates it for others; else every rank has it and updates it."""
        return self.spread.together > 1

    def given_by(self, rank: int) -> Piece | None:
        """What the owner is given by ``rank``, itself perhaps, to have all of it once."""
        piece = self.spread.pieces[rank]
        beside = rank // self.spread.together == self.rank // self.spread.together
        return piece if beside and piece.inside.numel else None


def spread_of(layouts: Sequence[UnitLayout], world: int) -> list[Spread]:
    """The trained parameters of units that ``world`` ranks divide among them, or that each of them has; by unit, and then by offset.

    Args:
        layouts: Of the units.
        world: Number of ranks.
    """
    found = []
    for unit, layout in enumerate(layouts):
        for slot in _trained(layout):
            parts = holders(layout, slot.range, world)
            starts = [layout.shard_range(rank).start if layout.world > 1 else 0 for rank in range(world)]
            pieces = tuple(Piece(part.shift(-slot.offset), part.start - start) for part, start in zip(parts, starts, strict=True))
            found.append(Spread(unit, slot, pieces, layout.world))
    return found


def spread_of_experts(unit: int, layouts: Sequence[UnitLayout], parts: Sequence[Mapping[str, TpShard]], world: int) -> list[Spread]:
    """The trained parameters of a unit of experts; as ``spread_of``.

    Args:
        unit: Its position.
        layouts: Of the unit on each of the adjacent ranks that hold all experts between them; ranks at equal distances have the same.
        parts: By name, which part of a parameter each of them holds.
        world: Number of ranks.
    """
    found = []
    for index, slot in enumerate(layouts[0].slots):
        if slot.group == FROZEN:
            continue
        slots = [layout.slots[index] for layout in layouts]
        firsts = [sum(before.numel for before in slots[:place]) for place in range(len(slots))]
        shape = parts[0][slot.name].full_shape
        pieces = []
        for rank in range(world):
            place = rank % len(layouts)
            layout, here = layouts[place], slots[place]
            shard = layout.shard_range(rank // len(layouts) if layout.world > 1 else 0)
            part = here.range.intersect(shard)
            pieces.append(Piece(part.shift(firsts[place] - here.offset), part.start - shard.start))
        others = tuple(every[slot.name] for every in parts)
        later = others if any(part.dim for part in others) else ()
        whole = ParamSlot(slot.name, shape, shape.numel(), slot.offset, slot.group)
        found.append(Spread(unit, whole, tuple(pieces), len(layouts) * layouts[0].world, later))
    return found


def _trained(layout: UnitLayout) -> Iterator[ParamSlot]:
    return (slot for slot in layout.slots if slot.group != FROZEN and slot.numel)


def assign_owners(spread: Sequence[Spread], world: int) -> tuple[Owned, ...]:
    """Gives every trained parameter to one rank; the same on all ranks.

    From the largest to the smallest, a parameter goes to the rank whose shard holds most of it, as long as that rank stays within an
    equal share of all elements; else to the rank with fewest so far. So no rank has more than an equal share and one parameter, and
    what need not travel stays where it is.

    Args:
        spread: The parameters.
        world: Number of ranks.

    Returns:
        One entry per parameter, in the same order.
    """
    share = sum(entry.slot.numel for entry in spread) / world

    def nearest(index: int, loads: Sequence[int]) -> int | None:
        held = [piece.inside.numel for piece in spread[index].pieces]
        near = max(range(world), key=lambda rank: (held[rank], -loads[rank]))
        return near if held[near] > 0 and loads[near] + spread[index].slot.numel <= share else None

    ranks = share_out([entry.slot.numel for entry in spread], world, nearest)
    return tuple(Owned(entry, rank) for entry, rank in zip(spread, ranks, strict=True))


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
