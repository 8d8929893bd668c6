"""Logging and spans: one label per phase, shared by the profiler, the ring of recent events and the tests."""

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
    """Tracebacks and names of loggers included: a terminal obeys nothing of what a record says."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


logger = logging.getLogger("hf_zero")
_handler: logging.Handler | None = None
if not logger.handlers and not logging.getLogger().handlers:
    _handler = logging.StreamHandler()
    _handler.setFormatter(_PrintableFormatter("[%(asctime)s] [%(levelname)s] [hf_zero] %(message)s"))
    logger.addHandler(_handler)
    logger.propagate = False


def _write_out(record: logging.LogRecord) -> bool:
    """Has a record say nothing that a terminal would obey, whoever prints it; ``errors.printable``."""
    text = record.getMessage()
    safe = printable(text)
    if safe != text:
        record.msg, record.args = safe, ()
    return True


logger.addFilter(_write_out)
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL", "WARN", "FATAL", "NOTSET")
_level = (os.environ.get("HF_ZERO_LOG_LEVEL") or "INFO").upper()
if _level not in _LEVELS:
    raise ConfigError(f"HF_ZERO_LOG_LEVEL is {os.environ['HF_ZERO_LOG_LEVEL']!r}; {', '.join(_LEVELS[:5])} are allowed")
logger.setLevel(_level)
_hushed = False  # nobody is to be told of engines: they are not the user's

_RING_SIZE = 64
_NOTHING = nullcontext()
_warned: set[str] = set()


WAIT = "hf_zero::wait "  # how profiler ranges of waits begin
ISSUED = "hf_zero::issued "
PHASE = "hf_zero::phase "

_ring: deque[tuple[float, str]] = deque(maxlen=_RING_SIZE)  # when a phase was entered (seconds, monotonic) and its label
_phases: list[str] = []  # forward, backward or step of the engines that are in one, innermost last
_listeners: list[Callable[[str], None]] = []


class WaitMeter(Protocol):
    """Whoever adds up how long this rank waits."""

    def wait(self, kind: str, on_stream: bool) -> AbstractContextManager[Any]:
        """A wait begins, now, for ``kind``; ``on_stream``: the device's stream may wait in place of the host."""


_meter: WaitMeter | None = None  # of the engine that trains; waits inside a wait are part of it


def note(phase: str, unit: str = "") -> str:
    """Records that a phase begins, in the ring and for listeners; returns its label, for example ``hf_zero::gather (layers.3)``."""
    text = f"hf_zero::{phase} ({unit})" if unit else f"hf_zero::{phase}"
    _ring.append((time.monotonic(), text))
    for listener in _listeners:
        listener(text)
    return text


def span(phase: str, unit: str = "") -> AbstractContextManager[Any]:
    """A phase with a beginning, now, and an end: a profiler range when a profiler runs, an entry in the ring always."""
    text = note(phase, unit)
    return torch.autograd.profiler.record_function(text) if torch.autograd.profiler._is_profiler_enabled else _NOTHING


def waiting(kind: str, label: str, on_stream: bool = False) -> AbstractContextManager[Any]:
    """A stretch, from now on, in which this rank does nothing but wait; free unless a profiler runs or a meter is set.

    Args:
        kind: What for: gathers, reductions, exchanges, votes, offload.
        label: As ``note`` gives it; the profiler's range is called ``hf_zero::wait <label>``.
        on_stream: The device's stream may wait in place of the host, which goes on.
    """
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.autograd.profiler.record_function(f"{WAIT}{label.removeprefix('hf_zero::')}")
    return _meter.wait(kind, on_stream) if _meter is not None else _NOTHING


def issued(label: str) -> None:
    """Marks in a profiler's recording that what ``label`` names is under way from here until it has been waited for."""
    if torch.autograd.profiler._is_profiler_enabled:
        with torch.autograd.profiler.record_function(f"{ISSUED}{label.removeprefix('hf_zero::')}"):
            pass


def set_meter(meter: WaitMeter | None) -> None:
    """Says who adds up waits from now on; None is nobody."""
    global _meter
    _meter = meter


@contextmanager
def record_labels() -> Iterator[list[str]]:
    """Collect the labels noted inside the ``with``; trace tests compare them."""
    labels: list[str] = []
    with told(labels.append):
        yield labels


@contextmanager
def told(listener: Callable[[str], None]) -> Iterator[None]:
    """Calls ``listener`` with each label noted inside the ``with``."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Says what an engine is doing inside the ``with``: forward, backward or step."""
    _phases.append(name)
    recorded = torch.autograd.profiler.record_function(f"{PHASE}{name}") if torch.autograd.profiler._is_profiler_enabled else _NOTHING
    try:
        with recorded:
            yield
    finally:
        _phases.pop()


def current_phase() -> str:
    """What the innermost engine is doing; empty outside of all."""
    return _phases[-1] if _phases else ""


def recent_labels() -> list[str]:
    """Return the labels of the ring, newest last."""
    return [text for _, text in list(_ring)]


def last_event() -> tuple[float, str]:
    """Return the label that was noted last, and when, in seconds of the monotonic clock; 0 and "" where there is none."""
    ring = list(_ring)
    return ring[-1] if ring else (0.0, "")


def recent_events(count: int = 8) -> str:
    """Return the last ``count`` labels with their age in seconds, newest last; part of every collective error."""
    now = time.monotonic()
    return "; ".join(f"{text} {now - seconds:.1f}s ago" for seconds, text in list(_ring)[-count:]) or "none"


def global_rank() -> int:
    """Return this process' rank: the process group's if there is one, else the launcher's environment, else 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def log_rank0(message: str, *args: object, level: int = logging.INFO) -> None:
    """Logs on rank 0 only; ``args`` are formatted lazily."""
    if logger.isEnabledFor(level) and global_rank() == 0:
        logger.log(level, message, *args)


def announce(message: str) -> None:
    """Writes a line on rank 0 whatever the level of the log is, as libraries set it too; HF_ZERO_LOG_LEVEL above INFO leaves it out."""
    if _hushed or global_rank() != 0 or logging.getLevelName(_level) > logging.INFO:
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
def hushed() -> Iterator[None]:
    """Leaves out what engines announce and log below ERROR inside the ``with``: they are made for a measurement."""
    global _hushed
    before, level = _hushed, logger.level
    _hushed = True
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        _hushed = before
        logger.setLevel(level)


def warn_once(message: str) -> None:
    """Warns once per process for the same text, on rank 0 only."""
    if message not in _warned:
        _warned.add(message)
        log_rank0(message, level=logging.WARNING)
