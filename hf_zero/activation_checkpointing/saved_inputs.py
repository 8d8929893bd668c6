"""Where the inputs of checkpointed functions rest between forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hf_zero.comm.collectives import Collectives
from hf_zero.errors import StateError
from hf_zero.memory.buffers import HostMemory, HostPool
from hf_zero.memory.copies import CopyLane, Mark


@dataclass
class SavedPart:
    """One rank's part of an input: its shape, its number of elements, and the padded part or where that rests."""

    shape: torch.Size
    numel: int
    part: Any  # Tensor, or SavedOnHost


@dataclass(eq=False)
class SavedOnHost:
    """An input on the host.

    Attributes:
        host: The copy, page-locked where possible.
        device: Where it came from and goes back to.
        block: The memory of ``host``.
        pool: Gets the block back with the last reference to this object: a second backward may read it again.
        fetched: The tensor on the device again, or on its way.
        arrived: After the copy back.
    """

    host: Tensor
    device: torch.device
    block: Tensor = field(repr=False)
    pool: HostPool = field(repr=False)
    fetched: Tensor | None = field(default=None, repr=False)
    arrived: Mark | None = None

    def __del__(self) -> None:
        self.pool.give(self.block)


def keeps(tensor: Tensor) -> bool:
    """Return whether an input stays as it is: weights live anyway, and integers and single numbers are not worth moving."""
    return isinstance(tensor, Parameter) or not tensor.is_floating_point() or tensor.numel() < 2


class DividedInputs:
    """Keeps this rank's part of each input; the ranks of the axis hold equal inputs and gather them in backward.

    Args:
        collectives: The model axis.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives

    def save(self, tensor: Tensor) -> Any:
        """Return the tensor itself when it stays, else a ``SavedPart`` with a part of its own memory."""
        if keeps(tensor) or tensor.numel() < self.collectives.world:
            return tensor
        world, rank = self.collectives.world, self.collectives.rank
        length = -(-tensor.numel() // world)
        own = tensor.detach().reshape(-1)[rank * length : (rank + 1) * length]
        part = own.new_zeros(length)  # memory of its own: a view would keep the whole
        part[: own.numel()] = own
        return SavedPart(tensor.shape, tensor.numel(), part)

    def load(self, saved: Any) -> Tensor:
        """Return the whole input; collective over the axis."""
        if not isinstance(saved, SavedPart):
            whole: Tensor = saved
            return whole
        full = saved.part.new_empty(saved.part.numel() * self.collectives.world)
        self.collectives.all_gather(full, saved.part, "saved activation").wait()
        return full[: saved.numel].view(saved.shape)


@dataclass
class _Side:
    """What a device has beside the computation: a lane for copies in both directions, and memory on the host.

    All copies from and to the memory are the lane's, so a block may be filled again before it has been read.
    """

    lane: CopyLane
    pool: HostPool


class HostInputs:
    """Keeps inputs on the host, and fetches the input that backward needs next while the present one is in use.

    On a device with streams both copies run beside the computation. Inputs that are on the host already stay as they are,
    unless ``copies_always`` (for tests).
    """

    def __init__(self, copies_always: bool = False) -> None:
        self.copies_always = copies_always
        self._order: list[SavedOnHost] = []  # as saved; backward takes them from the end
        self._sides: dict[torch.device, _Side] = {}

    def save(self, tensor: Tensor) -> Any:
        """Return the tensor itself when it stays, else a ``SavedOnHost``."""
        if keeps(tensor) or (tensor.device.type == "cpu" and not self.copies_always):
            return tensor
        value = tensor.detach()
        side = self._side(value.device)
        block = side.pool.take(value.nbytes)
        host = block[: value.nbytes].view(value.dtype).view(value.shape)
        with side.lane.entered():
            host.copy_(value, non_blocking=True)
            side.lane.mark(keep=value)
        saved = SavedOnHost(host, value.device, block, side.pool)
        self._order.append(saved)
        return saved

    def load(self, saved: Any) -> Tensor:
        """Return the input on its device again; begins to fetch the one saved before it."""
        if not isinstance(saved, SavedOnHost):
            stayed: Tensor = saved
            return stayed
        self._fetch(saved)
        if saved in self._order:
            place = self._order.index(saved)
            del self._order[place:]  # what was saved later has been used, or never will be
            if place:
                self._fetch(self._order[-1])
        tensor, saved.fetched = saved.fetched, None
        if tensor is None or saved.arrived is None:
            raise StateError("an input of a checkpointed function was fetched and is not on its device")
        saved.arrived.order()
        return tensor

    def forget(self) -> None:
        """Drop saved inputs that no backward has requested, such as after an evaluation with gradients on."""
        self._order.clear()

    def _fetch(self, saved: SavedOnHost) -> None:
        if saved.fetched is not None:
            return
        lane = self._side(saved.device).lane
        fetched = torch.empty_like(saved.host, device=saved.device)  # of the stream that computes, which will free it
        with lane.entered():
            fetched.copy_(saved.host, non_blocking=True)
            saved.arrived = lane.mark(keep=fetched)
        saved.fetched = fetched

    def _side(self, device: torch.device) -> _Side:
        if device not in self._sides:
            self._sides[device] = _Side(CopyLane(device), HostPool(HostMemory(device)))
        return self._sides[device]
