"""Choose the rank that owns each parameter, and move complete parameters between shards and owners, unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.core.units.layout import FROZEN, ParamSlot, Range, UnitLayout
from hf_zero.core.units.marks import TpShard, cut, paste
from hf_zero.core.units.unit import Unit


@dataclass(frozen=True)
class Piece:
    """Contiguous elements of a parameter in the shard of one rank; there may be none.

    Attributes:
        inside: Range of the elements, counted from the start of the parameter.
        start: Position of the first element in the shard.
    """

    inside: Range
    start: int


@dataclass(frozen=True)
class Spread:
    """A trained parameter and its distribution over the ranks of an axis.

    Attributes:
        unit: Position of its unit.
        slot: Name, group and full shape of the parameter.
        pieces: Elements that each rank holds, in the order of ``parts``.
        together: Number of adjacent ranks that together hold all elements once; 1 if every rank holds all.
        parts: Slices along a later dimension, if the pieces do not contain the elements in their order; else ().
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
        """Return the position of the parameter's unit."""
        return self.spread.unit

    @property
    def slot(self) -> ParamSlot:
        """Return the parameter's name, group and full shape."""
        return self.spread.slot

    @property
    def travels(self) -> bool:
        """Return whether one rank updates the parameter for others; otherwise every rank has it and updates it."""
        return self.spread.together > 1

    def given_by(self, rank: int) -> Piece | None:
        """Return the piece that ``rank`` (perhaps the owner itself) sends to the owner, so that the owner gets every element once; None for
        none.
        """
        piece = self.spread.pieces[rank]
        beside = rank // self.spread.together == self.rank // self.spread.together
        return piece if beside and piece.inside.numel else None


def spread_of(layouts: Sequence[UnitLayout], world: int) -> list[Spread]:
    """Return the trained parameters of units that ``world`` ranks share or that each rank has completely; sorted by unit, then offset.

    Args:
        layouts: Layouts of the units.
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
    """Return the trained parameters of a unit of experts, like ``spread_of``.

    Args:
        unit: Position of the unit.
        layouts: Layout of the unit on each of the adjacent ranks that together hold all experts; ranks that are a multiple of their number
            apart have the same layout.
        parts: For each of these ranks, the part of each parameter that it holds, by name.
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
    """Assign every trained parameter to one rank; the result is the same on all ranks.

    In the order from the largest to the smallest, a parameter is assigned to the rank whose shard holds most of it, as long as that rank
    stays within an equal share of all elements; else to the rank with the fewest elements so far. So no rank has more than an equal share
    and one parameter, and parameters that one rank holds completely can stay on that rank.

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


def share_out(sizes: Sequence[int], world: int, preferred: Callable[[int, Sequence[int]], int | None] | None = None) -> list[int]:
    """Assign items to ranks, from the largest to the smallest; the result is the same on all ranks.

    Args:
        sizes: Sizes of the items.
        world: Number of ranks.
        preferred: Called with an item's position and the load of each rank; returns a rank, or None for the rank with the least load.

    Returns:
        The rank of each item.
    """
    loads, ranks = [0] * world, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):  # stable
        rank = preferred(index, loads) if preferred is not None else None
        ranks[index] = rank if rank is not None else loads.index(min(loads))
        loads[ranks[index]] += sizes[index]
    return ranks


def holders(layout: UnitLayout, wanted: Range, world: int) -> list[Range]:
    """Return for each rank the part of ``wanted`` (elements of the unit) that its shard holds. Every rank holds all of a stage 0 unit."""
    if layout.world == 1:
        return [wanted] * world
    return [wanted.intersect(layout.shard_range(rank)) for rank in range(world)]


Tensors = Mapping[str, torch.Tensor]  # complete parameters by name, in their full shape
_Parts = list[list[tuple[str, Piece]]]  # for each rank, pieces with the names of their parameters


class TensorMoves:
    """Exchange of one unit's parameters between shards and owners. A parameter whose owner already holds all of it is not sent.

    Args:
        unit: The unit.
        owned: Trained parameters of the unit and their owners.
        collectives: Network of the ranks that share the parameters.
    """

    def __init__(self, unit: Unit, owned: Sequence[Owned], collectives: Collectives) -> None:
        self.unit = unit
        self._collectives, self._rank = collectives, collectives.rank
        world = range(collectives.world)
        self.own = tuple(entry for entry in owned if entry.rank == self._rank or not entry.travels)
        moving = [entry for entry in owned if entry.travels]
        self._divided = bool(moving)
        # [Note: messages of an exchange] A message between two ranks consists of the parts of the sender's shard that the receiver owns,
        # by offset. Both ranks compute it from the layout and the owners. Parameters that several groups of ranks hold (experts, at stage
        # 0) are sent by the owner's group, and sent back to all ranks.
        mine = [entry for entry in moving if entry.rank == self._rank]
        self._taken: _Parts = [[(entry.slot.name, piece) for entry in mine if (piece := entry.given_by(rank))] for rank in world]
        self._given: _Parts = [
            [(entry.slot.name, piece) for entry in moving if entry.rank == rank and (piece := entry.given_by(self._rank))] for rank in world
        ]
        self._returned = [_held(mine, rank) for rank in world]
        self._updated = [_held([entry for entry in moving if entry.rank == rank], self._rank) for rank in world]

    def stays(self, entry: Owned) -> bool:
        """Return whether this rank's shard holds all of the parameter."""
        return entry.spread.pieces[self._rank].inside.numel == entry.slot.numel

    def collect(self, flat: torch.Tensor, what: str) -> tuple[dict[str, torch.Tensor], Pending]:
        """Collect the complete parameters that this rank owns; collective.

        Args:
            flat: (shard_numel,): this rank's part of masters, gradients or similar; must not change until the exchange has ended.
            what: Name for labels.

        Returns:
            Complete tensors, filled when the exchange has been waited for. Tensors that this rank's shard holds completely are views of
            ``flat``.
        """
        rows = {entry.slot.name: self._room(entry, flat) for entry in self.own}
        whole = {entry.slot.name: _shaped(rows[entry.slot.name], entry) for entry in self.own}
        here = {entry.slot.name for entry in self.own if self.stays(entry)}
        outgoing = self._for_peers(self._given, flat, lambda _, piece: _within(flat, piece))
        incoming = self._from_peers(self._taken, flat)
        pending = self._exchange(outgoing, incoming, f"{self.unit.name}: {what}")

        def place() -> None:
            for rank, parts in enumerate(self._taken):
                offset = 0
                for name, piece in parts:
                    if name in here:
                        continue
                    numel = piece.inside.numel
                    source = incoming[rank][offset : offset + numel] if rank != self._rank else _within(flat, piece)
                    rows[name][_inside(piece)] = source
                    offset += numel
            for entry in self.own:
                _place_parts(whole[entry.slot.name], rows[entry.slot.name], entry)

        return whole, _then(pending, place)

    def scatter(self, tensors: Tensors, flat: torch.Tensor, what: str) -> Pending:
        """Fill ``flat``, (shard_numel,), from the owners' complete ``tensors``; elements that belong to no parameter do not change.
        Collective.
        """
        rows = {entry.slot.name: _row(tensors[entry.slot.name], entry) for entry in self.own}
        outgoing = self._for_peers(self._returned, flat, lambda name, piece: rows[name][_inside(piece)])
        incoming = self._from_peers(self._updated, flat)
        pending = self._exchange(outgoing, incoming, f"{self.unit.name}: {what}")

        def place() -> None:
            for rank, parts in enumerate(self._updated):
                offset = 0
                for _, piece in parts:
                    if rank != self._rank:
                        _within(flat, piece).copy_(incoming[rank][offset : offset + piece.inside.numel])
                    offset += piece.inside.numel
            for entry in self.own:
                piece = entry.spread.pieces[self._rank]
                here, new = _within(flat, piece), rows[entry.slot.name][_inside(piece)]
                if piece.inside.numel and here.data_ptr() != new.data_ptr():
                    here.copy_(new)

        return _then(pending, place)

    def _room(self, entry: Owned, flat: torch.Tensor) -> torch.Tensor:
        return _within(flat, entry.spread.pieces[self._rank]) if self.stays(entry) else flat.new_empty(entry.slot.numel)

    def _exchange(self, outgoing: list[torch.Tensor], incoming: list[torch.Tensor], label: str) -> Pending:
        if not self._divided:
            return Pending(label, [])
        return self._collectives.exchange_parts(outgoing, incoming, label)

    def _for_peers(self, parts_of: _Parts, flat: torch.Tensor, values: Callable[[str, Piece], torch.Tensor]) -> list[torch.Tensor]:
        """Return one message for each rank; an empty one for this rank."""
        return [
            flat.new_empty(0) if rank == self._rank or not parts else torch.cat([values(name, piece) for name, piece in parts])
            for rank, parts in enumerate(parts_of)
        ]

    def _from_peers(self, parts_of: _Parts, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return an uninitialised buffer for the message of every other rank."""
        sizes = [sum(piece.inside.numel for _, piece in parts) for parts in parts_of]
        return [flat.new_empty(0 if rank == self._rank else size) for rank, size in enumerate(sizes)]


def _held(owned: Sequence[Owned], rank: int) -> list[tuple[str, Piece]]:
    """Return the non-empty pieces of the ``owned`` parameters in the shard of ``rank``."""
    pieces = [(entry.slot.name, entry.spread.pieces[rank]) for entry in owned]
    return [(name, piece) for name, piece in pieces if piece.inside.numel]


def _within(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return the view of ``piece`` in this rank's ``flat``."""
    return flat[piece.start : piece.start + piece.inside.numel]


def _inside(piece: Piece) -> slice:
    return slice(piece.inside.start, piece.inside.stop)


def _shaped(row: torch.Tensor, entry: Owned) -> torch.Tensor:
    """Return the parameter in its full shape: a view of ``row``, or a new tensor if the parts in ``row`` have another order."""
    return row.new_empty(entry.slot.shape) if entry.spread.parts else row.view(entry.slot.shape)


def _place_parts(whole: torch.Tensor, row: torch.Tensor, entry: Owned) -> None:
    first = 0
    for part in entry.spread.parts:
        numel = sum(piece.numel for piece in part.ranges) * (whole.numel() // whole.shape[part.dim])
        paste(whole, row[first : first + numel], part.dim, part.ranges)
        first += numel


def _row(whole: torch.Tensor, entry: Owned) -> torch.Tensor:
    """Return the elements of ``whole``, (numel,), in the order of the pieces."""
    parts = entry.spread.parts
    return torch.cat([cut(whole, part).view(-1) for part in parts]) if parts else whole.reshape(-1)


def _then(pending: Pending, place: Callable[[], None]) -> Pending:
    """Return ``pending``, extended to call ``place`` when it ends."""
    finish = pending.finish

    def both() -> torch.Tensor | None:
        result = finish() if finish is not None else None
        place()
        return result

    pending.finish = both
    return pending
