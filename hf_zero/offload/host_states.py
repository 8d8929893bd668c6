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

_PIECE = 1 << 24  # elements of a gradient that are summed, or copied to a wider dtype, at a time


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

    def put_back(self, sub_groups: Sequence[SubGroup]) -> None:
        """Point all tensors of ``sub_groups`` at this store again, after an update that broke off."""

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

    [Note: gradients on the host] The gradient of a micro-step is copied to the host in the accumulation dtype. A further micro-step copies
    the sum back, adds on the device, and copies it out again. The numbers are the same as for a sum that stays on the device, no thread
    waits, and the bus copies in both directions at once. Sums and wider copies of a gradient are computed in pieces, one after the other in
    the memory of the first: those of a large head would take gigabytes of the device. [Note: device memory in a lane] keeps device memory
    alive until it is copied.

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

    def add(self, unit: Unit, total: torch.Tensor | None, received: torch.Tensor, dtype: torch.dtype, factor: float = 1.0) -> torch.Tensor:
        unit.own.settle()  # the last update may still read the buffer
        host = self._buffer(unit, dtype)
        with self._outward.entered():
            for start in range(0, host.numel(), _PIECE):
                piece = slice(start, start + _PIECE)
                known = total[piece].to(self._device, dtype, non_blocking=True, copy=True) if total is not None else None
                host[piece].copy_(super().add(unit, known, received[piece], dtype, factor), non_blocking=True)
            self._marks[id(unit)] = self._outward.mark(keep=received)  # the pieces were allocated in the lane, and stay there
        return host

    def _buffer(self, unit: Unit, dtype: torch.dtype) -> torch.Tensor:
        known = self._buffers.get(id(unit))
        if known is None or known.dtype != dtype:
            known = self._buffers[id(unit)] = self._memory.empty(unit.layout.shard_numel, dtype, pinned=True)
        return known

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
