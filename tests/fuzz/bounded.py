"""Bounds on what a reader may use for one input: time of the processor, and memory beyond the highest that the process has had."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 2.0
_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, bytes


@contextmanager
def bounded(nbytes: int) -> Iterator[None]:
    """Fails when what happens inside takes 2 s of the processor, or more memory than 4 times ``nbytes`` and 64 MiB."""
    start, peak = time.process_time(), _peak_bytes()
    yield
    taken, grown = time.process_time() - start, _peak_bytes() - peak
    assert taken < SECONDS, f"{taken:.1f} s for {nbytes} bytes"
    assert grown <= 4 * nbytes + 64 * 2**20, f"{grown / 2**20:.0f} MiB for {nbytes} bytes"


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
