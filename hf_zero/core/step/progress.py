"""Count steps, time the phases of a step, and print the progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_zero import observe
from hf_zero.core.optimizer.segments import learning_rates
from hf_zero.metrics import Sink
from hf_zero.observe import log_rank0
from hf_zero.system.sizes import gib, size_text


@dataclass
class Progress:
    """Counters of one engine.

    Attributes:
        global_steps: Number of optimizer steps, including skipped ones.
        skipped_steps: Number of steps that were skipped for a gradient that is not finite.
        global_samples: Number of samples of all ranks, counted at the boundaries.
        last_step_applied: Whether the last call of ``step`` updated the weights; False off the boundary and on overflow.
        last_norm: Gradient norm of the last boundary, before clipping, inf if it was skipped; 0-dim tensor, or None before the first.
        last_loss: Loss of the last step on this rank, [Note: the loss of a step]; 0-dim, on the device; None if it is unknown.
        loads: Number of times that the weights were replaced by loaded ones.
        saved_at: ``global_steps`` at the last complete checkpoint that this engine has saved; -1 before the first.
    """

    global_steps: int = 0
    skipped_steps: int = 0
    global_samples: int = 0
    last_step_applied: bool = False
    last_norm: torch.Tensor | None = None
    last_loss: torch.Tensor | None = None
    loads: int = 0
    saved_at: int = -1

    def count_step(self, samples: int, norm: torch.Tensor, skipped: bool) -> None:
        """Count one optimizer step over ``samples`` samples of all ranks."""
        self.global_steps += 1
        self.global_samples += samples
        self.skipped_steps += skipped
        self.last_step_applied = not skipped
        self.last_norm = norm

    def restore(self, counters: Mapping[str, int]) -> None:
        """Set the counters to those of a checkpoint."""
        self.global_steps = counters.get("global_steps", 0)
        self.skipped_steps = counters.get("skipped_steps", 0)
        self.global_samples = counters.get("global_samples", 0)


@dataclass
class Reports:
    """Reporter of optimizer steps: prints a line to the log every few steps, and writes a record to each monitor after every step.

    Attributes:
        clock: Times the phases of a step.
        every: Number of optimizer steps between two lines; 0 or None prints none.
        sinks: Monitors, on rank 0.
        measures: Functions called on every rank with the number of the step; their results are recorded too. They may be collective.
        scaled: Whether records have the loss scale (fp16).
        measured: Last results of ``measures`` that no caller has taken yet, for other loggers.
    """

    clock: Clock
    every: int | None = None
    sinks: list[Sink] = field(default_factory=list)
    measures: Sequence[Callable[[int], Mapping[str, float]]] = ()
    scaled: bool = False
    measured: dict[str, float] = field(default_factory=dict)

    def report(self, progress: Progress, groups: Sequence[dict[str, Any]], loss_scale: float) -> None:
        """Print and record the progress of the run after a step.

        Args:
            progress: The counters, which include the step.
            groups: The optimizer's param groups.
            loss_scale: Loss scale of the next backward.
        """
        measured = {name: value for measure in self.measures for name, value in measure(progress.global_steps).items()}
        self.measured |= measured
        print_line = bool(self.every) and progress.global_steps % self.every == 0  # type: ignore[operator]
        if not (print_line or self.sinks):
            return
        rates = learning_rates(groups)
        # The host waits for the device only here.
        loss = float(progress.last_loss) if progress.last_loss is not None else float("nan")
        norm = float(progress.last_norm) if progress.last_norm is not None else float("nan")
        if print_line:
            log_rank0(
                "step=%d, skipped=%d, lr=%s, loss=%.6g, grad_norm=%.6g, samples/s=%.2f",
                progress.global_steps,
                progress.skipped_steps,
                rates,
                loss,
                norm,
                self.clock.samples_per_second(),
            )
        record = {"Train/Samples/train_loss": loss, "Train/Samples/lr": rates[0] if rates else 0.0, "Train/Samples/grad_norm": norm}
        if self.scaled:
            record["Train/Samples/loss_scale"] = loss_scale
        record |= {f"Train/Samples/elapsed_time_ms_{name}": 1000 * seconds for name, seconds in self.clock.of_step.items()}
        record |= measured
        for sink in self.sinks:
            sink.write(record, progress.global_samples)

    def close(self) -> None:
        """Close the monitors."""
        for sink in self.sinks:
            sink.close()
        self.sinks = []


class Clock:
    """Timer that sums seconds per phase between two progress lines.

    Attributes:
        breakdown: Whether the phases of each step are printed; phases are then timed to their end on the device.
        memory: Whether the memory is printed with each line.
        of_step: Seconds of each phase of the last optimizer step, with ``breakdown``.
        watchers: Functions that return a context to enter around each phase, given its name; for tools that measure a run.
    """

    def __init__(self, device: torch.device, breakdown: bool, memory: bool) -> None:
        self.breakdown = breakdown
        self.memory = memory
        self.watchers: list[Callable[[str], AbstractContextManager[Any]]] = []
        self._device = device
        self.of_step: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._line_started = time.perf_counter()
        self._line_samples = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase; costs nothing unless ``breakdown`` is set or there are watchers."""
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
        """Mark the time inside, of a save or a load, as outside of all steps."""
        with ExitStack() as watched:
            for watcher in self.watchers:
                watched.enter_context(watcher("aside"))
            yield

    def now(self) -> float:
        """Return the time in seconds, after all work of the device is done."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def end_step(self, step: int, samples: int, offloaded: Mapping[str, int]) -> None:
        """Print and reset the phases of optimizer step ``step``.

        Args:
            step: Number of the step.
            samples: Number of samples of the step, on all ranks.
            offloaded: Bytes of this rank's offloaded state by tier.
        """
        self._line_samples += samples
        if self.breakdown:
            parts = " | ".join(f"{name}: {1000 * seconds:.2f} ms" for name, seconds in self._seconds.items())
            log_rank0("step %d time | %s", step, parts)
            self.of_step, self._seconds = self._seconds, {}
        if self.memory:
            tiers = "".join(f", optimizer states on {tier} {gib(nbytes)}" for tier, nbytes in offloaded.items())
            log_rank0("step %d memory | %s%s", step, memory_line(self._device), tiers)

    def samples_per_second(self) -> float:
        """Return the number of samples of all ranks per second since the last call."""
        now = time.perf_counter()
        rate = self._line_samples / max(now - self._line_started, 1e-9)
        self._line_started, self._line_samples = now, 0
        return rate


def memory_line(device: torch.device) -> str:
    """Return a line with allocated and peak memory of ``device``; for the CPU with the process' peak resident size."""
    if device.type == "cpu":
        import resource

        return f"peak resident {size_text(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, unit='GiB')}"
    module = torch.get_device_module(device)
    used, peak = module.memory_allocated(device), module.max_memory_allocated(device)
    return f"allocated {size_text(used, unit='GiB')}, peak {size_text(peak, unit='GiB')}"
