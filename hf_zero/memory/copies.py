"""Copy between host and device on a separate stream, in parallel with the computation, with marks that show the progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LEAVING = 2  # number of device tensors that a lane keeps alive: one that is copied, one that waits


class Mark:
    """A point in a lane: all work that was submitted to the lane before it.

    Args:
        device: The training device.
        event: Event of the lane; None if copies are synchronous.
        keep: Device memory that the lane uses before this point, kept alive until a caller has waited for it.
    """

    def __init__(self, device: torch.device, event: Any = None, keep: torch.Tensor | None = None) -> None:
        self._device = device
        self._event = event
        self._keep = keep

    def wait(self) -> None:
        """Block this thread until the lane has reached the mark: the host may then read or overwrite the copied memory."""
        if self._event is not None:
            self._event.synchronize()
        self._keep = None

    def order(self) -> None:
        """Make the device's current stream wait until the lane has reached the mark."""
        if self._event is not None:
            torch.get_device_module(self._device).current_stream(self._device).wait_event(self._event)
        self._keep = None

    @property
    def waited_for(self) -> bool:
        """Return whether the mark keeps no memory alive any more."""
        return self._keep is None


class CopyLane:
    """One direction of copies of one engine. If training runs in host memory, copies are plain copies and every mark is reached at once.

    [Note: device memory in a lane] Memory that a lane copies belongs to the stream on which it was allocated, the computing stream. torch's
    ``record_stream`` would prevent an early reuse, but it reuses memory only after the host has seen the lane pass: a host that runs ahead
    of its device would allocate more and more fresh memory. Here the computing stream waits for the lane before the memory is freed, so
    memory is reused in the order of this stream: a gather waits in ``ShardStorage.arrive``; a ``Mark`` keeps other memory that the lane
    copies. A lane keeps two tensors alive. For a third one the computing stream waits until the first has been copied, so a slow bus
    delays the computation but never fills the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device) if device.type != "cpu" else None
        self._stream: Any = self._module.Stream(device) if self._module is not None else None
        self._leaving: deque[Mark] = deque()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Submit device work inside the ``with`` to the lane, after all earlier work of the current stream."""
        if self._stream is None:
            yield
            return
        while len(self._leaving) >= _LEAVING:
            oldest = self._leaving.popleft()
            if not oldest.waited_for:
                oldest.order()
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Mark:
        """Copy ``source`` to ``target``, of the same number of elements; callers must not access the host memory before the mark.

        Device memory must stay allocated until the current stream is ordered after the mark.
        """
        with self.entered():
            target.copy_(source, non_blocking=True)
            return self.mark()

    def mark(self, keep: torch.Tensor | None = None) -> Mark:
        """Return the present end of the lane.

        Args:
            keep: Device memory of the current stream that the lane has used since it was entered.
        """
        if self._stream is None:
            return Mark(self._device)
        event = self._module.Event()
        event.record(self._stream)
        mark = Mark(self._device, event, keep)
        if keep is not None:
            self._leaving.append(mark)
        return mark


class Arriving:
    """A value on its way from the device to the host: reading it waits for the work before this point, not for later work.

    Args:
        value: Tensor on the training device or on the host, small.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self._value, self._event = value, None  # type: Any, Any
        if value.device.type != "cpu":
            self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
            module: Any = torch.get_device_module(value.device)
            self._event = module.Event()
            self._event.record(module.current_stream(value.device))

    def read(self) -> Any:
        """Return the value as a Python number, or as nested lists of them."""
        if self._event is not None:
            self._event.synchronize()
        return self._value.tolist()
