"""Record the collectives that this process issues and waits for, for ``tests/support/collective_order.py``.

Two layers are wrapped, once per process: the methods of hf_zero's ``Collectives`` that name a unit, and the calls of torch's process
groups, which user code and all other code uses. Of nested calls the outermost is one event, so an all-gather is one event whether the back
end has one or sends parts to each peer. Messages between two ranks alone (``send``, ``recv``) are left out.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tests.support.collective_order import Issue, Record

# Calls of a process group that all its members make. torch 2.13 renamed some; both names mean the same.
_OPERATIONS = {
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "_allgather_base": "all_gather_single",
    "all_gather_single": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_coalesced",
    "all_gather_single_coalesced": "all_gather_coalesced",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_single": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_coalesced",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "barrier": "barrier",
}
_BETWEEN_TWO = ("send", "recv", "recv_anysource")
_OF_ONE_SIZE = (
    "all_gather_single",
    "reduce_scatter_single",
    "all_reduce",
    "broadcast",
)  # the first tensor must have one size on every rank
_UNIT = ("unit", "label")  # parameters with which the package's methods name their purpose


class Log:
    """The growing record of one job. The threads of a rank share it, because on a device autograd's thread does work of the main one."""

    def __init__(self) -> None:
        self.record = Record()
        self._known: dict[Issue, Issue] = {}  # one object per kind, because steps repeat and records are sent
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._works: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def issue(self, group: Any, operation: str, unit: str, nbytes: int) -> int:
        """Record a collective; return its number among this rank's."""
        issue = Issue(self._name(group), operation, unit, nbytes)
        self.record.issues.append(self._known.setdefault(issue, issue))
        return len(self.record.issues) - 1

    def _name(self, group: Any) -> str:
        name = self._names.get(group)
        if name is None:
            ranks = tuple(dist.get_process_group_ranks(group))
            # A new group may get the name of a destroyed one; with the same ranks, one follows the other on each of them.
            given = dist.distributed_c10d._world.pg_names[group]  # group_name asks the back end, and some do not know it
            name = self._names[group] = f"{given} of ranks {','.join(map(str, ranks))}"
            self.record.groups[name] = ranks
        return name

    def wait(self, number: int) -> None:
        """Record that this rank waits for a collective."""
        self.record.waits.append((len(self.record.issues), number))

    def remember(self, work: Any, number: int) -> None:
        """Remember ``work``, torch's handle of the collective ``number``."""
        self._works[work] = number

    def wait_for_work(self, work: Any) -> None:
        """Record the first wait for a remembered work."""
        number = self._works.pop(work, None)
        if number is not None:
            self.wait(number)


class _Call:
    """A running call. A call of the package is recorded at its first use of a process group, when its group is known."""

    __slots__ = ("_note", "number")

    def __init__(self, note: Callable[[Any], int] | None = None, number: int | None = None) -> None:
        self._note, self.number = note, number

    def runs_on(self, group: Any) -> None:
        if self.number is None and self._note is not None:
            self.number = self._note(group)


class _Running(threading.local):
    call: _Call | None = None  # the outermost call of this thread


_log: Log | None = None
_running = _Running()


@contextmanager
def recording() -> Iterator[Record]:
    """Record the collectives that are issued inside the context."""
    global _log
    _wrap_package()
    _wrap_torch()
    _log = Log()
    try:
        yield _log.record
    finally:
        _log = None


# -- the package ---------------------------------------------------------------------------------------------------------


def _wrap_package() -> None:
    from hf_zero.comm.collectives import Collectives, Pending

    if not hasattr(Pending.wait, "is_logged"):
        Pending.wait = _logged_pending(Pending.wait)  # type: ignore[method-assign]
    found = False
    for owner in _with_subclasses(Collectives):
        for name, method in list(vars(owner).items()):
            if hasattr(method, "is_logged"):
                found = True
            elif inspect.isfunction(method) and not name.startswith("_"):
                names = list(inspect.signature(method).parameters)
                unit = next((unit for unit in _UNIT if unit in names), None)
                if unit is not None:
                    setattr(owner, name, _logged_method(method, unit, names.index(unit) - 1))
                    found = True
    if not found:
        raise AssertionError(f"no method of {Collectives.__name__} has a parameter {' or '.join(_UNIT)}: nothing would be written down")


def _with_subclasses(owner: type) -> list[type]:
    return [owner, *(found for child in owner.__subclasses__() for found in _with_subclasses(child))]


def _logged_method(method: Callable[..., Any], unit: str, place: int) -> Callable[..., Any]:
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _log is None or self.world == 1 or _running.call is not None:
            return method(self, *args, **kwargs)
        log, label = _log, kwargs[unit] if unit in kwargs else args[place]
        nbytes = args[0].nbytes if args and isinstance(args[0], torch.Tensor) else 0
        entry = _Call(lambda group: log.issue(group, name, label, nbytes))
        _running.call = entry
        try:
            result = method(self, *args, **kwargs)
        finally:
            _running.call = None
        entry.runs_on(self.topology.group)  # also without a message, because another rank may have sent one
        assert entry.number is not None
        if hasattr(result, "works"):  # a Pending
            result.collective_number = entry.number
        else:
            log.wait(entry.number)
        return result

    call.is_logged = True  # type: ignore[attr-defined]
    return call


def _logged_pending(method: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(method)
    def wait(self: Any) -> None:
        number = self.__dict__.pop("collective_number", None)
        if _log is None or number is None or _running.call is not None:
            method(self)
            return
        _log.wait(number)
        _running.call = _Call(number=number)  # messages at the end of a collective belong to it
        try:
            method(self)
        finally:
            _running.call = None

    wait.is_logged = True  # type: ignore[attr-defined]
    return wait


# -- torch ---------------------------------------------------------------------------------------------------------------


def _wrap_torch() -> None:
    for owner in _with_subclasses(getattr(dist, "Work", None) or dist._Work):
        for name in ("wait", "synchronize"):
            if name in vars(owner) and not hasattr(vars(owner)[name], "is_logged"):
                setattr(owner, name, _logged_wait(vars(owner)[name]))
    for owner in _with_subclasses(dist.ProcessGroup):
        for name in (*_OPERATIONS, *_BETWEEN_TWO):
            method = vars(owner).get(name)
            if method is not None and not hasattr(method, "is_logged"):
                setattr(owner, name, _logged_operation(method, _OPERATIONS.get(name, "")))


def _logged_operation(method: Callable[..., Any], operation: str) -> Callable[..., Any]:
    """Wrap a call of a process group: part of the package's running call, or an event of its own unless ``operation`` is ""."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _log is None:
            return method(self, *args, **kwargs)
        running = _running.call
        if running is not None or not operation or self.size() == 1:
            if running is not None:
                running.runs_on(self)
            return method(self, *args, **kwargs)
        log = _log
        number = log.issue(self, operation, "", _size(args) if operation in _OF_ONE_SIZE else 0)
        _running.call = _Call(number=number)  # a group may call another group
        try:
            work = method(self, *args, **kwargs)
        finally:
            _running.call = None
        if work is not None:
            log.remember(work, number)
        return work

    call.is_logged = True  # type: ignore[attr-defined]
    return call


def _size(args: tuple[Any, ...]) -> int:
    first = args[0][0] if args and isinstance(args[0], list) else args[0]
    return first.nbytes if isinstance(first, torch.Tensor) else 0


def _logged_wait(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _log is not None and _running.call is None:
            _log.wait_for_work(self)
        return method(self, *args, **kwargs)

    wait.is_logged = True  # type: ignore[attr-defined]
    return wait
