"""Let packages above attach to every engine: lists of functions that an engine calls without knowing who added them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_zero.core.engine import Engine

on_build: list[Callable[[Engine], None]] = []  # called when the engine is complete
on_destroy: list[Callable[[Engine], None]] = []  # called before the engine frees its gradients, masters and optimizer
on_preempted: list[Callable[[Engine], None]] = []  # called after a step at which the ranks have agreed that a signal asks them to end
reasons_to_wait: list[Callable[[], str]] = []  # each returns why a checkpoint must be complete before its save returns; "" if it need not
