"""Times of the phases that ``wall_clock_breakdown`` prints, and samples per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from hf_zero import observe
from hf_zero.memory.budget import gib
from hf_zero.observe import log_rank0


class Clock:
    """Sums seconds per phase between two progress lines.

    Attributes:
        breakdown: Print the phases of each step; phases are then timed to their end on the device.
        memory: Print memory beside them.
        watchers: Entered around each phase, with its name; for those who measure a run.
    """

    def __init__(self, device: torch.device, breakdown: bool, memory: bool) -> None:
        self.breakdown = breakdown
        self.memory = memory
        self.watchers: list[Callable[[str], AbstractContextManager[Any]]] = []
        self._device = device
        self._seconds: dict[str, float] = {}
        self._line_started = time.perf_counter()
        self._line_samples = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times one phase; free unless ``breakdown`` or watched."""
        with ExitStack() as watched:
            for watcher in self.watchers:
                watched.enter_context(watcher(name))
            watched.enter_context(observe.phase(name))
            if not self.breakdown:
                yield
                return
            start = self.now()
            try:
                yield
            finally:
                self._seconds[name] = self._seconds.get(name, 0.0) + self.now() - start

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What happens inside belongs to no step: a save, a load."""
        with ExitStack() as watched:
            for watcher in self.watchers:
                watched.enter_context(watcher("aside"))
            yield

    def now(self) -> float:
        """Seconds, after all that was asked of the device is done."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def end_step(self, step: int, samples: int, offloaded: Mapping[str, int]) -> None:
        """Prints and forgets the phases of optimizer step ``step``.

        Args:
            step: Its number.
            samples: Samples of all ranks that it saw.
            offloaded: Bytes of this rank's offloaded state by where it rests.
        """
        self._line_samples += samples
        if self.breakdown:
            parts = " | ".join(f"{name}: {1000 * seconds:.2f} ms" for name, seconds in self._seconds.items())
            log_rank0("step %d time | %s", step, parts)
            self._seconds = {}
        if self.memory:
            tiers = "".join(f", optimizer states on {tier} {gib(nbytes)}" for tier, nbytes in offloaded.items())
            log_rank0("step %d memory | %s%s", step, memory_line(self._device), tiers)

    def samples_per_second(self) -> float:
        """Global samples per second since the last call."""
        now = time.perf_counter()
        rate = self._line_samples / max(now - self._line_started, 1e-9)
        self._line_started, self._line_samples = now, 0
        return rate


def memory_line(device: torch.device) -> str:
    """Return the allocated and peak memory of ``device``; for the CPU the process' peak resident size."""
    if device.type == "cpu":
        import resource

        return f"peak resident {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"
    module = torch.get_device_module(device)
    used, peak = module.memory_allocated(device), module.max_memory_allocated(device)
    return f"allocated {used / 2**30:.2f} GiB, peak {peak / 2**30:.2f} GiB"
