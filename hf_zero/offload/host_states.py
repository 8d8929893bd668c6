"""Masters and moments away from the device, in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_zero.core.optimizer.segments import OwnedSegment
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
        """Moves the master of a new unit here."""
        if unit.master is not None and self._apart:
            master = self._memory.empty(unit.master.numel(), unit.master.dtype)
            master.copy_(unit.master)
            unit.own.master = master

    def ranges(self, unit: Unit) -> Sequence[Range]:
        """The sub-groups that ``unit``'s shard is cut into."""
        return [Range(0, unit.layout.shard_numel)]

    def prepare(self, sub_group: SubGroup) -> None:
        """``sub_group`` is updated next: starts reading it."""

    def open(self, sub_group: SubGroup) -> None:
        """Makes masters and states of ``sub_group``'s segments memory that can be written to."""

    def close(self, sub_group: SubGroup) -> None:
        """``sub_group`` is updated: starts writing it back."""

    def flush(self) -> None:
        """Waits for what is being written: masters and states can be read."""

    def settle(self) -> None:
        """Waits for all that is under way."""

    def new_state(self, segment: OwnedSegment, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Zeros of the segment's shape for its state ``name``, where such states rest."""
        return torch.zeros(segment.range.numel, dtype=dtype)

    def adopt(self, sub_groups: Sequence[SubGroup]) -> None:
        """Moves states that were put into the inner optimizer from outside to where they rest."""

    def nbytes(self, kept: int) -> int:
        """Bytes of masters and states that rest here; ``kept``: the sum of their sizes."""
        return kept

    def close_all(self) -> None:
        """Frees everything."""
