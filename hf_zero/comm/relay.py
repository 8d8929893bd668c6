"""A thread that hands on to the other ranks of a node what has come from other nodes, while this rank computes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread

from hf_zero.system.planning import planning

_Task = tuple[Callable[[], None], "Future[None]"]


class Forwarded:
    """What a relay does; waited for like a work of torch.distributed."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Blocks until it is done.

        Raises:
            RuntimeError: The network failed.
        """
        self._future.result()


class Relay:
    """Runs tasks in the order in which they were given, in a thread that ends with this object."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        # A daemon: what waits for a dead rank must not keep the process from ending.
        Thread(target=_run, args=(self._tasks,), daemon=True, name="hf_zero relay").start()
        weakref.finalize(self, self._tasks.put, None)

    def start(self, task: Callable[[], None]) -> Forwarded:
        """Has ``task`` run when all earlier ones have; in a plan, which counts what one thread does, at once."""
        future: Future[None] = Future()
        if planning():
            task()
            future.set_result(None)
        else:
            self._tasks.put((task, future))
        return Forwarded(future)


def _run(tasks: SimpleQueue[_Task | None]) -> None:
    while (given := tasks.get()) is not None:
        task, future = given
        try:
            task()
        except BaseException as error:  # whoever waits raises it
            future.set_exception(error)
        else:
            future.set_result(None)
        del given, task, future  # with the tensors that they hold
