"""Updates of offloaded state: unit by unit in the order of forward, each unit's new shard on its way back while the next is updated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hf_zero.observe import note
from hf_zero.offload.states import HostStates, Lot
from hf_zero.optim.lots import LotStepper
from hf_zero.optim.residence import Residence, as_gradient, move_to_huge_pages, scale_
from hf_zero.optim.sharded import OwnedSegment, ShardedOptimizer
from hf_zero.sharding.layout import Range
from hf_zero.sharding.unit import Unit


class OffloadedResidence(Residence):
    """Masters and moments of some units rest on the host or in a file; those of the others stay on the device.

    Args:
        states: Where the offloaded ones rest.
        accumulation_dtype: Type of gradients.
    """

    def __init__(self, states: HostStates, accumulation_dtype: torch.dtype) -> None:
        self.states = states
        self._offloaded: set[int] = set()  # ids of units
        self._accumulation_dtype = accumulation_dtype
        self._lots: list[Lot] | None = None
        self._outgoing: torch.Tensor | None = None  # where the new shard of the unit that is being updated goes

    def take(self, unit: Unit) -> None:
        """Moves the master of a new unit to where it rests."""
        self._offloaded.add(id(unit))
        self.states.rest(unit)

    def holds(self, unit: Unit) -> bool:
        """Whether ``unit``'s state is offloaded."""
        return id(unit) in self._offloaded

    def ranges(self, unit: Unit) -> Sequence[Range]:
        return self.states.ranges(unit) if self.holds(unit) else super().ranges(unit)

    def update(self, optimizer: ShardedOptimizer, grads: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
        by_unit = {id(unit): grad for unit, grad in zip(optimizer.units, grads, strict=True)}
        stepper, fresh = LotStepper(optimizer.inner, self._accumulation_dtype), not optimizer.inner.state
        self._update_device(optimizer, stepper, by_unit, factor)
        value = float(factor)
        lots = self.lots(optimizer)
        for position, lot in enumerate(lots):
            upcoming = lots[position + 1] if position + 1 < len(lots) else None
            self._update_lot(optimizer, stepper, lot, upcoming, by_unit[id(lot.unit)], value)
        self.states.settle()
        stepper.finish()
        if fresh and self.states.tier == "host":
            move_to_huge_pages(optimizer)
        for unit in optimizer.units:
            unit.home.flush()

    def _update_device(
        self, optimizer: ShardedOptimizer, stepper: LotStepper, by_unit: Mapping[int, torch.Tensor], factor: torch.Tensor
    ) -> None:
        segments = [segment for segment in optimizer.segments if not self.holds(segment.unit)]
        if segments:
            scale_([by_unit[id(unit)] for unit in optimizer.units if not self.holds(unit)], factor)
            stepper.step(segments, [as_gradient(by_unit[id(segment.unit)], segment) for segment in segments])

    def _update_lot(
        self, optimizer: ShardedOptimizer, stepper: LotStepper, lot: Lot, upcoming: Lot | None, grad: torch.Tensor, factor: float
    ) -> None:
        unit = lot.unit
        if lot.range.start == 0:
            note("update", unit.name)
            self._outgoing = unit.home.outgoing(unit) if unit.master is not unit.shard else None
        self.states.open(optimizer, lot)
        if upcoming is not None:
            self.states.prepare(upcoming)
        grads = [grad[segment.range.start : segment.range.stop] for segment in lot.segments]
        lows = [None if self._outgoing is None else self._outgoing[segment.range.start : segment.range.stop] for segment in lot.segments]
        stepper.step(lot.segments, grads, factor, lows)
        self.states.close(optimizer, lot)
        if self._outgoing is not None:
            _zero_gaps(self._outgoing, lot)
            if lot.range.stop == unit.layout.shard_numel:
                unit.home.send(unit)

    def lots(self, optimizer: ShardedOptimizer) -> list[Lot]:
        """What is updated at a time, in the order of forward; units without a segment on this rank are left out."""
        if self._lots is None:
            self._lots = []
            for unit in optimizer.units:
                segments = optimizer.segments_of(unit) if self.holds(unit) else []
                if segments:
                    self._lots += [_lot(unit, part, segments) for part in self.ranges(unit)]
        return self._lots

    def publish(self, unit: Unit) -> None:
        if not self.holds(unit):
            unit.publish()

    def new_state(self, segment: OwnedSegment, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.states.new_state(segment, name, dtype) if self.holds(segment.unit) else super().new_state(segment, name, dtype)

    def adopt_states(self, optimizer: ShardedOptimizer) -> None:
        self.states.adopt(optimizer, self.lots(optimizer))

    def tiers(self, optimizer: ShardedOptimizer) -> Mapping[str, int]:
        return {self.states.tier: self.states.nbytes(optimizer, self.lots(optimizer))}

    def close(self) -> None:
        self._lots = None
        self.states.close_all()


def _zero_gaps(flat: torch.Tensor, lot: Lot) -> None:
    """Zeroes what of ``lot`` lies in no segment; a buffer may hold anything there."""
    end = lot.range.start
    for segment in sorted(lot.segments, key=lambda segment: segment.range.start):
        flat[end : segment.range.start].zero_()
        end = segment.range.stop
    flat[end : lot.range.stop].zero_()


def _lot(unit: Unit, part: Range, segments: Sequence[OwnedSegment]) -> Lot:
    inside = tuple(segment for segment in segments if segment.range.intersect(part).numel)
    return Lot(unit, part, inside)
