"""Keep masters and moments in host memory, and stream reduced gradients to page-locked host memory during backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_zero.core.optimizer.segments import OwnedSegment
from hf_zero.core.schedule.gradients import GradientPlace, Listener
from hf_zero.core.units.layout import Range
from hf_zero.core.units.unit import Unit
from hf_zero.memory.buffers import HostMemory
from hf_zero.memory.copies import CopyLane, Mark
from hf_zero.observe import waiting


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
        """Return the sub-groups that ``unit``'s shard is cut into."""
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
        """Return bytes of masters and states that rest here; ``kept``: the sum of their sizes."""
        return kept

    def close_all(self) -> None:
        """Frees everything."""


class HostGradients(GradientPlace):
    """One host buffer per unit, for the life of the engine.

    [Note: gradients on the host] What one micro-step leaves is copied out in the type it arrived in. A further micro-step brings the
    sum back, adds on the device, in the accumulation type, and copies it out again: the numbers are those of a sum that never left, no
    thread waits, and the bus carries the two directions at once. What leaves stays alive as [Note: device memory in a lane] says.

    Args:
        memory: Of the buffers.
        device: The training device.
        outward: Copies to the host.
        listener: As in ``GradientPlace``.
    """

    def __init__(
        self,
        memory: HostMemory,
        device: torch.device,
        outward: CopyLane,
        listener: Listener | None = None,
    ) -> None:
        super().__init__(listener)
        self._memory = memory
        self._device = device
        self._outward = outward
        self._buffers: dict[int, torch.Tensor] = {}
        self._marks: dict[int, Mark] = {}

    def add(self, unit: Unit, total: torch.Tensor | None, received: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        unit.own.settle()  # the last update reads the buffer
        with self._outward.entered():
            leaving = received
            if total is not None:
                leaving = total.to(self._device, dtype, non_blocking=True, copy=True).add_(received)
            host = self._buffer(unit, leaving.dtype if leaving.dtype.itemsize <= dtype.itemsize else dtype)
            host.copy_(leaving, non_blocking=True)
            self._marks[id(unit)] = self._outward.mark(keep=received)  # the sum was allocated in the lane, and stays there
        return host

    def _buffer(self, unit: Unit, dtype: torch.dtype) -> torch.Tensor:
        numel = unit.layout.shard_numel
        known = self._buffers.get(id(unit))
        if known is None or known.nbytes < numel * dtype.itemsize:
            known = self._memory.empty(numel * max(4, dtype.itemsize), torch.uint8, pinned=True)
            self._buffers[id(unit)] = known
        return known[: numel * dtype.itemsize].view(dtype)

    def zeros(self, unit: Unit, dtype: torch.dtype) -> torch.Tensor:
        unit.own.settle()
        return self._buffer(unit, dtype).zero_()

    def fetch(self, unit: Unit, total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self.settle(unit)
        return total.to(self._device, dtype)

    def settle(self, unit: Unit) -> None:
        mark = self._marks.get(id(unit))
        if mark is not None:
            with waiting("offload", f"gradients to the host ({unit.name})"):
                mark.wait()
