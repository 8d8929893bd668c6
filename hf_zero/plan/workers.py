"""Plans side by side, each in a process of its own."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from hf_zero.errors import HfZeroError
from hf_zero.plan.cluster import Cluster, Hardware, Load
from hf_zero.plan.costs import Costs, costs_of
from hf_zero.plan.model_wish import ModelWish
from hf_zero.plan.models import build_model
from hf_zero.plan.stages import plan_step

_SHAPES = 3000  # operations whose results torch remembers, for all sizes it has seen: some 4 MiB a plan, which nothing else ends
_WORTH = 4.0  # seconds of plans in this process before others are started, which takes about as long


@dataclass(frozen=True)
class Task:
    """One plan: a run of the engine.

    Attributes:
        model: The model.
        config: The DeepSpeed configuration.
        cluster: The ranks.
        load: What they train on.
        attention: sdpa, flash or eager.
        last: Of a pipeline its last stage alone.
    """

    model: ModelWish
    config: Mapping[str, Any]
    cluster: Cluster
    load: Load
    attention: str = "sdpa"
    last: bool = False

    def costs(self) -> Costs | HfZeroError:
        """What it takes, or why the engine refuses it."""
        try:
            model = build_model(self.model)
            return costs_of(plan_step(model, self.config, self.cluster, self.load, Hardware(), self.attention, self.last))
        except HfZeroError as error:
            return error
        finally:
            if FakeTensorMode.cache_info().size > _SHAPES:
                FakeTensorMode.cache_clear()


@dataclass
class Workers:
    """This process and, once plans have taken a while, others beside it.

    Attributes:
        count: Processes that plan at once; 1 is this one alone.
        planned: How many tasks there were.
        ended: Is called when one has ended.
    """

    count: int = 1
    planned: int = 0
    ended: Callable[[], None] = lambda: None
    _seconds: float = 0.0
    _pool: ProcessPoolExecutor | None = field(default=None, repr=False)

    def costs(self, tasks: Sequence[Task]) -> list[Costs | HfZeroError]:
        """What each task takes, or why the engine refuses it. The last one is begun first: it should be the longest."""
        self.planned += len(tasks)
        if len(tasks) == 1 or self.count == 1 or self._seconds < _WORTH:
            before = time.perf_counter()
            found = [self._told(task.costs()) for task in tasks]
            self._seconds += time.perf_counter() - before
            return found
        if self._pool is None:
            self._pool = _pool(self.count)
        under_way = [self._pool.submit(task.costs) for task in reversed(tasks)]
        return [self._told(future.result()) for future in under_way][::-1]

    def _told(self, costs: Costs | HfZeroError) -> Costs | HfZeroError:
        self.ended()
        return costs

    def close(self) -> None:
        """Ends the other processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pool(count: int) -> ProcessPoolExecutor:
    """Processes that come from one which has imported the engine and done nothing: this one has threads, which a copy would not have."""
    served = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if served else "spawn")
    if served:
        context.set_forkserver_preload([__name__])
    return ProcessPoolExecutor(count, context, _begin)


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever waits for the plans ends
    gc.freeze()  # what is imported need not be looked at after each of many runs
