"""What every reader owes for any input: an answer or the named error, soon, and within the memory of the file.

``guarded`` carries out one attempt under limits: a minute of processor time (neither a busy nor a slow machine fails a test), and address
space for four times the file and 64 MiB more, so that room that is asked for and never touched counts too.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_zero.errors import HfZeroError

SECONDS = 60.0
SPARE_BYTES = 64 << 20
FAST, SLOW = 64, 3000  # inputs per reader
_STATM = Path("/proc/self/statm")


class TooSlow(BaseException):
    """Passes every ``except Exception``."""


def fuzzed(check: Callable[..., None]) -> tuple[Any, Any]:
    """The fast and the slow test of one reader: ``check(random, fixtures...)`` for many ``random.Random``."""
    return given_many(check, FAST, SLOW, random=st.randoms(use_true_random=False))


def given_many(check: Callable[..., None], fast: int, slow: int, **cases: st.SearchStrategy[Any]) -> tuple[Any, Any]:
    """The fast and the slow test of ``check``, which take that many examples of ``cases``."""
    made = []
    for count in (fast, slow):
        limits = settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
        made.append(limits(given(**cases)(check)))
    return made[0], pytest.mark.slow(pytest.mark.timeout(3600)(made[1]))


def guarded(work: Callable[[], Any], nbytes: int, error: type[HfZeroError] | type[ValueError], names: str = "") -> Any:
    """What ``work`` returns, or the message of its ``error`` as a ``Refused``.

    Args:
        work: Reads something.
        nbytes: Size of the files it reads.
        error: The named error. Anything else fails the test.
        names: What the message must contain.
    """
    space = resource.getrlimit(resource.RLIMIT_AS)
    former = signal.signal(signal.SIGVTALRM, _too_slow)
    if _STATM.exists():
        used = int(_STATM.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 4 * nbytes + SPARE_BYTES, space[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        return work()
    except error as found:
        told = found
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, space)
        signal.signal(signal.SIGVTALRM, former)
    _check_message(told, names)
    return Refused(str(told))


class Refused(str):
    """The message of a named error."""


def _too_slow(number: int, frame: FrameType | None) -> None:
    raise TooSlow(f"more than {SECONDS} s of processor time")


def _check_message(told: BaseException, names: str) -> None:
    assert names in str(told), f"{names} is not in: {told}"
    assert len(str(told)) < 4000, f"a message of {len(str(told))} characters: {str(told)[:300]}"
    cause: BaseException | None = told
    while cause is not None:
        lacking = isinstance(cause, MemoryError) or "allocate memory" in str(cause) or "Cannot allocate" in str(cause)
        assert not lacking, f"memory was asked for beyond 4 times the file and 64 MiB: {cause!r}"
        cause = cause.__cause__ or cause.__context__
