"""Keep masters and moments in a file; parts of it are read into a few buffers for an update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from hf_zero.config.schema.zero import OffloadOptimizer
from hf_zero.core.optimizer.master_parts import memory_of, set_memory
from hf_zero.core.optimizer.segments import OwnedSegment
from hf_zero.core.units.layout import Range
from hf_zero.core.units.unit import Unit
from hf_zero.errors import StateError
from hf_zero.memory.buffers import ALIGNMENT, HostMemory
from hf_zero.offload.files import SwapFile, SwapFolder, Transfer
from hf_zero.offload.host_states import HostStates, SubGroup

MASTER = "master"

# A smaller sub_group_size means this number of elements, 4 MiB in fp32: the number of reads and writes would set the time of a step.
# Published configurations have sub_group_size 0; in DeepSpeed a sub-group has at least one whole parameter.
LEAST_NUMEL = 1 << 20


def _step_numel(types: Iterable[torch.dtype]) -> int:
    """Return the number of elements that is a whole number of pages in each dtype: ranges that are read at a time begin at its multiples.

    A range that began inside a page would carry elements of the range before it when it is written.
    """
    return ALIGNMENT // min((min(dtype.itemsize, 2) for dtype in types), default=2)


@dataclass(frozen=True)
class BufferPlan:
    """Use of the buffers of a file of states.

    Attributes:
        section: Configuration with ``buffer_count``: that many buffers, each of the largest master shard's size, bound the resident memory.
        most_numel: Largest number of elements of a sub-group; at least ``LEAST_NUMEL`` is used.
    """

    section: OffloadOptimizer
    most_numel: int

    @property
    def frames(self) -> int:
        """Return the number of sub-groups that are held in memory at the same time."""
        return 1 + self.section.pipeline_read + self.section.pipeline_write

    def sub_group_numel(self, largest: int, types: Sequence[torch.dtype]) -> int:
        """[Note: buffer_count and sub-groups] Return the number of elements of a sub-group, so that the buffers keep within their limit.

        ``buffer_count`` buffers of the largest shard's size are the memory that may be used. Adam needs three tensors per sub-group, and
        pipelining two or three sub-groups at once; with fewer buffers the sub-groups are smaller than a shard. So every ``buffer_count``
        works, and a larger one only means larger pieces.

        Args:
            largest: Elements of the largest shard.
            types: Dtypes of the tensors per sub-group: master and states.
        """
        fits = self.section.buffer_count * largest // (max(1, len(types)) * self.frames)
        numel = min(largest, max(self.most_numel, LEAST_NUMEL), fits)
        step = _step_numel(types)
        return max(step, numel // step * step) if numel < largest else largest


@dataclass
class _Region:
    """One array of the file, laid out like a shard, and the mapped tensor that shows its content between updates."""

    offset: int
    dtype: torch.dtype
    mapped: torch.Tensor  # (shard_numel,)

    def place(self, sub_group: SubGroup) -> int:
        """Return the offset of ``sub_group`` in the file, in bytes."""
        return self.offset + sub_group.range.start * self.dtype.itemsize


@dataclass
class _Frame:
    """Buffers of one sub-group, by purpose; ``loaded`` are the buffers that have the content of the sub-group."""

    sub_group: SubGroup | None = None
    loaded: set[str] = field(default_factory=set)
    slots: dict[str, torch.Tensor] = field(default_factory=dict)  # uint8
    transfers: list[Transfer] = field(default_factory=list)

    def settle(self) -> None:
        """Wait for the transfers; after an interrupt or an error, the next call waits for the rest."""
        while self.transfers:
            self.transfers[0].wait()
            del self.transfers[0]

    def drop(self) -> None:
        """Wait for the transfers, whether they fail or not, and drop the content."""
        self.sub_group = None
        self.loaded.clear()
        while self.transfers:
            with suppress(Exception):
                self.settle()

    def view(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.slots[name][: numel * dtype.itemsize].view(dtype)

    def holds(self, name: str, tensor: torch.Tensor) -> bool:
        slot = self.slots.get(name)
        return slot is not None and slot.data_ptr() <= memory_of(tensor).data_ptr() < slot.data_ptr() + slot.numel()


class FileStates(HostStates):
    """Masters and moments in one file per rank.

    Between updates each tensor is a mapped part of the file ([Note: mapped and direct access]) and takes no memory. For an update a
    sub-group is read into a frame, the tensors of the inner optimizer are pointed at the frame (``tensor.data``), updated, and written
    back.

    Args:
        folder: Folder of the file.
        file: The file.
        memory: Allocator of the buffers.
        plan: Number and use of the buffers.
        types: Dtypes of the states that the optimizer will keep per element, from which the size of the sub-groups follows.
        apart: See ``HostStates``.
    """

    tier = "nvme"

    def __init__(
        self,
        folder: SwapFolder,
        file: SwapFile,
        memory: HostMemory,
        plan: BufferPlan,
        types: Mapping[str, torch.dtype],
        apart: bool,
    ) -> None:
        super().__init__(memory, apart)
        self.file = file
        self.plan = plan
        self._folder = folder
        self._types = dict(types)
        self._regions: dict[tuple[int, str], _Region] = {}
        self._frames = [_Frame() for _ in range(plan.frames)]
        self._fresh: set[tuple[int, str]] = set()  # regions that still hold only zeros
        self._largest = 0
        self._has_masters = False

    def _region(self, unit: Unit, name: str, dtype: torch.dtype) -> _Region:
        region = self._regions.get((id(unit), name))
        if region is None or region.dtype != dtype:
            numel = unit.layout.shard_numel
            offset = self.file.reserve(numel * dtype.itemsize)
            region = _Region(offset, dtype, self.file.map(offset, numel, dtype))
            self._regions[id(unit), name] = region
        return region

    def rest(self, unit: Unit) -> None:
        self._largest = max(self._largest, unit.layout.shard_numel)
        if unit.master is None or (unit.master is unit.shard and not self._apart):
            return  # the shard is the master, and must be in memory for fp32 training on the host
        self._has_masters = True
        region = self._region(unit, MASTER, unit.master.dtype)
        frame = self._frames[0]
        for part in _cut(unit.layout.shard_numel, 1 << 24):
            slot = self._slot(frame, MASTER, part.numel * region.dtype.itemsize)
            frame.view(MASTER, part.numel, region.dtype).copy_(unit.master[part.start : part.stop])
            self.file.write(region.offset + part.start * region.dtype.itemsize, slot).wait()
        frame.slots.clear()  # sized for this write; updates size their own
        unit.own.master = region.mapped

    def ranges(self, unit: Unit) -> Sequence[Range]:
        types = [*self._types.values(), *([torch.float32] if self._has_masters else [])]
        return _cut(unit.layout.shard_numel, self.plan.sub_group_numel(self._largest, types))

    def _slot(self, frame: _Frame, name: str, nbytes: int) -> torch.Tensor:
        """Return the part of a buffer to use for a transfer of ``nbytes``."""
        padded = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if name not in frame.slots or frame.slots[name].numel() < padded:
            frame.slots[name] = self._memory.empty(padded, torch.uint8)
        return frame.slots[name][:padded]

    # -- one sub-group

    def prepare(self, sub_group: SubGroup) -> None:
        if self.plan.section.pipeline_read and all(frame.sub_group is not sub_group for frame in self._frames):
            self._read(sub_group)

    def _read(self, sub_group: SubGroup) -> _Frame:
        frame = self._frames.pop(0)
        self._frames.append(frame)
        frame.settle()
        frame.sub_group = sub_group
        frame.loaded.clear()
        for name, region in self._regions_of(sub_group.unit):
            frame.transfers.append(
                self.file.read(region.place(sub_group), self._slot(frame, name, sub_group.range.numel * region.dtype.itemsize))
            )
            frame.loaded.add(name)
        return frame

    def _regions_of(self, unit: Unit) -> list[tuple[str, _Region]]:
        return [(name, region) for (unit_id, name), region in self._regions.items() if unit_id == id(unit)]

    def open(self, sub_group: SubGroup) -> None:
        frame = next((frame for frame in self._frames if frame.sub_group is sub_group), None) or self._read(sub_group)
        frame.settle()
        for segment in sub_group.segments:
            for name, value in _tensors(segment):
                if name in frame.loaded:
                    set_memory(value, _part(frame.view(name, sub_group.range.numel, value.dtype), segment, sub_group))

    def close(self, sub_group: SubGroup) -> None:
        frame = next((frame for frame in self._frames if frame.sub_group is sub_group), None)
        if frame is None:
            raise StateError(f"unit {sub_group.unit.name}: a sub-group was closed that is not open")
        frame.sub_group = None
        self._fresh.clear()
        for segment in sub_group.segments:
            for name, value in segment.elementwise():
                if not frame.holds(name, value):  # the inner optimizer has created or replaced the tensor
                    self._copy_in(frame, sub_group, segment, name, value)
        for name, region in self._regions_of(sub_group.unit):
            if name in frame.loaded:
                slot = self._slot(frame, name, sub_group.range.numel * region.dtype.itemsize)
                frame.transfers.append(self.file.write(region.place(sub_group), slot))
        for segment in sub_group.segments:
            for name, value in _tensors(segment):
                if name in frame.loaded:
                    set_memory(value, segment.within(self._regions[id(sub_group.unit), name].mapped))
        if not self.plan.section.pipeline_write:
            frame.settle()

    def _copy_in(self, frame: _Frame, sub_group: SubGroup, segment: OwnedSegment, name: str, value: torch.Tensor) -> None:
        region = self._region(sub_group.unit, name, value.dtype)
        slot = self._slot(frame, name, sub_group.range.numel * region.dtype.itemsize)
        if name not in frame.loaded:
            slot.zero_()  # gaps between segments
            frame.loaded.add(name)
        _part(frame.view(name, sub_group.range.numel, region.dtype), segment, sub_group).copy_(value)

    def flush(self) -> None:
        for frame in self._frames:
            if frame.sub_group is None:
                frame.settle()

    def settle(self) -> None:
        for frame in self._frames:
            frame.settle()
            frame.sub_group = None

    def put_back(self, sub_groups: Sequence[SubGroup]) -> None:
        """[Note: an update in files that breaks off] A buffer may then hold values that the file lacks, and the other way round. So all
        buffers are dropped, and every tensor is a mapped part of the file again: a load must write to the file, and not to a buffer.
        """
        for frame in self._frames:
            frame.drop()
        for sub_group in sub_groups:
            for segment in sub_group.segments:
                for name, value in _tensors(segment):
                    if any(frame.holds(name, value) for frame in self._frames):
                        set_memory(value, segment.within(self._regions[id(sub_group.unit), name].mapped))

    # -- states from outside

    def new_state(self, segment: OwnedSegment, name: str, dtype: torch.dtype) -> torch.Tensor:
        key = (id(segment.unit), name)
        if key in self._regions and key not in self._fresh:  # its values stay valid until new ones are installed
            return super().new_state(segment, name, dtype)
        self._fresh.add(key)
        return segment.within(self._region(segment.unit, name, dtype).mapped)

    def adopt(self, sub_groups: Sequence[SubGroup]) -> None:
        self._fresh.clear()
        for sub_group in sub_groups:
            for segment in sub_group.segments:
                for name, value in segment.elementwise():
                    place = segment.within(self._region(sub_group.unit, name, value.dtype).mapped)
                    if value.data_ptr() != place.data_ptr():
                        place.copy_(value)
                        set_memory(value, place)

    def nbytes(self, kept: int) -> int:
        return self.file.nbytes

    def close_all(self) -> None:
        for frame in self._frames:
            frame.drop()
        self._regions.clear()
        for frame in self._frames:
            frame.slots.clear()
        self.file.close()
        self._folder.remove()


def _tensors(segment: OwnedSegment) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the master and the states of a segment."""
    yield MASTER, segment.tensor
    yield from segment.elementwise()


def _cut(numel: int, step: int) -> list[Range]:
    return [Range(start, min(start + step, numel)) for start in range(0, numel, step)]


def _part(tensor: torch.Tensor, segment: OwnedSegment, sub_group: SubGroup) -> torch.Tensor:
    return tensor[segment.range.start - sub_group.range.start : segment.range.stop - sub_group.range.start]
