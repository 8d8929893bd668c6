"""Compare with few earlier norms and losses in tests of spikes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from hf_zero.core.step import spikes


@contextmanager
def few_values() -> Iterator[None]:
    """Make four values enough for a comparison."""
    with mock.patch.object(spikes, "LEAST", 4):
        yield
