"""Where layers above attach to every engine: lists of functions that an engine calls without knowing whose they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_zero.core.engine import Engine

on_build: list[Callable[[Engine], None]] = []  # the engine is complete
on_destroy: list[Callable[[Engine], None]] = []  # it is about to free what it trained with
on_preempted: list[Callable[[Engine], None]] = []  # after a step at which the ranks have agreed that a signal asks them to end
reasons_to_wait: list[Callable[[], str]] = []  # why a checkpoint must be complete before its save returns; "" where it need not
