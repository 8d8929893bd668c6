"""Masters and moments away from the device, in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.core.optimizer.sharded import OwnedSegment, ShardedOptimizer
from hf_zero.core.units.layout import Range
from hf_zero.core.units.unit import Unit
from hf_zero.memory.buffers import HostMemory


@dataclass(frozen=True)
class SubGroup:
    """What is updated at a time: a range of one unit's shard and the segments inside it."""

    unit: Unit
    range: Range
    segments: tuple[OwnedSegment, ...]


class HostStates:
    """Masters and moments in host memory; where training runs there too, they are where they would be anyway.

    Args:
        memory: For masters of units on a device.
        apart: The training device has memory of its own.
    """

    tier = "host"

    def __init__(self, memory: HostMemory, apart: bool) -> None:
        self._memory = memory
        self._apart = apart

    def rest(self, unit: Unit) -> None:
        """Takes the master of a new unit."""
        if unit.master is not None and self._apart:
            master = self._memory.empty(unit.master.numel(), unit.master.dtype)
            master.copy_(unit.master)
            unit.own.master = master

    def ranges(self, unit: Unit) -> Sequence[Range]:
        """The sub-groups that ``unit``'s shard is cut into."""
        return [Range(0, unit.layout.shard_numel)]

    def prepare(self, sub_group: SubGroup) -> None:
        """``sub_group`` comes next: starts bringing it."""

    def open(self, optimizer: ShardedOptimizer, sub_group: SubGroup) -> None:
        """Makes masters and states of ``sub_group``'s segments memory that can be written to."""

    def close(self, optimizer: ShardedOptimizer, sub_group: SubGroup) -> None:
        """``sub_group`` is updated: takes it back."""

    def flush(self) -> None:
        """Waits for what is being written: masters and states can be read."""

    def settle(self) -> None:
        """Waits for all that is under way."""

    def new_state(self, segment: OwnedSegment, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Zeros of the segment's shape for its state ``name``, where such states rest."""
        return torch.zeros(segment.range.numel, dtype=dtype)

    def adopt(self, optimizer: ShardedOptimizer, sub_groups: Sequence[SubGroup]) -> None:
        """Takes in states that somebody else has put into the inner optimizer."""

    def nbytes(self, optimizer: ShardedOptimizer, sub_groups: Sequence[SubGroup]) -> int:
        """Bytes of masters and states that rest here."""
        units = {id(sub_group.unit): sub_group.unit for sub_group in sub_groups}.values()
        masters = sum(unit.master.nbytes for unit in units if unit.master is not None and unit.master is not unit.shard)
        return masters + sum(
            value.nbytes
            for sub_group in sub_groups
            for segment in sub_group.segments
            for _, value in elementwise_states(optimizer, segment)
        )

    def close_all(self) -> None:
        """Lets go of everything."""


def elementwise_states(optimizer: ShardedOptimizer, segment: OwnedSegment) -> Iterator[tuple[str, torch.Tensor]]:
    """The states of a segment that have one number per element."""
    state: Mapping[str, Any] = optimizer.inner.state.get(segment.tensor, {})
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.ndim and value.shape == segment.tensor.shape:
            yield name, value
