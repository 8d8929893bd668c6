"""Store shards away from the device: updated on the host and sent back, kept in host memory, or kept in a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from hf_zero.core.units.layout import UnitState
from hf_zero.core.units.shard import ShardOwner, ShardStorage
from hf_zero.errors import StateError
from hf_zero.memory.buffers import ALIGNMENT, HostMemory
from hf_zero.memory.copies import CopyLane, Mark
from hf_zero.observe import waiting
from hf_zero.offload.files import SwapFile, SwapFolder, Transfer


def _no_memory() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")


@dataclass
class _Frame:
    """A host buffer for copies: the unit whose shard it holds, and the copies that must end before another unit uses it."""

    unit: ShardOwner | None = None
    memory: torch.Tensor = field(default_factory=_no_memory)  # uint8
    transfer: Transfer | None = None
    mark: Mark | None = None
    reads: bool = False  # the transfer fills the buffer

    def view(self, unit: ShardOwner) -> torch.Tensor:
        """Return the buffer as a shard of ``unit``."""
        return self.memory[: unit.shard.nbytes].view(unit.shard.dtype)

    def settle(self) -> None:
        """Wait until no copy reads or writes the buffer; after an interrupt, the next call waits for it."""
        if self.transfer is not None:
            try:
                self.transfer.wait()
            except BaseException:
                if self.reads:  # the buffer lacks a part of the shard
                    self.unit = None
                raise
            self.transfer = None
        if self.mark is not None:
            self.mark.wait()
            self.mark = None


class _Frames:
    """A few buffers used in turn."""

    def __init__(self, memory: HostMemory, count: int) -> None:
        self._memory = memory
        self._frames = [_Frame() for _ in range(max(1, count))]

    def take(self, unit: ShardOwner) -> _Frame:
        """Return the least recently taken buffer, after its copies have ended, large enough for ``unit``'s shard."""
        frame = self._frames.pop(0)
        self._frames.append(frame)
        for other in self._frames:  # invalidate older contents, which a single unit would find before they are overwritten
            if other.unit is unit:
                other.unit = None
        frame.unit = None
        frame.settle()
        nbytes = -(-unit.shard.nbytes // ALIGNMENT) * ALIGNMENT
        if frame.memory.numel() < nbytes:
            frame.memory = _no_memory()  # free the old memory before the new is allocated
            frame.memory = self._memory.empty(nbytes, torch.uint8, pinned=True)
        frame.unit = unit
        return frame

    def holding(self, unit: ShardOwner) -> _Frame | None:
        """Return the buffer that holds ``unit``'s shard; None if no buffer does."""
        return next((frame for frame in self._frames if frame.unit is unit), None)

    def filled(self, unit: ShardOwner) -> _Frame:
        """Return the buffer that was taken for ``unit`` and has its new values.

        Raises:
            StateError: No buffer was taken for the unit, or it now belongs to another unit.
        """
        found = self.holding(unit)
        if found is None:
            raise StateError("no buffer holds the new values of this unit: reserve a buffer for them first, and send them only once")
        return found

    def settle(self) -> None:
        """Wait for running copies; the contents of the buffers stay valid."""
        for frame in self._frames:
            frame.settle()

    def drop(self, unit: ShardOwner | None = None) -> None:
        """Invalidate the contents of the buffers, for ``unit`` or for all units; wait for running copies."""
        for frame in self._frames:
            if unit is None or frame.unit is unit:
                frame.unit = None
                frame.settle()

    def free(self) -> None:
        """Free the memory."""
        self.drop()
        for frame in self._frames:
            frame.memory = _no_memory()


class ReturningStorage(ShardStorage):
    """Storage on the device for shards that are updated on the host: new values are sent through buffers.

    Args:
        memory: Allocator of the buffers.
        lane: Lane of copies to the device.
        lasting: Each unit has a buffer, so that updates of all units may run at once; otherwise two buffers serve all units in turn.
    """

    def __init__(self, memory: HostMemory, lane: CopyLane, lasting: bool = False) -> None:
        self._lasting = lasting
        self._lane = lane
        self._memory = memory
        self._shared = _Frames(memory, 2)
        self._own: dict[int, _Frames] = {}  # id of the unit -> buffers

    def _frames(self, unit: ShardOwner) -> _Frames:
        return self._own.setdefault(id(unit), _Frames(self._memory, 1)) if self._lasting else self._shared

    def outgoing(self, unit: ShardOwner) -> torch.Tensor:
        return self._frames(unit).take(unit).view(unit)

    def send(self, unit: ShardOwner) -> None:
        frame = self._frames(unit).filled(unit)
        frame.mark = self._lane.copy(unit.shard, frame.view(unit))
        # The next operation of the device may read the shard.
        frame.mark.order()

    def close(self) -> None:
        for frames in (self._shared, *self._own.values()):
            frames.free()


class HostStorage(ShardStorage):
    """Storage in page-locked host memory; shards are copied to the device when their unit is unsharded.

    A unit frees the buffer that the lane fills only after it has waited for the all-gather, including ``arrive``, so the buffer needs no
    further reference ([Note: device memory in a lane]).

    Args:
        memory: Allocator of the shards.
        lane: Lane of copies to the device.
        passing: See ``ShardStorage``.
    """

    reshards = True

    def __init__(self, memory: HostMemory, lane: CopyLane, passing: bool = False) -> None:
        self.passing = passing
        self._memory = memory
        self._lane = lane
        self._marks: dict[int, Mark] = {}

    def rest(self, unit: ShardOwner, shard: torch.Tensor) -> torch.Tensor:
        kept = self._memory.empty(shard.numel(), shard.dtype, pinned=True)
        kept.copy_(shard)
        return kept

    def of_copies(self) -> ShardStorage:
        return self

    @contextmanager
    def gather_source(self, unit: ShardOwner, own: torch.Tensor) -> Iterator[torch.Tensor]:
        with self._lane.entered():
            own.copy_(unit.shard, non_blocking=True)
            yield own
            self._marks[id(unit)] = self._lane.mark()

    def arrive(self, unit: ShardOwner) -> None:
        mark = self._marks.pop(id(unit), None)
        if mark is not None:
            mark.order()


@dataclass
class _Place:
    """A shard's region in the file, and its position in the order of use."""

    unit: ShardOwner
    offset: int
    index: int


@dataclass
class _RequestOrder:
    """Direction in which units are requested: ascending in forward, descending in backward."""

    last: int = -1
    step: int = field(default=1)

    def go(self, index: int) -> int:
        """Record a request for unit ``index``; return +1 for ascending or -1 for descending requests."""
        if index != self.last:
            self.step = 1 if index > self.last else -1
        self.last = index
        return self.step


class FileStorage(ShardStorage):
    """Storage in a file; the next shards are read ahead into a few buffers.

    Args:
        folder: Folder of the file; removed with the last unit that is stored in it.
        file: The file.
        memory: Allocator of the buffers.
        lane: Lane of copies to the device.
        count: Number of buffers.
    """

    reshards = True
    on_disk = True

    def __init__(self, folder: SwapFolder, file: SwapFile, memory: HostMemory, lane: CopyLane, count: int) -> None:
        self.file = file
        self._folder = folder
        self._lane = lane
        self._frames = _Frames(memory, count)
        self._ahead = max(0, count - 1)
        self._copies = HostStorage(memory, lane)
        self._places: list[_Place] = []
        self._place_of: dict[int, _Place] = {}
        self._request_order = _RequestOrder()
        self._marks: dict[int, Mark] = {}

    def rest(self, unit: ShardOwner, shard: torch.Tensor) -> torch.Tensor:
        place = _Place(unit, self.file.reserve(shard.nbytes), len(self._places))
        self._places.append(place)
        self._place_of[id(unit)] = place
        frame = self._frames.take(unit)
        frame.view(unit).copy_(shard)
        self.file.write(place.offset, frame.memory[: _padded(shard.nbytes)]).wait()
        frame.unit = None
        return self.file.map(place.offset, shard.numel(), shard.dtype)

    @contextmanager
    def gather_source(self, unit: ShardOwner, own: torch.Tensor) -> Iterator[torch.Tensor]:
        place = self._place_of[id(unit)]
        frame = self._frames.holding(unit) or self._begin_read(place)
        with waiting("offload", "a shard from its file"):
            frame.settle()
        with self._lane.entered():
            own.copy_(frame.view(unit), non_blocking=True)
            yield own
            self._marks[id(unit)] = frame.mark = self._lane.mark()
        frame.unit = None
        self._read_ahead(place)

    def _begin_read(self, place: _Place) -> _Frame:
        frame = self._frames.take(place.unit)
        frame.unit = None  # until the read has begun
        frame.transfer, frame.reads = self.file.read(place.offset, frame.memory[: _padded(place.unit.shard.nbytes)]), True
        frame.unit = place.unit
        return frame

    def _read_ahead(self, place: _Place) -> None:
        step = self._request_order.go(place.index)
        for distance in range(1, self._ahead + 1):
            index = place.index + step * distance
            if not 0 <= index < len(self._places):
                return
            upcoming = self._places[index]
            if upcoming.unit.state is UnitState.SHARDED and self._frames.holding(upcoming.unit) is None:
                self._begin_read(upcoming)

    def arrive(self, unit: ShardOwner) -> None:
        mark = self._marks.pop(id(unit), None)
        if mark is not None:
            mark.order()

    def outgoing(self, unit: ShardOwner) -> torch.Tensor:
        self._frames.drop(unit)
        return self._frames.take(unit).view(unit)

    def send(self, unit: ShardOwner) -> None:
        frame = self._frames.filled(unit)
        frame.transfer, frame.reads = self.file.write(self._place_of[id(unit)].offset, frame.memory[: _padded(unit.shard.nbytes)]), False

    def flush(self) -> None:
        self._frames.settle()

    def changed(self, unit: ShardOwner) -> None:
        self._frames.drop(unit)

    def of_copies(self) -> ShardStorage:
        return self._copies

    def close(self) -> None:
        self._frames.free()
        self.file.close()
        self._folder.remove()


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
