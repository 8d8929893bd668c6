"""Moves a unit's parameters between the shards that hold parts of them and the ranks that own them whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.core.optimizer.owners import Owned, holders
from hf_zero.core.units.layout import ParamSlot, Range
from hf_zero.core.units.unit import Unit

Tensors = Mapping[int, torch.Tensor]  # by the parameter's offset in its unit; of its shape
_Parts = list[list[tuple[ParamSlot, Range]]]  # by rank


class TensorMoves:
    """The exchange for one unit. At stage 0, and where a shard holds all of a parameter, nothing travels.

    Args:
        unit: The unit.
        owned: Its trained parameters and their owners.
        collectives: The axis it is divided over.
    """

    def __init__(self, unit: Unit, owned: Sequence[Owned], collectives: Collectives) -> None:
        self.unit = unit
        self._collectives = collectives
        self._divided = unit.layout.world > 1
        self._rank = collectives.rank if self._divided else 0
        world = collectives.world if self._divided else 1
        self.own = tuple(entry.slot for entry in owned if entry.rank == self._rank or not self._divided)
        # [Note: messages of an exchange] Between two ranks a message is the parts of the one's shard that the other owns, by
        # offset. Both derive it from the layout and the owners alone.
        self._mine: _Parts = [[] for _ in range(world)]  # by holder: parts of what this rank owns
        self._held: _Parts = [[] for _ in range(world)]  # by owner: parts that this rank's shard holds
        for entry in owned if self._divided else ():
            parts = holders(unit.layout, entry.slot.range, world)
            if entry.rank == self._rank:
                for rank, part in enumerate(parts):
                    if part.numel:
                        self._mine[rank].append((entry.slot, part))
            if parts[self._rank].numel:
                self._held[entry.rank].append((entry.slot, parts[self._rank]))

    def stays(self, slot: ParamSlot) -> bool:
        """Whether this rank's shard holds all of ``slot``."""
        return not self._divided or slot.range.intersect(self.unit.owned).numel == slot.numel

    def collect(self, flat: torch.Tensor, what: str) -> tuple[dict[int, torch.Tensor], Pending]:
        """Brings the parameters that this rank owns together; collective.

        Args:
            flat: (shard_numel,): this rank's part of masters, gradients or the like; must stay untouched until the end.
            what: Name for labels.

        Returns:
            Whole tensors, filled when the exchange has been waited for. Those that need not travel are views of ``flat``.
        """
        tensors = {slot.offset: self._within(flat, slot.range) if self.stays(slot) else flat.new_empty(slot.numel) for slot in self.own}
        label = f"{self.unit.name}: {what}"
        outgoing = self._for_peers(self._held, flat, lambda slot, part: self._within(flat, part))
        incoming = self._from_peers(self._mine, flat)
        pending = self._exchange(outgoing, incoming, label)

        def place() -> None:
            for rank, parts in enumerate(self._mine):
                offset = 0
                for slot, part in parts:
                    if rank == self._rank and self.stays(slot):
                        continue
                    source = incoming[rank][offset : offset + part.numel] if rank != self._rank else self._within(flat, part)
                    tensors[slot.offset][_inside(slot, part)] = source
                    offset += part.numel

        return {slot.offset: tensors[slot.offset].view(slot.shape) for slot in self.own}, _then(pending, place)

    def scatter(self, tensors: Tensors, flat: torch.Tensor, what: str) -> Pending:
        """The way back: fills ``flat``, (shard_numel,), from the owners' whole ``tensors``; what lies in no parameter stays. Collective."""
        rows = {slot.offset: tensors[slot.offset].reshape(-1) for slot in self.own}
        outgoing = self._for_peers(self._mine, flat, lambda slot, part: rows[slot.offset][_inside(slot, part)])
        incoming = self._from_peers(self._held, flat)
        pending = self._exchange(outgoing, incoming, f"{self.unit.name}: {what}")

        def place() -> None:
            for rank, parts in enumerate(self._held):
                offset = 0
                for _, part in parts:
                    if rank != self._rank:
                        self._within(flat, part).copy_(incoming[rank][offset : offset + part.numel])
                    offset += part.numel
            for slot in self.own:
                part = slot.range.intersect(self.unit.owned)
                here, new = self._within(flat, part), rows[slot.offset][_inside(slot, part)]
                if part.numel and here.data_ptr() != new.data_ptr():
                    here.copy_(new)

        return _then(pending, place)

    def _exchange(self, outgoing: list[torch.Tensor], incoming: list[torch.Tensor], label: str) -> Pending:
        if not self._divided:
            return Pending(label, [])
        return self._collectives.exchange_parts(outgoing, incoming, label)

    def _for_peers(self, parts_of: _Parts, flat: torch.Tensor, values: Callable[[ParamSlot, Range], torch.Tensor]) -> list[torch.Tensor]:
        """One message per rank; nothing for this one."""
        return [
            flat.new_empty(0) if rank == self._rank or not parts else torch.cat([values(slot, part) for slot, part in parts])
            for rank, parts in enumerate(parts_of)
        ]

    def _from_peers(self, parts_of: _Parts, flat: torch.Tensor) -> list[torch.Tensor]:
        """Room for one message of every other rank."""
        return [flat.new_empty(0 if rank == self._rank else sum(part.numel for _, part in parts)) for rank, parts in enumerate(parts_of)]

    def _within(self, flat: torch.Tensor, part: Range) -> torch.Tensor:
        """``part``, elements of the unit, in this rank's ``flat``."""
        start = self.unit.owned.start
        return flat[part.start - start : part.stop - start]


def _inside(slot: ParamSlot, part: Range) -> slice:
    return slice(part.start - slot.offset, part.stop - slot.offset)


def _then(pending: Pending, place: Callable[[], None]) -> Pending:
    """``pending`` with ``place`` called at its end."""
    finish = pending.finish

    def both() -> torch.Tensor | None:
        result = finish() if finish is not None else None
        place()
        return result

    pending.finish = both
    return pending
