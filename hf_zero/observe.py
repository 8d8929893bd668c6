"""Log messages, and label the phases of an engine for the profiler, the ring buffer of recent events and the tests."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from hf_zero.errors import ConfigError, printable


class _PrintableFormatter(logging.Formatter):
    """A formatter that escapes control characters, also in tracebacks and logger names, so that no record can control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


logger = logging.getLogger("hf_zero")
_handler: logging.Handler | None = None
if not logger.handlers and not logging.getLogger().handlers:
    _handler = logging.StreamHandler()
    _handler.setFormatter(_PrintableFormatter("[%(asctime)s] [%(levelname)s] [hf_zero] %(message)s"))
    logger.addHandler(_handler)
    logger.propagate = False


def _escape_message(record: logging.LogRecord) -> bool:
    """Escape control characters in a record's message (``errors.printable``), for every handler; return True, as a log filter."""
    text = record.getMessage()
    safe = printable(text)
    if safe != text:
        record.msg, record.args = safe, ()
    return True


logger.addFilter(_escape_message)
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL", "WARN", "FATAL", "NOTSET")
_level = (os.environ.get("HF_ZERO_LOG_LEVEL") or "INFO").upper()
if _level not in _LEVELS:
    raise ConfigError(f"HF_ZERO_LOG_LEVEL is {os.environ['HF_ZERO_LOG_LEVEL']!r}; {', '.join(_LEVELS[:5])} are allowed")
logger.setLevel(_level)
_announcements_off = False  # whether ``announce`` is off, because the engines are not the user's

_RING_SIZE = 64
_NOTHING = nullcontext()
_warned: set[str] = set()


WAIT = "hf_zero::wait "  # prefix of profiler ranges of waits
ISSUED = "hf_zero::issued "
PHASE = "hf_zero::phase "

_ring: deque[tuple[float, str]] = deque(maxlen=_RING_SIZE)  # time of entry (monotonic seconds) and label of recent phases
_phases: list[str] = []  # "forward", "backward" or "step" of running engines, innermost last
_listeners: list[Callable[[str], None]] = []


class WaitMeter(Protocol):
    """Interface of an object that sums the time that this rank waits."""

    def wait(self, kind: str, on_stream: bool) -> AbstractContextManager[Any]:
        """Begin a wait of ``kind`` and return the context that ends it; ``on_stream``: the device's stream may wait instead of the host."""


_long_wait = ""  # report of the wait in which this rank is, or in which it has just failed
_meter: WaitMeter | None = None  # of the training engine; it counts nested waits once


def note(phase: str, unit: str = "") -> str:
    """Record the beginning of a phase in the ring buffer, call the listeners and return its label, e.g. ``hf_zero::gather (layers.3)``."""
    text = f"hf_zero::{phase} ({unit})" if unit else f"hf_zero::{phase}"
    _ring.append((time.monotonic(), text))
    for listener in _listeners:
        listener(text)
    return text


def span(phase: str, unit: str = "") -> AbstractContextManager[Any]:
    """Record the beginning of a phase now, and return a context for it: a profiler range if a profiler runs, otherwise an empty one."""
    text = note(phase, unit)
    return torch.autograd.profiler.record_function(text) if torch.autograd.profiler._is_profiler_enabled else _NOTHING


def waiting(kind: str, label: str, on_stream: bool = False) -> AbstractContextManager[Any]:
    """Return a context in which this rank only waits. It costs nothing unless a profiler runs or a meter is set.

    Args:
        kind: Reason of the wait: "gathers", "reductions", "exchanges", "votes" or "offload".
        label: Label as returned by ``note``; the profiler's range is called ``hf_zero::wait <label>``.
        on_stream: Whether the device's stream may wait instead of the host, which continues.
    """
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.autograd.profiler.record_function(f"{WAIT}{label.removeprefix('hf_zero::')}")
    return _meter.wait(kind, on_stream) if _meter is not None else _NOTHING


def issued(label: str) -> None:
    """Mark in a profile that the collective or copy ``label`` has been issued; it runs until the wait with the same label ends."""
    if torch.autograd.profiler._is_profiler_enabled:
        with torch.autograd.profiler.record_function(f"{ISSUED}{label.removeprefix('hf_zero::')}"):
            pass


def set_meter(meter: WaitMeter | None) -> None:
    """Set the object that sums waits from now on; None stops summing."""
    global _meter
    _meter = meter


@contextmanager
def record_labels() -> Iterator[list[str]]:
    """Return a context that yields a list and appends each label noted inside it; trace tests compare the lists."""
    labels: list[str] = []
    with listening(labels.append):
        yield labels


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Call ``listener`` with each label that is noted inside the ``with`` block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Set the current phase of an engine inside the ``with`` block: "forward", "backward" or "step"."""
    _phases.append(name)
    recorded = torch.autograd.profiler.record_function(f"{PHASE}{name}") if torch.autograd.profiler._is_profiler_enabled else _NOTHING
    try:
        with recorded:
            yield
    finally:
        _phases.pop()


def current_phase() -> str:
    """Return the phase of the innermost running engine; "" if none runs."""
    return _phases[-1] if _phases else ""


def recent_labels() -> list[str]:
    """Return the labels in the ring buffer of recent events, newest last."""
    return [text for _, text in list(_ring)]


def last_event() -> tuple[float, str]:
    """Return time (monotonic seconds) and text of the last label; 0 and "" if there is none."""
    ring = list(_ring)
    return ring[-1] if ring else (0.0, "")


def recent_events(count: int = 8) -> str:
    """Return the last ``count`` labels with their age in seconds, newest last; part of every collective error."""
    now = time.monotonic()
    return "; ".join(f"{text} {now - seconds:.1f}s ago" for seconds, text in list(_ring)[-count:]) or "none"


def set_long_wait(report: str) -> None:
    """Keep the report of this rank's present wait, for the error that ends it; "" when the rank continues."""
    global _long_wait
    _long_wait = report


def long_wait() -> str:
    """Return the report of the present wait, or of a wait that just failed, as a sentence to append to an error; "" if there is none."""
    return f" Before that, {_long_wait}." if _long_wait else ""


def global_rank() -> int:
    """Return this process' rank: the process group's if there is one, else the launcher's environment, else 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def log_rank0(message: str, *args: object, level: int = logging.INFO) -> None:
    """Log ``message`` on rank 0 only; ``args`` are formatted lazily."""
    if logger.isEnabledFor(level) and global_rank() == 0:
        logger.log(level, message, *args)


def announce(message: str) -> None:
    """Log a line on rank 0 whatever level other libraries have set; only HF_ZERO_LOG_LEVEL above INFO suppresses it."""
    if _announcements_off or global_rank() != 0 or logging.getLevelName(_level) > logging.INFO:
        return
    record = logger.makeRecord(logger.name, logging.INFO, __file__, 0, message, (), None)
    if not logger.filter(record):
        return
    for handler in logger.handlers:
        if handler is _handler or record.levelno >= handler.level:
            handler.handle(record)
    if logger.propagate and logger.parent is not None:
        logger.parent.callHandlers(record)


@contextmanager
def messages_suppressed() -> Iterator[list[str]]:
    """Suppress announcements and messages below ERROR inside the ``with`` block, for engines that are made for a measurement or a plan.

    Yields:
        A list that receives the warnings. They do not count as logged: one that is logged once per process can still be logged later.
    """
    global _announcements_off
    before, level, said, found = _announcements_off, logger.level, set(_warned), []

    def collect(record: logging.LogRecord) -> bool:
        if record.levelno == logging.WARNING:
            found.append(record.getMessage())
        return record.levelno >= logging.ERROR

    _announcements_off = True
    _warned.clear()
    logger.setLevel("WARNING")
    logger.addFilter(collect)
    try:
        yield found
    finally:
        logger.removeFilter(collect)
        _announcements_off = before
        logger.setLevel(level)
        _warned.clear()
        _warned.update(said)


def warn_once(message: str) -> None:
    """Log a warning on rank 0, once per process for the same text."""
    if message not in _warned:
        _warned.add(message)
        log_rank0(message, level=logging.WARNING)
