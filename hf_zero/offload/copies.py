"""Copies between host and device beside the computation: a stream of their own, and marks that say how far it has come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Mark:
    """A point in a lane: what was given to the lane before it."""

    def __init__(self, device: torch.device, event: Any = None) -> None:
        self._device = device
        self._event = event

    def wait(self) -> None:
        """Blocks this thread until the lane has come here: the host may read or overwrite what was copied."""
        if self._event is not None:
            self._event.synchronize()

    def order(self) -> None:
        """Lets the device's current stream go on only when the lane has come here."""
        if self._event is not None:
            torch.get_device_module(self._device).current_stream(self._device).wait_event(self._event)


class CopyLane:
    """One direction of copies of one engine. Where training runs in host memory, copies are plain copies and every mark is reached."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device) if device.type != "cpu" else None
        self._stream: Any = self._module.Stream(device) if self._module is not None else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What is given to the device inside goes to the lane, behind all that the current stream was given before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Mark:
        """Copies ``source`` to ``target``, of the same number of elements; host memory must not be touched before the mark."""
        with self.entered():
            target.copy_(source, non_blocking=True)
            self.use(target, source)
            return self.mark()

    def use(self, *tensors: torch.Tensor) -> None:
        """Keeps the allocator from handing out the memory of device tensors again before the lane has passed."""
        if self._stream is not None:
            for tensor in tensors:
                if tensor.device.type != "cpu":
                    tensor.record_stream(self._stream)

    def mark(self) -> Mark:
        """The present end of the lane."""
        if self._stream is None:
            return Mark(self._device)
        event = self._module.Event()
        event.record(self._stream)
        return Mark(self._device, event)
