"""Report a long wait of a rank: the collective, the ranks it waits for, and where they are; a thread beside the training asks them.

[Note: long waits] If a rank does not reach a collective, the other ranks report nothing until the timeout of its group. One daemon thread
per rank checks every few seconds where the other threads of its process are (``rank_status.py``); the training thread does no more work. If
a thread has waited in one collective for ``hf_zero.hang_report_s``, the daemon asks the other ranks through the store in which the ranks
met. It uses a connection of its own, because a client of a store serves one call at a time. The daemons of the other ranks poll for such
questions equally often, and answer with the status of their ranks. A rank has arrived if it has issued at least as many operations in
the collective's group as the waiting rank; the report names the other ranks. The store keeps only a counter and one line per rank. The
daemon never ends a run: the timeout does that.
"""

from __future__ import annotations

import atexit
import platform
import socket
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hf_zero.comm.process_groups import FAKE, default_store
from hf_zero.comm.rank_status import OF_THE_SCRIPT, RankStatus, groups_of_this_rank, look, moment
from hf_zero.comm.roll_call import numbered
from hf_zero.observe import logger, set_long_wait

KEY = "hf_zero_hang"
ENDED = "ended"
"""Message that a rank leaves in place of its status when it ends, or destroys the default group."""
_OFTEN = 5.0  # longest interval in seconds between two polls in a small world
_RANKS_PER_SECOND = 500  # polls of the store of rank 0 per second, at most
_ANSWERS = 0.2  # seconds between two polls for answers
_AGAIN = 5  # the next report of the same wait comes at this multiple of its time
_STORE_SECONDS = 10.0
_CALLS_IN_SUCCESSION = 3  # calls of the store that the thread may make before it sees that it shall end
_MOST_CONNECTIONS = 400  # largest world in which each rank opens a second connection
_NAMED = 8  # maximum number of ranks in a report with their places

_current: HangWatch | None = None  # the thread of this process


class LongWaits:
    """Request for reports of this rank's long waits, in force while this object lives or until ``stop``; local.

    Args:
        seconds: Duration after which a wait is reported; 0 for never. The shortest duration of all requests holds.
    """

    def __init__(self, seconds: float) -> None:
        global _current
        store = default_store()
        if not seconds or store is None or dist.get_world_size() == 1 or FAKE in str(dist.get_backend_config()):
            return
        if _current is not None and _current.serves(store):
            _current.owners[self] = seconds
            return
        if _current is not None:
            _current.stop()
        own = _own_connection(store, dist.get_world_size())
        if own is not None:
            _current = HangWatch(store, own, dist.get_rank(), dist.get_world_size())
            _current.owners[self] = seconds
            _current.start()

    def stop(self) -> None:
        """End this request. The thread continues until the default group is destroyed: other ranks may ask for this rank's position."""
        if _current is not None:
            _current.owners.pop(self, None)


@atexit.register
def _end() -> None:
    if _current is not None:
        _current.stop(process=True)


def current() -> HangWatch | None:
    """Return this process' thread that reports its position to waiting ranks; None if there is none."""
    return _current if _current is not None and _current.serves(default_store()) else None


def joint_store() -> dist.Store | None:
    """Return the default group's store if a thread of this process answers over it, or did; else None."""
    return _current.store if _current is not None and _current.store is default_store() else None


def group_is_gone() -> bool:
    """Return whether this process had engines, and has destroyed its default group since (accelerate's ``end_training``)."""
    return _current is not None and not dist.is_initialized()


def _own_connection(store: dist.Store, world: int) -> dist.Store | None:
    """Return the same store over a connection for another thread; None if the store allows none or cannot be reached.

    [Note: connections of the store] The process that keeps the store holds a connection per rank, and 1024 open files are a common limit.
    In a large world the thread shares the main thread's connection, which serves one call at a time. A wait inside the creation of a group,
    which itself asks the store, is then not reported.
    """
    if world > _MOST_CONNECTIONS:
        return dist.PrefixStore(KEY, store)
    try:
        own = dist.PrefixStore(KEY, store.clone())  # type: ignore[attr-defined]  # torch's stubs lack it
        own.set_timeout(timedelta(seconds=_STORE_SECONDS))
    except RuntimeError as error:
        logger.debug("long waits will not be reported: the TCP store of the process group cannot be used from a second thread: %s", error)
        return None
    return own


def _require_listener(store: Any) -> None:
    """Raise a RuntimeError if no process listens at a network store; torch's own call would print a trace before it fails."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        try:
            socket.create_connection((store.host, store.port), timeout=_STORE_SECONDS).close()
        except OSError as error:
            raise dist.DistNetworkError(f"{store.host}:{store.port}: {error}") from None


@dataclass
class _Question:
    """A question of a waiting rank, and the ranks that have not answered it.

    Attributes:
        number: Number of the question.
        seconds: Duration of the wait so far.
        status: RankStatus of the rank that asks.
        missing: Ranks that have not answered yet.
        deadline: Time at which the report is made without them.
        answers: States of the ranks that have answered.
    """

    number: int
    seconds: float
    status: RankStatus
    missing: list[int]
    deadline: float
    answers: dict[int, RankStatus] = field(default_factory=dict)


class HangWatch(threading.Thread):
    """Thread that detects long waits of this rank, and reports this rank's position to other waiting ranks.

    Args:
        store: Store in which the default group's ranks met; the thread ends with this group.
        own: The same store over a connection of the thread's own.
        rank: Rank of this process.
        world: Number of ranks.

    Attributes:
        store: See the argument.
        owners: Durations after which waits are reported, by the object that requests the reports.
    """

    def __init__(self, store: dist.Store, own: dist.Store, rank: int, world: int) -> None:
        super().__init__(name="hf_zero long waits", daemon=True)
        self.store = store
        self.owners: weakref.WeakKeyDictionary[LongWaits, float] = weakref.WeakKeyDictionary()
        self._own, self._rank, self._world = own, rank, world
        self._over = threading.Event()
        self._answered = 0  # number of questions of other ranks that this rank has answered
        self._moment: Any = None
        self._since = self._due = 0.0
        self._question: _Question | None = None
        self._last_answer = False

    def serves(self, store: dist.Store | None) -> bool:
        """Return whether this thread is running and uses ``store``."""
        return self.store is store and self.is_alive() and not self._over.is_set()

    def stop(self, process: bool = False) -> None:
        """End the thread; wait for it only for a moment, because the store may not answer, unless the process ends.

        Test suites (Lightning's) stop daemon threads that a test has left by a method of this name.

        [Note: a thread in the store at the end] A call of torch's stores that returns while the interpreter ends asks for Python's lock,
        and Python then unwinds the thread's stack through C++ that allows no unwinding: the process ends with SIGABRT ("terminate called
        without an active exception"), after a training that went well. So the end of the process waits for as long as such calls may take.

        Args:
            process: The process ends, too; the thread leaves that as its answer to later questions.
        """
        self._last_answer = process
        self._over.set()
        if self is not threading.current_thread():
            self.join(_CALLS_IN_SUCCESSION * _STORE_SECONDS if process else 1.0)

    def run(self) -> None:
        """Poll until the default group is destroyed, or the store does not answer."""
        while not self._over.wait(_ANSWERS if self._question is not None else self._pause()):
            if self._is_gone():
                break
            try:
                self._look()
            except (RuntimeError, LookupError, ValueError) as error:  # torch's errors of stores and networks are RuntimeErrors
                if self._is_gone():
                    break
                if self._over.is_set():
                    return
                if not isinstance(error, RuntimeError):
                    raise
                logger.debug("long waits are no longer reported: the TCP store of the process group does not answer: %s", error)
                if self._question is not None or self._seconds_waited() >= self._limit():
                    self._report_without_store()
                return
        if self._last_answer or self._is_gone():  # a rank that has destroyed the group (accelerate's end_training) joins no more calls
            with suppress(RuntimeError):
                _require_listener(self._own)
                self._own.set(f"status/{self._rank}", f"0 {ENDED}")

    def _is_gone(self) -> bool:
        """Return whether the default group has been destroyed, perhaps just now."""
        try:
            return default_store() is not self.store
        except (LookupError, ValueError):
            return True

    def _pause(self) -> float:
        return min(_OFTEN, self._limit() / 4) + self._world / _RANKS_PER_SECOND

    def _limit(self) -> float:
        return min(list(self.owners.values()), default=float("inf"))

    def _seconds_waited(self) -> float:
        return time.monotonic() - self._since if self._moment is not None else 0.0

    def _look(self) -> None:
        now, found = time.monotonic(), moment()
        if found is None or found != self._moment:
            set_long_wait("")
            self._moment, self._since, self._due, self._question = found, now, now + self._limit(), None
        _require_listener(self._own)
        asked = self._own.add("asked", 0)
        if asked > self._answered:
            self._answer(asked, look(device=self._seconds_waited() >= self._limit()))
        if self._question is not None:
            self._collect(self._question)
        elif found is not None and now >= self._due:
            self._due = now + (now - self._since) * (_AGAIN - 1)
            status = look(device=True)
            if status.operation:
                self._ask(status)

    def _answer(self, number: int, status: RankStatus) -> None:
        self._own.set(f"status/{self._rank}", f"{number} {status.as_text()}")
        self._answered = number

    def _ask(self, status: RankStatus) -> None:
        number = self._own.add("asked", 1)
        self._answer(number, status)
        others = [rank for rank in self._members(status.group) if rank != self._rank]
        deadline = time.monotonic() + 2 * self._pause() + 3.0
        self._question = _Question(number, self._seconds_waited(), status, others, deadline)

    def _members(self, name: str) -> list[int]:
        """Return the ranks of the group of this name; all ranks if it is unknown."""
        ranks = dict(dist.distributed_c10d._world.pg_group_ranks)
        found = (list(ranks[group]) for group in groups_of_this_rank() if str(group.group_name) == name and group in ranks)
        return next(found, list(range(self._world)))

    def _collect(self, question: _Question) -> None:
        for rank in list(question.missing):
            if self._over.is_set():
                return
            if self._own.check([key := f"status/{rank}"]):
                number, _, text = bytes(self._own.get(key)).decode().partition(" ")
                if text != ENDED and int(number) >= question.number:
                    question.answers[rank] = RankStatus.from_text(text)
                    question.missing.remove(rank)
        if not question.missing or time.monotonic() > question.deadline:
            self._question = None
            text = report(self._rank, question.seconds, question.status, question.answers, question.missing)
            set_long_wait(text)
            logger.warning("%s", text)

    def _report_without_store(self) -> None:
        status = self._question.status if self._question is not None else look(device=True)
        if status.operation:
            text = _own_part(self._rank, self._seconds_waited(), status)
            logger.warning("%s. The store in which the ranks met does not answer: the process that keeps it has ended or hangs", text)


def report(rank: int, seconds: float, status: RankStatus, answers: dict[int, RankStatus], silent: list[int]) -> str:
    """Return the line that reports the wait of ``rank``.

    Args:
        rank: The rank that waits.
        seconds: Duration of its wait.
        status: Its status, with the collective it waits for.
        answers: States of the other ranks, by rank.
        silent: Ranks that have not answered.
    """
    behind = {other: its for other, its in sorted(answers.items()) if its.behind(status)}
    # In a vote a rank may wait for a rank that itself waits for another one, in the same vote.
    late = {other: its for other, its in behind.items() if its.operation != status.operation} or ({} if silent else behind)
    elsewhere = {other: its for other, its in sorted(answers.items()) if other not in behind and its.operation != status.operation}
    if not (status.group or late or silent or status.operation == OF_THE_SCRIPT):  # the creation of a group is not counted
        late, elsewhere = elsewhere, {}
    parts = [_own_part(rank, seconds, status)]
    if late:
        parts.append(f"Not come: {_places(late)}")
        if all(its.operation and status.behind(its) for its in late.values()):
            parts.append(
                "These ranks wait for each other until the time-out: make the same calls on all ranks, in the same order. Saves of "
                "checkpoints are such calls, and at stage 3 forwards without gradients (an evaluation, generate)"
            )
    if silent:
        more = f" and {len(silent) - _NAMED} more" if len(silent) > _NAMED else ""
        parts.append(
            f"No answer from {numbered(silent[:_NAMED])}{more}: ended, stopped (SIGSTOP, a debugger), or in a call that holds Python's lock"
        )
    if not late and not silent:
        parts.append(
            "All ranks have reached this collective, so the ranks run different sequences of steps, or the network between "
            "them is slow or broken"
        )
    if elsewhere and not late:
        parts.append(f"Elsewhere: {_places(elsewhere)}")
    return ". ".join(parts)


def _own_part(rank: int, seconds: float, status: RankStatus) -> str:
    return f"rank {rank} on {status.host or platform.node()} has waited {seconds:.0f} s for {_wait(status)}"


def _wait(status: RankStatus) -> str:
    phase = f", in {status.phase}" if status.phase else ""
    block = f", block {status.block}" if status.phase and status.block else ""
    return f"{status.operation}{phase}{block}, at {status.place}"


def _places(statuses: dict[int, RankStatus]) -> str:
    """Return text such as ``rank 2 on node-1 is at data.py:12 in read, 31 s after hf_zero::spread; rank 3 ...``."""
    named = [f"rank {rank} on {its.host} {_activity(its)}" for rank, its in list(statuses.items())[:_NAMED]]
    return "; ".join(named + [f"and {len(statuses) - _NAMED} more ranks"] * (len(statuses) > _NAMED))


def _activity(status: RankStatus) -> str:
    if status.operation:
        return f"waits for {_wait(status)}"
    after = f", {status.age:.0f} s after {status.last}" if status.last else ""
    phase = f", in {status.phase}" if status.phase else ""
    return f"is at {status.place}{phase}{after}"
