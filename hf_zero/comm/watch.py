"""The time at which collectives begin and end, on the host's clock or a device's."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import torch


class Watch(ABC):
    """Tells the time where a collective runs."""

    @abstractmethod
    def now(self) -> Any:
        """Return this moment."""

    @abstractmethod
    def end_of(self, works: list[Any]) -> Any:
        """Return the moment at which ``works`` will be over; None where that is known only by waiting for them."""

    @abstractmethod
    def reached(self, moment: Any) -> bool:
        """Return whether ``moment`` has been reached."""

    @abstractmethod
    def seconds(self, begin: Any, end: Any) -> float:
        """Between two moments that have been reached."""


class HostWatch(Watch):
    """The process' own clock; a work of a host back end cannot tell when it ended, so its end is when the wait for it is over."""

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
        # A stream of its own waits for the collective and for nothing else; the compute stream goes on.
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
