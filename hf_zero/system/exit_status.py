"""The exit status of a process that ends before it has been told that something it had begun has failed.

[Note: a status after the end] When the interpreter ends it has decided on its exit status already, and ignores what exit handlers raise.
``os._exit`` there would skip the handlers that come later, and files that are flushed when their objects go. What Python does promise:
when the last flush of the standard streams fails, the status is 120. So that flush fails, and nothing is skipped. A process that ends
with an exception keeps its status. Children that multiprocessing forked never come that far: ``os._exit`` is their usual end.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from hf_zero.observe import logger

STATUS = 120
Lost = Callable[[bool], str]
_promises: list[Lost] = []
_listening_in = 0  # the process that looks at them when it ends


def promise(lost: Lost) -> Callable[[], None]:
    """Has the end of this process ask what became of something that goes on beside it.

    Args:
        lost: Says what was lost, and nothing when nothing was. Its argument tells whether threads may still be running, to be waited for.

    Returns:
        What takes the promise back, once the caller's own code has heard of the outcome; calling it again does nothing.
    """
    global _listening_in
    if _listening_in != os.getpid():
        _promises.clear()  # of the process that this one was forked from
        _listening_in = os.getpid()
        # Late among what multiprocessing calls at the end, of its children too: those skip what atexit holds.
        multiprocessing.util.Finalize(None, _at_end, exitpriority=-1000)
    _promises.append(lost)

    def withdraw() -> None:
        with suppress(ValueError):
            _promises.remove(lost)

    return withdraw


def _at_end() -> None:
    child = multiprocessing.parent_process() is not None
    texts = [text for lost in _promises if (text := lost(child))]
    for text in texts:
        logger.error("%s", text)
    if not texts or _ends_with_an_exception():
        return
    if child and "--multiprocessing-fork" not in sys.orig_argv:  # forked; this flag is of those that were spawned
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(STATUS)
    sys.stderr = _LastFlushFails(sys.stderr)  # type: ignore[assignment]


def _ends_with_an_exception() -> bool:
    raised = sys.exc_info()[1]  # by the function of a child
    if isinstance(raised, SystemExit):
        return bool(raised.code)
    return raised is not None or hasattr(sys, "last_value")  # Python sets that when it prints what ends a process


class _LastFlushFails:
    """Stands in for ``sys.stderr`` while exit handlers run.

    Args:
        stream: The present one.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def closed(self) -> bool:
        """Return whether the stream itself is: Python does not flush a closed one."""
        return False

    def flush(self) -> None:
        """Flushes; fails when the interpreter is past its exit handlers."""
        if self._stream is not None and not self._stream.closed:
            self._stream.flush()
        if sys.is_finalizing():
            raise OSError("something was lost, see above")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
