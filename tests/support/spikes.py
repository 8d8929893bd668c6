"""Compare with few earlier norms and losses, and collect the lines of the log, in tests of spikes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from hf_zero.core.step import spikes


@contextmanager
def few_values() -> Iterator[None]:
    """Make four values enough for a comparison."""
    with mock.patch.object(spikes, "LEAST", 4):
        yield


@contextmanager
def messages_of_log() -> Iterator[list[str]]:
    """Collect what hf_zero logs inside the context."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_zero").addHandler(handler)
    yield found
    logging.getLogger("hf_zero").removeHandler(handler)
