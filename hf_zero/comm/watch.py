"""Measure when collectives begin and end, on the host's clock or a device's."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import torch


class Watch(ABC):
    """Clock of the device, or host, on which a collective runs."""

    @abstractmethod
    def now(self) -> Any:
        """Return a moment: the host's time, or an event recorded in the device's queue now."""

    @abstractmethod
    def end_of(self, works: list[Any]) -> Any:
        """Return the moment at which ``works`` end; None if it is known only after a wait for them."""

    @abstractmethod
    def reached(self, moment: Any) -> bool:
        """Return whether ``moment`` has passed, without waiting for it."""

    @abstractmethod
    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two moments that have been reached."""


class HostWatch(Watch):
    """The process's own clock; works of a host back end do not report their end, so the end of the wait counts as theirs."""

    def now(self) -> float:
        return time.perf_counter()

    def end_of(self, works: list[Any]) -> None:
        return None

    def reached(self, moment: float) -> bool:
        return True

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class DeviceWatch(Watch):
    """Events of the device: nothing waits for them until the table is printed.

    Args:
        device: Accelerator whose streams the collectives run on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._side = self._module.Stream(device)

    def now(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))  # the current device may be another
        return event

    def end_of(self, works: list[Any]) -> Any:
        # A separate stream waits only for the collective; the compute stream continues.
        with self._module.stream(self._side):
            for work in works:
                if work is not None:
                    work.wait()
            return self.now()

    def reached(self, moment: Any) -> bool:
        return bool(moment.query())

    def seconds(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000
