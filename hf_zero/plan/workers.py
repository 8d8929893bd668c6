"""Run plans in parallel, each in a separate process."""

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

_SHAPES = 3000  # results of operations in torch's cache of fake tensors, which nothing else bounds: about 4 MiB per plan
_WORTH = 4.0  # seconds of plans before worker processes are started; starting them takes about as long


@dataclass(frozen=True)
class Task:
    """Arguments of one plan.

    Attributes:
        model: Description of the model.
        config: The DeepSpeed configuration.
        cluster: Number and place of the ranks.
        load: Shape of the batch of one rank.
        attention: sdpa, flash or eager.
        last: Whether to plan only the last stage of a pipeline.
    """

    model: ModelWish
    config: Mapping[str, Any]
    cluster: Cluster
    load: Load
    attention: str = "sdpa"
    last: bool = False

    def costs(self) -> Costs | HfZeroError:
        """Run the plan, and return its costs, or the error with which the engine refuses the configuration."""
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
    """Pool of processes that run plans; this process runs the first plans alone.

    Attributes:
        count: Number of processes that plan at the same time; 1 is this process alone.
        planned: Number of tasks so far.
        ended: Function that is called after each task.
    """

    count: int = 1
    planned: int = 0
    ended: Callable[[], None] = lambda: None
    _seconds: float = 0.0
    _pool: ProcessPoolExecutor | None = field(default=None, repr=False)

    def costs(self, tasks: Sequence[Task]) -> list[Costs | HfZeroError]:
        """Return the costs, or the engine's error, of each task in order. The last task starts first, so it should be the longest."""
        self.planned += len(tasks)
        if len(tasks) == 1 or self.count == 1 or self._seconds < _WORTH:
            before = time.perf_counter()
            found = [self._count_ended(task.costs()) for task in tasks]
            self._seconds += time.perf_counter() - before
            return found
        if self._pool is None:
            self._pool = _pool(self.count)
        under_way = [self._pool.submit(task.costs) for task in reversed(tasks)]
        return [self._count_ended(future.result()) for future in under_way][::-1]

    def _count_ended(self, costs: Costs | HfZeroError) -> Costs | HfZeroError:
        self.ended()
        return costs

    def close(self) -> None:
        """Stop the worker processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pool(count: int) -> ProcessPoolExecutor:
    """Return a pool of ``count`` processes, started by a server that has imported the engine; a fork of this process would lose threads."""
    served = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if served else "spawn")
    if served:
        context.set_forkserver_preload([__name__])
    return ProcessPoolExecutor(count, context, _initialize)


def _initialize() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles the interrupt
    gc.freeze()  # the collector need not scan imported modules after each plan
