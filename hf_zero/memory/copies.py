"""Copies between host and device beside the computation: a stream of their own, and marks that say how far it has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LEAVING = 2  # device tensors that a lane keeps alive at once: one on its way, one waiting for it


class Mark:
    """A point in a lane: what was given to the lane before it.

    Args:
        device: The training device.
        event: Of the lane; None where copies are over when they have been issued.
        keep: Device memory that the lane uses before this point, kept alive until somebody has waited for it.
    """

    def __init__(self, device: torch.device, event: Any = None, keep: torch.Tensor | None = None) -> None:
        self._device = device
        self._event = event
        self._keep = keep

    def wait(self) -> None:
        """Blocks this thread until the lane has come here: the host may read or overwrite what was copied."""
        if self._event is not None:
            self._event.synchronize()
        self._keep = None

    def order(self) -> None:
        """Lets the device's current stream go on only when the lane has come here."""
        if self._event is not None:
            torch.get_device_module(self._device).current_stream(self._device).wait_event(self._event)
        self._keep = None

    @property
    def waited_for(self) -> bool:
        """Return whether nothing is kept alive any more."""
        return self._keep is None


class CopyLane:
    """One direction of copies of one engine. Where training runs in host memory, copies are plain copies and every mark is reached.

    [Note: device memory in a lane] Memory that a lane copies belongs to the stream it was allocated on, the one that computes. torch's
    ``record_stream`` would keep it from being given away too early, but hands it out again only when the host has seen the lane pass: a
    host that runs ahead of its device gets block after block of fresh memory. Here the computing stream waits for the lane before
    the memory is let go, and everything is reused in the order of that stream: a gather waits in ``ShardStorage.arrive``, what
    a lane fills or empties besides is kept by its ``Mark``. A lane keeps two; for a third the computing stream waits until the
    first has been copied, so a slow bus holds it up and never fills the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device) if device.type != "cpu" else None
        self._stream: Any = self._module.Stream(device) if self._module is not None else None
        self._leaving: deque[Mark] = deque()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What is given to the device inside goes to the lane, behind all that the current stream was given before."""
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
        """Copies ``source`` to ``target``, of the same number of elements; host memory must not be touched before the mark.

        Device memory must live until the current stream is ordered behind it.
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
