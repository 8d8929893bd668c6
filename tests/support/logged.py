"""Collect the messages that hf_zero logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from hf_zero.observe import logger


@contextmanager
def messages_of_log() -> Iterator[list[str]]:
    """Collect the messages that hf_zero logs inside the context."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
