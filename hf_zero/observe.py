"""Logging and spans: one label per phase, shared by the profiler, the ring of recent events and the tests."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

logger = logging.getLogger("hf_zero")
if not logger.handlers and not logging.getLogger().handlers:
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [hf_zero] %(message)s"))
    logger.addHandler(_handler)
    logger.propagate = False
logger.setLevel(os.environ.get("HF_ZERO_LOG_LEVEL", "INFO").upper())

_RING_SIZE = 64
_NOTHING = nullcontext()
_warned: set[str] = set()


_ring: deque[tuple[float, str]] = deque(maxlen=_RING_SIZE)  # when a phase was entered (seconds, monotonic) and its label
_phases: list[str] = []  # forward, backward or step of the engines that are in one, innermost last
_listeners: list[Callable[[str], None]] = []


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


@contextmanager
def record_labels() -> Iterator[list[str]]:
    """Collects the labels noted inside the ``with``; what trace tests compare."""
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
    try:
        yield
    finally:
        _phases.pop()


def current_phase() -> str:
    """What the innermost engine is doing; empty outside of all."""
    return _phases[-1] if _phases else ""


def recent_events(count: int = 8) -> str:
    """The last ``count`` labels with their age in seconds, newest last; part of every collective error."""
    now = time.monotonic()
    return "; ".join(f"{text} {now - seconds:.1f}s ago" for seconds, text in list(_ring)[-count:]) or "none"


def global_rank() -> int:
    """This process' rank: the process group's if there is one, else the launcher's environment, else 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def log_rank0(message: str, *args: object, level: int = logging.INFO) -> None:
    """Logs on rank 0 only; ``args`` are formatted lazily."""
    if logger.isEnabledFor(level) and global_rank() == 0:
        logger.log(level, message, *args)


def warn_once(message: str) -> None:
    """Warns once per process for the same text, on rank 0 only."""
    if message not in _warned:
        _warned.add(message)
        log_rank0(message, level=logging.WARNING)
