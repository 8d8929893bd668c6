"""Where the inputs of checkpointed functions rest between forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hf_zero.comm.collectives import Collectives
from hf_zero.observe import warn_once


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
        host: The copy, pinned where possible.
        device: Where it came from and goes back to.
        copied: Event after the copy to the host; None without streams.
        fetched: The tensor on the device again, or on its way.
        arrived: Event after the copy back.
    """

    host: Tensor
    device: torch.device
    copied: Any = None
    fetched: Tensor | None = field(default=None, repr=False)
    arrived: Any = None


def keeps(tensor: Tensor) -> bool:
    """Whether an input stays as it is: weights live anyway, and integers and single numbers are not worth moving."""
    return isinstance(tensor, Parameter) or not tensor.is_floating_point() or tensor.numel() < 2


class DividedInputs:
    """Keeps this rank's part of each input; the ranks of the axis hold equal inputs and gather them in backward.

    Args:
        collectives: The model axis.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives

    def save(self, tensor: Tensor) -> Any:
        """The tensor itself when it stays, else a ``SavedPart`` with a part of its own memory."""
        if keeps(tensor) or tensor.numel() < self.collectives.world:
            return tensor
        world, rank = self.collectives.world, self.collectives.rank
        length = -(-tensor.numel() // world)
        own = tensor.detach().reshape(-1)[rank * length : (rank + 1) * length]
        part = own.new_zeros(length)  # memory of its own: a view would keep the whole
        part[: own.numel()] = own
        return SavedPart(tensor.shape, tensor.numel(), part)

    def load(self, saved: Any) -> Tensor:
        """The whole input; collective over the axis."""
        if not isinstance(saved, SavedPart):
            whole: Tensor = saved
            return whole
        full = saved.part.new_empty(saved.part.numel() * self.collectives.world)
        self.collectives.all_gather(full, saved.part, "saved activation").wait()
        return full[: saved.numel].view(saved.shape)


class HostInputs:
    """Keeps inputs on the host, and fetches the input that backward needs next while the present one is in use.

    On a device with streams both copies run beside the computation. Inputs that are on the host already stay as they are,
    unless ``copies_always`` (for tests).
    """

    def __init__(self, copies_always: bool = False) -> None:
        self.copies_always = copies_always
        self._order: list[SavedOnHost] = []  # as saved; backward takes them from the end
        self._streams: dict[torch.device, Any] = {}

    def save(self, tensor: Tensor) -> Any:
        """The tensor itself when it stays, else a ``SavedOnHost``."""
        if keeps(tensor) or (tensor.device.type == "cpu" and not self.copies_always):
            return tensor
        value = tensor.detach()
        host = _host_memory(value)
        saved = SavedOnHost(host, value.device)
        stream = self._stream(value.device)
        if stream is None:
            host.copy_(value)
        else:
            module = torch.get_device_module(value.device)
            stream.wait_stream(module.current_stream(value.device))
            with module.stream(stream):
                host.copy_(value, non_blocking=True)
                saved.copied = stream.record_event()
            value.record_stream(stream)  # its memory must not be given away before the copy is done
        self._order.append(saved)
        return saved

    def load(self, saved: Any) -> Tensor:
        """The input on its device again; begins to fetch the one saved before it."""
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
        assert tensor is not None
        if saved.arrived is not None:
            stream = torch.get_device_module(saved.device).current_stream(saved.device)
            stream.wait_event(saved.arrived)
            tensor.record_stream(stream)
        return tensor

    def forget(self) -> None:
        """Drops what no backward has asked for, such as after an evaluation with gradients on."""
        self._order.clear()

    def _fetch(self, saved: SavedOnHost) -> None:
        if saved.fetched is not None:
            return
        stream = self._stream(saved.device)
        if stream is None:
            saved.fetched = saved.host.to(saved.device, copy=True)
            return
        with torch.get_device_module(saved.device).stream(stream):
            stream.wait_event(saved.copied)
            saved.fetched = saved.host.to(saved.device, non_blocking=True)
            saved.arrived = stream.record_event()

    def _stream(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return None
        if device not in self._streams:
            self._streams[device] = torch.get_device_module(device).Stream(device)
        return self._streams[device]


def _host_memory(value: Tensor) -> Tensor:
    """Pinned memory of the tensor's shape and type; pageable, with a warning, where none is to be had."""
    if value.device.type == "cpu":
        return torch.empty(value.shape, dtype=value.dtype)
    try:
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    except RuntimeError as error:
        warn_once(f"activation_checkpointing.cpu_checkpointing: no pinned host memory ({error}); pageable memory is used, copies wait")
        return torch.empty(value.shape, dtype=value.dtype)
