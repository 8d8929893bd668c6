"""Bounds on what a reader may use for one input: time of the processor, and memory beyond the highest that the process has had."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 60.0  # a thousand times what any of these inputs takes; time that grows with the square of their length is more
_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, bytes


@contextmanager
def bounded_time() -> Iterator[None]:
    """Fail when what happens inside takes a minute of the processor's time: of this process alone, whatever else the machine does."""
    start = time.process_time()
    yield
    taken = time.process_time() - start
    assert taken < SECONDS, f"{taken:.1f} s of the processor"


@contextmanager
def bounded(nbytes: int) -> Iterator[None]:
    """Fail as ``bounded_time``, or when what happens inside takes more memory than 4 times ``nbytes`` and 64 MiB."""
    peak = _peak_bytes()
    with bounded_time():
        yield
    grown = _peak_bytes() - peak
    assert grown <= 4 * nbytes + 64 * 2**20, f"{grown / 2**20:.0f} MiB for {nbytes} bytes"


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
