"""Signals that ranks of a test send to themselves, and the resulting end of a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hf_zero.errors import PREEMPTED_STATUS, Preempted
from hf_zero.system import signals
from tests.support import ranks


def send(*to: int, number: int = signal.SIGTERM) -> None:
    """Send the signal to this process if it is one of the ranks ``to``."""
    if ranks.rank() in to:
        os.kill(os.getpid(), number)


def preempted(run: Callable[[], object]) -> bool:
    """Return whether ``run`` ends like a preempted run."""
    try:
        run()
    except Preempted as end:
        assert end.code == PREEMPTED_STATUS == 75
        return True
    return False


@contextmanager
def new_process() -> Iterator[None]:
    """Reset the received signals of this process after the ``with``, in which a run may have ended."""
    try:
        yield
    finally:
        assert not signals._registrations, "a signal still has listeners"
        signals._noted.__init__()  # type: ignore[misc]
        signals._newest.clear()
