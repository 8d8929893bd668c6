"""Keep tensors that autograd functions save for backward in host memory between forward and backward.

[Note: two groups on the device] The tensors that are saved between two calls of ``advance`` form a group: the activations of a block, or
the inputs of a checkpointed function. When a group is complete, its copies to the host begin, in a stream beside the computing stream. When
the next group is complete too, the computing stream waits for these copies, and the first group's device memory is freed. So at most two
groups are on the device, and the last group of a forward, which backward reads first, is never moved. Backward fetches a complete group
while it computes in the following group. A tensor that several functions have saved is moved once.

[Note: saved and changed] torch checks whether a saved tensor was modified before backward reads it, but not for tensors that hooks pack.
The copies here are made later than the tensor was saved, so this module makes the check: it compares version counters after the device has
copied, or, for a tensor without a copy, when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn import Parameter

from hf_zero.errors import StateError
from hf_zero.memory.buffers import HostMemory, HostPool
from hf_zero.memory.copies import CopyLane, Mark
from hf_zero.system.planning import has_values

LEAST_BYTES = 4096
"""Smallest storage in bytes that is moved; a smaller one would take a complete page on the host."""

_MOST_UNUSED = 4  # a complete storage is moved if it has at most so many bytes per byte of the tensor
_MOVERS = ("save_on_cpu.__init__.<locals>.pack_to_cpu", "OffloadActivations.__init__.<locals>.pack_tensor")


def moves_to_host(pack: Callable[..., Any]) -> bool:
    """Return whether ``pack``, a hook of saved tensors, only copies them to the host: torch's ``save_on_cpu``, or ``OffloadActivations``,
    which several trainers have.
    """
    return getattr(pack, "__qualname__", "") in _MOVERS


@dataclass(eq=False)
class _Piece:
    """A piece of device memory with tensors that functions have saved.

    Attributes:
        device: Device of the saved tensors.
        pool: Pool of host memory; ``block`` is returned to it with the last reference to this object, because a second backward may read.
        source: The device memory as a tensor (n,); None after it was moved.
        version: Version counter of ``source`` when it was saved.
        users: Number of saved tensors in this piece that no backward has read yet.
        host: Copy on the host, (n,), in page-locked memory where possible; None before it is made.
        block: Block of host memory that ``host`` is a view of.
        fetched: Device memory (n,) that is copied back from the host; None before it is needed.
        arrived: Event after the copy to ``fetched``; None once the computing stream waits for it.
        changed: Whether the source was modified after it was saved.
    """

    device: torch.device
    pool: HostPool
    source: Tensor | None
    version: int
    users: int = 0
    host: Tensor | None = None
    block: Tensor | None = field(default=None, repr=False)
    fetched: Tensor | None = None
    arrived: Mark | None = None
    changed: bool = False

    def used(self) -> None:
        """Record that one of the saved tensors was read or freed; after the last one free the device memory."""
        self.users -= 1
        if self.users <= 0:
            self.leave_device()

    def leave_device(self) -> None:
        """Free the device memory if there is a copy on the host."""
        if self.host is not None:
            self.source = self.fetched = None

    def check(self) -> None:
        """Compare the version counters, and set ``changed`` if they differ; see [Note: saved and changed]."""
        self.changed |= self.source is not None and self.source._version != self.version

    def __del__(self) -> None:
        if self.block is not None:
            self.pool.give(self.block)


@dataclass(eq=False)
class _Group:
    """The pieces that were saved between two calls of ``advance``.

    Attributes:
        place: Position in the order of groups.
        pieces: Weak references to the pieces; a piece that was saved again is in several groups.
        marks: Events after the copies that are running, to or from the host.
        held: Device memory that these copies use.
    """

    place: int
    pieces: list[ReferenceType[_Piece]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)

    def alive(self) -> list[_Piece]:
        """Return the pieces that a backward may still read."""
        return list({id(piece): piece for refers in self.pieces if (piece := refers()) is not None}.values())


@dataclass(eq=False)
class SavedOnHost:
    """The position of a saved tensor in a piece: its ``offset`` in elements, and its size and strides.

    Attributes:
        spread: Whether the tensor was a small part of its storage, with gaps between its elements; the piece has no gaps.
    """

    piece: _Piece
    group: _Group
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    spread: bool = False
    loaded: bool = False

    def __del__(self) -> None:
        if not self.loaded:
            self.piece.used()


@dataclass
class SavedHere:
    """A saved tensor that is not moved, and its version counter when it was saved."""

    tensor: Tensor
    version: int


@dataclass
class _CopyResources:
    """The copy stream of a device, for both directions, and its pool of host memory.

    All copies to and from the pool run in this one stream, so a block may be reused before an earlier copy from it has finished.
    """

    lane: CopyLane
    pool: HostPool


class HostActivations:
    """A pair of saved-tensor hooks, ``save`` and ``load``, that keeps the tensors in host memory until backward.

    Parameters, memory that is marked as resident, tensors that are on the host already and small tensors are not moved.

    Args:
        copies_always: Whether tensors that are on the host already are copied too (for tests).
    """

    def __init__(self, copies_always: bool = False) -> None:
        self.copies_always = copies_always
        self._resources: dict[torch.device, _CopyResources] = {}
        self._groups = [_Group(0)]  # the last one is not complete
        self._known: dict[int, ReferenceType[_Piece]] = {}  # by storage, while its piece has a source
        self._under_way: list[_Group] = []  # groups with marks
        self._reading: _Group | None = None  # the group that backward is in

    # -- forward ------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Begin the next group, see [Note: two groups on the device]."""
        self._settle(leave=True)
        complete = self._groups[-1].alive()
        if not complete:
            while self._groups and not self._groups[-1].alive():
                self._groups.pop()
        else:
            self._copy_out(self._groups[-1], complete)
        self._groups.append(_Group(len(self._groups)))
        self._reading = None

    def forget(self) -> None:
        """Free the device memory of running copies, for example after an evaluation with gradients enabled."""
        self._settle(leave=True)

    def save(self, tensor: Tensor) -> SavedOnHost | SavedHere:
        """Return the object that the graph keeps instead of the tensor; the device memory stays until the tensor's group is moved."""
        if self._stays(tensor):
            return SavedHere(tensor.detach(), tensor._version)
        piece, offset, spread = self._piece_of(tensor)
        if piece is None:
            return SavedHere(tensor.detach(), tensor._version)
        group = self._groups[-1]
        group.pieces.append(ref(piece))
        piece.users += 1
        return SavedOnHost(piece, group, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset, spread)

    def _stays(self, tensor: Tensor) -> bool:
        if isinstance(tensor, Parameter) or not (type(tensor) is Tensor or not has_values(tensor)) or tensor.layout is not torch.strided:
            return True
        if tensor.device.type == "cpu" and not self.copies_always:
            return True
        if tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg():
            return True
        return tensor.untyped_storage().nbytes() < LEAST_BYTES or is_resident(tensor)

    def _piece_of(self, tensor: Tensor) -> tuple[_Piece | None, int, bool]:
        """Return the piece that holds ``tensor``, the offset of the tensor in it, and whether the piece omits gaps between its elements.

        A complete storage is moved, so that the tensor has the same strides in backward, because kernels choose the order of their sums by
        strides. A tensor that is a small part of its storage is copied at once, which frees the storage.
        """
        storage, width = tensor.untyped_storage(), tensor.element_size()
        known = self._known.get(storage._cdata)
        piece = known() if known is not None else None
        if piece is not None and piece.source is not None and piece.source.untyped_storage()._cdata == storage._cdata:
            piece.check()
            if not piece.changed and tensor._version == piece.version:
                return piece, int(tensor.storage_offset()), False
        pool = self._resources_of(tensor.device).pool
        moved = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        values = tensor.detach().as_strided(moved, tensor.stride())
        if storage.nbytes() <= _MOST_UNUSED * values.numel() * width and storage.nbytes() % width == 0:
            source = values.as_strided((storage.nbytes() // width,), (1,), 0)
            piece = _Piece(tensor.device, pool, source, tensor._version)
            self._known[storage._cdata] = ref(piece)
            return piece, int(tensor.storage_offset()), False
        if _overlaps(values):
            return None, 0, False
        source = values.clone(memory_format=torch.contiguous_format).view(-1)
        return _Piece(tensor.device, pool, source, source._version), 0, True

    def _copy_out(self, group: _Group, pieces: Iterable[_Piece]) -> None:
        """Begin to copy to the host the pieces that have no copy there yet."""
        leaving = [(piece, piece.source) for piece in pieces if piece.host is None and piece.source is not None]
        leaving = [(piece, source) for piece, source in leaving if source.nbytes >= LEAST_BYTES]
        for device in {piece.device for piece, _ in leaving}:
            resources = self._resources_of(device)
            with resources.lane.entered():
                for piece, source in leaving:
                    if piece.device == device:
                        piece.block = resources.pool.take(source.nbytes)
                        piece.host = piece.block[: source.nbytes].view(source.dtype)
                        piece.host.copy_(source, non_blocking=True)
                        group.held.append(source)
                self._begun(group, resources.lane.mark())

    def _begun(self, group: _Group, mark: Mark) -> None:
        group.marks.append(mark)
        self._under_way.append(group)

    # -- backward -----------------------------------------------------------------------------------------------------

    def load(self, saved: SavedOnHost | SavedHere) -> Tensor:
        """Return the saved tensor on its device, and begin to fetch the group that was saved before its own.

        Raises:
            StateError: The tensor was modified after it was saved.
        """
        if isinstance(saved, SavedHere):
            if saved.tensor._version != saved.version:
                raise _changed(saved.tensor.shape)
            return saved.tensor
        piece = saved.piece
        self._read(saved.group)
        piece.check()
        if piece.changed:
            raise _changed(saved.size)
        if piece.source is None and piece.fetched is None:
            self._fetch([piece])
        if piece.arrived is not None:
            piece.arrived.order()
            piece.arrived = None
        memory = piece.source if piece.source is not None else piece.fetched
        if memory is None:
            raise StateError("a tensor that was saved on the host is not on its device although it was fetched; please report this error")
        tensor = _spread(memory, saved) if saved.spread else memory.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)
        if not saved.loaded:
            saved.loaded = True
            piece.used()
        elif piece.users <= 0:
            piece.leave_device()
        return tensor

    def _read(self, group: _Group) -> None:
        """Fetch a group that backward enters, and begin to fetch the group before it."""
        if self._reading is group:
            return
        self._reading = group
        self._settle(leave=False)
        self._fetch([piece for piece in group.alive() if piece.users > 0])
        for before in reversed(self._groups[: group.place]):
            wanted = [piece for piece in before.alive() if piece.users > 0]
            if wanted:
                self._fetch(wanted, before)
                break

    def _fetch(self, pieces: Iterable[_Piece], group: _Group | None = None) -> None:
        """Begin to copy pieces back that are not on the device; without ``group`` the computing stream waits for them immediately."""
        absent = [(piece, piece.host) for piece in pieces if piece.source is None and piece.fetched is None and piece.host is not None]
        for device in {piece.device for piece, _ in absent}:
            lane = self._resources_of(device).lane
            # Allocate in the computing stream, which will free the memory.
            there = [(piece, host, torch.empty_like(host, device=device)) for piece, host in absent if piece.device == device]
            with lane.entered():
                for _, host, fetched in there:
                    fetched.copy_(host, non_blocking=True)
                mark = lane.mark()
            for piece, _, fetched in there:
                piece.fetched, piece.arrived = fetched, mark
            if group is None:
                mark.order()
            else:
                group.held += [fetched for _, _, fetched in there]
                self._begun(group, mark)

    def _settle(self, leave: bool) -> None:
        """Let the computing stream wait for the running copies.

        Args:
            leave: Whether to free the device memory of groups that were copied to the host.
        """
        for group in self._under_way:
            for mark in group.marks:
                mark.order()
            for piece in group.alive():
                piece.check()
                if leave and piece.fetched is None:
                    piece.leave_device()
            group.marks, group.held = [], []
        self._under_way = []

    def _resources_of(self, device: torch.device) -> _CopyResources:
        if device not in self._resources:
            self._resources[device] = _CopyResources(CopyLane(device), HostPool(HostMemory(device)))
        return self._resources[device]


def _overlaps(tensor: Tensor) -> bool:
    """Return whether elements of ``tensor`` may share memory."""
    reach = 1  # elements from the first to the last of the dimensions so far
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def _spread(values: Tensor, saved: SavedOnHost) -> Tensor:
    """Return the saved tensor with its original strides, filled from ``values`` (n,), which have no gaps."""
    moved = [1 if stride == 0 else size for size, stride in zip(saved.size, saved.stride, strict=True)]
    tensor = torch.empty_strided(moved, saved.stride, dtype=saved.dtype, device=values.device)
    return tensor.copy_(values.view(moved)).as_strided(saved.size, saved.stride)


def _changed(shape: Iterable[int]) -> StateError:
    return StateError(
        f"a tensor of shape {tuple(shape)} that a function had saved for backward was modified by an inplace operation before backward "
        "read it, while activations are moved to the host (save_on_cpu, activation_offloading, offload of gradient checkpointing, "
        "cpu_checkpointing). Compute into a new tensor, or clone the tensor before the operation"
    )


_MARK = "_hf_zero_stays"  # attribute of a storage; torch keeps the storage's object as long as the storage


def mark_resident(tensor: torch.Tensor) -> None:
    """Mark device memory that must not be moved to the host; the mark stays when its storage is freed and allocated again.

    Autograd functions save weights, and views of them, together with activations. The engine frees and gathers a unit's whole buffer
    itself: a copy of a weight on the host would be a second copy of the model in each forward, and would free no memory on the device.
    """
    setattr(tensor.untyped_storage(), _MARK, True)


def mark_residents(tensors: Iterable[torch.Tensor]) -> None:
    """Mark the memory of ``tensors``; skip those without their own storage (sparse tensors, subclasses)."""
    for tensor in tensors:
        with suppress(RuntimeError, NotImplementedError):
            mark_resident(tensor)


def is_resident(tensor: torch.Tensor) -> bool:
    """Return whether the memory of ``tensor``, which may be a view, is marked."""
    return getattr(tensor.untyped_storage(), _MARK, False)
