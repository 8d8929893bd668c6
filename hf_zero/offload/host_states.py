"""Keep masters and moments in host memory, and stream reduced gradients to page-locked host memory during backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_zero.core.optimizer.segments import OwnedSegment
from hf_zero.core.schedule.gradient_sums import GradientPlace, Listener
from hf_zero.core.units.layout import Range
from hf_zero.core.units.unit import Unit
from hf_zero.memory.buffers import HostMemory
from hf_zero.memory.copies import CopyLane, Mark
from hf_zero.observe import waiting


@dataclass(frozen=True)
class SubGroup:
    """Unit of an update: a range of one unit's shard and the segments inside it."""

    unit: Unit
    range: Range
    segments: tuple[OwnedSegment, ...]


class HostStates:
    """Masters and moments in host memory; if training runs in host memory, they are not moved.

    Args:
        memory: Allocator for masters of units on a device.
        apart: The training device has memory of its own.
    """

    tier = "host"

    def __init__(self, memory: HostMemory, apart: bool) -> None:
        self._memory = memory
        self._apart = apart

    def rest(self, unit: Unit) -> None:
        """Move the master of a new unit to this store."""
        if unit.master is not None and self._apart:
            master = self._memory.empty(unit.master.numel(), unit.master.dtype)
            master.copy_(unit.master)
            unit.own.master = master

    def ranges(self, unit: Unit) -> Sequence[Range]:
        """Return the ranges of ``unit``'s shard that are the sub-groups of an update."""
        return [Range(0, unit.layout.shard_numel)]

    def prepare(self, sub_group: SubGroup) -> None:
        """Start reading ``sub_group``, which is updated next."""

    def open(self, sub_group: SubGroup) -> None:
        """Put masters and states of ``sub_group``'s segments into writable memory."""

    def close(self, sub_group: SubGroup) -> None:
        """Start writing ``sub_group`` back after its update."""

    def flush(self) -> None:
        """Wait for running writes, after which masters and states can be read."""

    def settle(self) -> None:
        """Wait for all running transfers."""

    def new_state(self, segment: OwnedSegment, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros of the segment's shape for its state ``name``, in this store's tier."""
        return torch.zeros(segment.range.numel, dtype=dtype)

    def adopt(self, sub_groups: Sequence[SubGroup]) -> None:
        """Move states that other code has put into the inner optimizer to this store's tier."""

    def nbytes(self, kept: int) -> int:
        """Return the bytes of masters and states in this store; ``kept`` is the sum of their sizes."""
        return kept

    def close_all(self) -> None:
        """Free all memory and files."""


class HostGradients(GradientPlace):
    """Gradients on the host: one host buffer per unit, as long as the engine lives.

    [Note: gradients on the host] The gradient of a micro-step is copied to the host in the dtype in which it arrived. A further
    micro-step copies the sum back, adds on the device in the accumulation dtype, and copies it out again. The numbers are the same as for
    a sum that stays on the device, no thread waits, and the bus copies in both directions at once. [Note: device memory in a lane] keeps
    device memory alive until it is copied.

    Args:
        memory: Allocator of the buffers.
        device: The training device.
        outward: Lane of copies to the host.
        listener: See ``GradientPlace``.
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
        unit.own.settle()  # the last update may still read the buffer
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
