"""Provide DeepSpeed's timers for scripts: named stopwatches, samples per second, and ranges for profilers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from hf_zero import observe
from hf_zero.comm.process_groups import default_device
from hf_zero.core.step.progress import memory_line
from hf_zero.errors import ConfigError, StateError

Function = TypeVar("Function", bound=Callable[..., Any])


class Stopwatch:
    """A stopwatch that sums the milliseconds between ``start`` and ``stop``; both wait for the device.

    Args:
        name: Name in messages.
    """

    def __init__(self, name: str) -> None:
        self.name_ = name
        self._since: float | None = None
        self._laps: list[float] = []  # milliseconds

    @property
    def started_(self) -> bool:
        """Return whether the stopwatch runs."""
        return self._since is not None

    def start(self) -> None:
        """Start the stopwatch.

        Raises:
            StateError: The stopwatch runs already.
        """
        if self._since is not None:
            raise StateError(f"timer {self.name_!r} has already been started; call stop() first")
        self._since = _now()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Stop the stopwatch; ``reset`` drops earlier laps. ``record`` has no effect.

        Raises:
            StateError: The stopwatch does not run.
        """
        if self._since is None:
            raise StateError(f"timer {self.name_!r} was not started")
        if reset:
            self._laps.clear()
        self._laps.append(1000 * (_now() - self._since))
        self._since = None

    def reset(self) -> None:
        """Stop the stopwatch and drop all laps."""
        self._since = None
        self._laps.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Return the milliseconds of all laps, the running one included; ``reset`` drops the laps afterwards."""
        running = self.started_
        if running:
            self.stop()
        total = sum(self._laps)
        if reset:
            self.reset()
        if running:
            self.start()
        return total

    def mean(self) -> float:
        """Return the mean duration of a lap in milliseconds, without the slowest and fastest tenth of the laps."""
        return trim_mean(self._laps, 0.1)


class SynchronizedWallClockTimer:
    """A collection of stopwatches by name: ``timers("forward").start()``; ``engine.timers`` is one."""

    Timer = Stopwatch

    def __init__(self) -> None:
        self.timers: dict[str, Stopwatch] = {}

    def __call__(self, name: str) -> Stopwatch:
        return self.timers.setdefault(name, Stopwatch(name))

    def get_timers(self) -> dict[str, Stopwatch]:
        """Return all stopwatches by name."""
        return self.timers

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print the milliseconds of the existing timers among ``names``, divided by ``normalizer``, on ``ranks`` (default: rank 0)."""
        times = {name: self.timers[name].elapsed(reset) / normalizer for name in names if name in self.timers}
        text = "time (ms)" + "".join(f" | {name}: {value:.2f}" for name, value in times.items())
        if memory_breakdown:
            text += f" | {self.memory_usage()}"
        if observe.global_rank() in (ranks or [0]):
            print(f"[Rank {observe.global_rank()}] {text}", flush=True)

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the mean milliseconds of a lap, divided by ``normalizer``, for the existing timers among ``names``."""
        return {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}

    @staticmethod
    def memory_usage() -> str:
        """Return the allocated and the peak memory of the device as text."""
        return memory_line(default_device())


class _Idle:
    """A stopwatch that measures nothing."""

    def start(self) -> None:
        """Do nothing."""

    def stop(self, **kwargs: Any) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""

    def elapsed(self, **kwargs: Any) -> float:
        """Return zero."""
        return 0.0

    def mean(self) -> float:
        """Return zero."""
        return 0.0


class NoopTimer:
    """A timer with the methods of ``SynchronizedWallClockTimer`` that measures nothing."""

    Timer = _Idle

    def __init__(self) -> None:
        self.timer = _Idle()

    def __call__(self, name: str) -> _Idle:
        return self.timer

    def get_timers(self) -> dict[str, Stopwatch]:
        """Return an empty dict: no timers are kept."""
        return {}

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is nothing to print."""

    def get_mean(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Return an empty dict: there is nothing to average."""
        return {}


class ThroughputTimer:
    """A meter of samples per second over steps, without the first steps.

    Args:
        config: Object with ``enabled`` and ``synchronized`` (wait for the device), such as the section ``timers.throughput``.
        batch_size: Number of samples per step.
        start_step: Number of first steps that are not counted.
        steps_per_output: Steps between two log lines; None logs nothing.
        monitor_memory: Whether the log line includes the device's memory.
        logging_fn: Function that receives the line; default is the package's logger.

    Raises:
        ConfigError: ``steps_per_output`` is not a whole number above 0.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        if steps_per_output is not None and not isinstance(steps_per_output, int):
            raise ConfigError(f"steps_per_output must be a positive integer or None, not {steps_per_output!r}")
        if steps_per_output is not None and steps_per_output <= 0:
            raise ConfigError(f"steps_per_output must be greater than 0, not {steps_per_output}")
        self.config = config
        self.batch_size = batch_size or 1
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.monitor_memory = monitor_memory
        self.logging = logging_fn or observe.logger.info
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0  # seconds
        self.start_time = self.end_time = 0.0  # begin and end of the last counted micro-step, in seconds of a monotonic clock
        self.initialized = self.started = False

    def update_epoch_count(self) -> None:
        """Count a new epoch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Record the beginning of a micro-step."""
        if not self.config.enabled:
            return
        self.initialized = self.started = True
        if self.global_step_count >= self.start_step:
            self.start_time = _now(self.config.synchronized)

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Record the end of a micro-step; with ``global_step`` also the end of an optimizer step."""
        if not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        if self.start_time:
            self.end_time = _now(self.config.synchronized)
            self.total_elapsed_time += self.end_time - self.start_time
            self.step_elapsed_time += self.end_time - self.start_time
        if not global_step:
            return
        self.global_step_count += 1
        if report_speed and self._is_report_boundary():
            self._report()
        self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Return the samples per second of the counted steps; minus infinity before the first counted step."""
        counted = self.global_step_count - self.start_step
        return self.batch_size * counted / self.total_elapsed_time if counted > 0 and self.total_elapsed_time else float("-inf")

    def _is_report_boundary(self) -> bool:
        return self.steps_per_output is not None and self.global_step_count % self.steps_per_output == 0

    def _report(self) -> None:
        now = self.batch_size / self.step_elapsed_time if self.step_elapsed_time else float("-inf")
        text = (
            f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
            f"RunningAvgSamplesPerSec={self.avg_samples_per_sec():.2f}, CurrSamplesPerSec={now:.2f}"
        )
        self.logging(f"{text}, {SynchronizedWallClockTimer.memory_usage()}" if self.monitor_memory else text)


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Return the mean of ``data`` without its smallest and largest ``trim_percent`` (a share from 0 to 1 of each); 0 for no data."""
    cut = int(len(data) * trim_percent)
    kept = sorted(data)[cut : len(data) - cut]
    return sum(kept) / len(kept) if kept else 0.0


def instrument_w_nvtx(function: Function) -> Function:
    """Decorate ``function`` so that its calls appear in profiles as a range with its name."""

    @functools.wraps(function)
    def instrumented(*args: Any, **kwargs: Any) -> Any:
        with observe.span(function.__qualname__):
            return function(*args, **kwargs)

    return instrumented  # type: ignore[return-value]


def _now(synchronized: bool = True) -> float:
    """Return the time in seconds, after the device has finished all its work."""
    if synchronized and default_device().type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()
