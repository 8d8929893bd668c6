"""Handle signals that ask this process to end soon: record them on arrival, and act on them where the work can stop.

[Note: signals] The handler only records the number of the signal; the training loop calls ``heard`` at a point where all ranks can stop. A
scheduler and a launcher often signal a process twice within a moment (Slurm signals each process of a step, torchrun passes on the signal
it received), so signals within ``REPEATED_SECONDS`` of the first count as the same. A later one ends the process at once, as it would
without this handler. Python runs handlers in the main thread between two instructions: a call that waits inside a library (a collective, a
device) returns first.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_zero.errors import PREEMPTED_STATUS
from hf_zero.observe import global_rank, logger

REPEATED_SECONDS = 1.0


@dataclass
class _Registration:
    """A signal for which this process listens.

    Attributes:
        former: The former handler.
        process: Number of the process that listens; a forked child does not.
        listeners: Number of listeners.
    """

    former: Any
    process: int
    listeners: int = 0


@dataclass
class _Noted:
    """Record of the signals that this process has received.

    Attributes:
        number: Number of the first signal; 0 for none.
        seconds: Monotonic time at which its handler ran.
        answered: A listener acts on it.
        ending: Everything is saved, and the process is about to end.
        further: Number of later signals.
    """

    number: int = 0
    seconds: float = 0.0
    answered: bool = False
    ending: bool = False
    further: int = 0


_registrations: dict[int, _Registration] = {}
_noted = _Noted()
_newest: list[Callable[[], str]] = []  # functions that name the newest complete checkpoint
_watches_forks = False
_warned_of_thread = False


def heard() -> int:
    """Return the number of the signal that this process has received; 0 if there was none."""
    return _noted.number


def answer() -> None:
    """Record that the received signal is acted on, so that it is not delivered again after the last listener has stopped."""
    _noted.answered = True


def end() -> None:
    """Record that everything is saved and the process ends; a signal of a launcher that ends its ranks is then ignored."""
    _noted.answered = _noted.ending = True


def name_newest(say: Callable[[], str]) -> None:
    """Register ``say``, which returns a sentence on the newest complete checkpoint, for the message of a second signal."""
    _newest[:] = [say]


def newest() -> str:
    """Return a sentence about the newest complete checkpoint that this process knows."""
    try:
        return _newest[0]() if _newest else "this process has neither saved nor loaded a checkpoint"
    except OSError as error:
        return f"the newest complete checkpoint cannot be determined: {error}"


def listen(number: int) -> Callable[[bool], None] | None:
    """Record signal ``number`` from now on; the former handler is still called.

    Returns:
        A function that stops the recording, and restores the former handler after the last listener. Its argument: deliver a received
        signal again if nobody acted on it. None if no handler can be installed, because this is not the main thread.
    """
    global _watches_forks, _warned_of_thread
    if threading.current_thread() is not threading.main_thread():
        if not _warned_of_thread:
            _warned_of_thread = True
            logger.warning(
                "rank %d does not catch %s: Python installs signal handlers in the main thread only, and this is %r. The rank "
                "still learns of a signal that another rank catches",
                global_rank(), signal.Signals(number).name, threading.current_thread().name,
            )  # fmt: skip
        return None
    if not _watches_forks:
        os.register_at_fork(after_in_child=_forget)
        _watches_forks = True
    if number not in _registrations:
        _registrations[number] = _Registration(signal.getsignal(number), os.getpid())
        signal.signal(number, _record)
    registration = _registrations[number]
    registration.listeners += 1
    stopped = False

    def stop(deliver: bool = True) -> None:
        nonlocal stopped
        if stopped or registration.process != os.getpid():
            return
        stopped = True
        registration.listeners -= 1
        if registration.listeners == 0:
            _put_back(number, registration)
            if _noted.number == number:
                _leave(number, deliver)

    return stop


def _put_back(number: int, registration: _Registration) -> None:
    """Restore the former handler, unless another one has been installed since, which still calls hf_zero's."""
    if signal.getsignal(number) is _record and threading.current_thread() is threading.main_thread():
        # None: the former handler was not installed from Python, which cannot restore it.
        signal.signal(number, signal.SIG_DFL if registration.former is None else registration.former)
        del _registrations[number]


def _leave(number: int, deliver: bool) -> None:
    """Discard the received signal, or deliver it again, because no listener is left."""
    deliver = deliver and not _noted.answered
    if not _noted.ending:
        _noted.number, _noted.answered = 0, False
    if deliver:
        os.kill(os.getpid(), number)


def _record(number: int, frame: Any) -> None:
    """Handle an arriving signal."""
    registration = _registrations.get(number)
    if registration is None or not registration.listeners or registration.process != os.getpid():
        _pass_on(number, frame, registration.former if registration is not None else None)
        return
    now = time.monotonic()
    if _noted.ending:
        _noted.further += 1
        if _noted.further > 1:
            os._exit(PREEMPTED_STATUS)
    elif not _noted.number:
        _noted.number, _noted.seconds = number, now
        if callable(registration.former):
            registration.former(number, frame)
    elif now - _noted.seconds > REPEATED_SECONDS:
        _end_at_once(number)


def _pass_on(number: int, frame: Any, former: Any) -> None:
    """Run the former handler, or the default action of the signal."""
    if callable(former):
        former(number, frame)
    elif former is not signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _end_at_once(number: int) -> None:
    name = signal.Signals(number).name
    text = f"[hf_zero] rank {global_rank()}: {name} for the second time, so this rank ends at once, without a checkpoint: {newest()}\n"
    os.write(2, text.encode(errors="replace"))  # a stream may be in the middle of a write
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _forget() -> None:
    """Reset the state in a forked child, which receives its own signals."""
    for number, registration in _registrations.items():
        if signal.getsignal(number) is _record:
            signal.signal(number, signal.SIG_DFL if registration.former is None else registration.former)
    _registrations.clear()
    _noted.number, _noted.answered, _noted.ending, _noted.further = 0, False, False, 0
