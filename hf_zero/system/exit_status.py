"""Set the exit status of a process that ends before it has learned that its background work has failed.

[Note: a status after the end] When the interpreter ends it has already decided on its exit status, and ignores exceptions of exit
handlers. ``os._exit`` there would skip later handlers, and files that are flushed when their objects are freed. But Python promises that
the status is 120 when the last flush of the standard streams fails. So this module makes that flush fail, and no handler is skipped. A
process that ends with an exception keeps its status. Children that multiprocessing forked never reach this point: they end with
``os._exit``.

[Note: status of a child] From Python 3.13 on, multiprocessing has handled the exception of a child before the child's exit handlers run.
Nothing tells them its status but the line for multiprocessing's log, so this module reads that line.
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
_status_of_child = 0  # of this process, as multiprocessing logs it before the exit handlers run
_listening_in = 0  # number of the process that has registered the check at its end


if sys.version_info >= (3, 13):
    _ENDS = "process exiting with exitcode "
    _log = multiprocessing.util.info

    def _read_and_log(message: str, *args: Any) -> None:
        global _status_of_child
        if message.startswith(_ENDS):
            _status_of_child = int(message.removeprefix(_ENDS))
        _log(message, *args)

    multiprocessing.util.info = _read_and_log


def promise(lost: Lost) -> Callable[[], None]:
    """Check at the end of this process whether background work has failed, and set its exit status.

    Args:
        lost: Function that returns a description of the loss, or an empty text. Its argument is true while threads may still run, so that
            it can wait for them.

    Returns:
        A function that cancels the check once the caller itself knows the outcome; a second call does nothing.
    """
    global _listening_in
    if _listening_in != os.getpid():
        _promises.clear()  # entries of the parent process from which this one was forked
        _listening_in = os.getpid()
        # Late among multiprocessing's functions at the end of a process; these run in child processes, too, which skip atexit handlers.
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
    if not texts or ends_with_an_exception():
        return
    if child and "--multiprocessing-fork" not in sys.orig_argv:  # a forked child; this flag is set in spawned ones
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(STATUS)
    sys.stderr = _LastFlushFails(sys.stderr)  # type: ignore[assignment]


def ends_with_an_exception() -> bool:
    """Return whether an exception ends this process; called at its end. ``sys.exit`` in the main process leaves no sign of its status."""
    if _status_of_child:
        return True
    raised = sys.exc_info()[1]  # before Python 3.13, set if the function of a child raised
    if isinstance(raised, SystemExit):
        return bool(raised.code)
    return raised is not None or hasattr(sys, "last_value")  # Python sets it when it prints the error that ends a process


class _LastFlushFails:
    """Replacement of ``sys.stderr`` while exit handlers run.

    Args:
        stream: The present ``sys.stderr``.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def closed(self) -> bool:
        """Return whether the stream itself is closed: Python does not flush a closed one."""
        return False

    def flush(self) -> None:
        """Flush the stream; raise if the interpreter has run its exit handlers."""
        if self._stream is not None and not self._stream.closed:
            self._stream.flush()
        if sys.is_finalizing():
            raise OSError("something was lost, see above")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
