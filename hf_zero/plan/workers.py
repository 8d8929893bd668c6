"""Plan configurations in parallel, each in a separate process: one rank if all are alike, or one rank for each stage of a pipeline."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from hf_zero.config.mesh import requested_stages
from hf_zero.errors import ConfigError, HfZeroError
from hf_zero.pipeline.apply import Pipeline
from hf_zero.pipeline.plan import Crossing
from hf_zero.plan.costs import Costs, costs_of
from hf_zero.plan.few_blocks import fingerprint_of
from hf_zero.plan.inputs import Cluster, Hardware, Load, ModelWish
from hf_zero.plan.models import PlannedModel, build_model
from hf_zero.plan.prediction import Prediction, predict
from hf_zero.plan.run import Observation, observe_step
from hf_zero.system.planning import Told

_SHAPES = 3000  # results of operations in torch's cache of fake tensors, which nothing else bounds: about 4 MiB per plan
_WORTH = 4.0  # seconds of plans before worker processes are started; starting them takes about as long


def plan_step(
    model: PlannedModel,
    config: Mapping[str, Any],
    cluster: Cluster,
    load: Load,
    hardware: Hardware,
    attention: str = "sdpa",
    last: bool = False,
) -> Prediction:
    """Return the prediction for one configuration.

    [Note: stages of a plan] The stages of a pipeline hold different layers, so one rank of each stage is planned, each in its own world.
    The last stage is first: the messages that it sends (the shape of the model's result) are kept for the other stages. Activations
    between stages need only shapes in a plan. Inner stages that run equal calls of equal blocks behave the same; one of them is planned.

    Args:
        model: The model, on the meta device.
        config: The DeepSpeed configuration.
        cluster: Number and place of the ranks.
        load: Shape of the batch of one rank.
        hardware: Limits and rates of the hardware.
        attention: Attention kernel, see ``observe_step``.
        last: Whether to plan only the last stage of a pipeline, whose memory and time are lower bounds.

    Raises:
        ConfigError: The engine refuses the configuration.
        UnsupportedError: The model cannot run on fake tensors.
    """
    stages = requested_stages(config)
    if stages == 1:
        return predict([observe_step(model, config, cluster, load, attention)], cluster, hardware)
    if cluster.ranks % stages:
        raise ConfigError(f"pipeline.stages is {stages}, which does not divide the {cluster.ranks} ranks of --ranks")
    messages: Told = {}
    seen: list[Observation] = []
    known: dict[str, Observation] = {}
    for stage in reversed(range(stages)):
        pipeline = seen[0].pipeline if seen else None
        fingerprint = _fingerprint(model, pipeline, stage) if pipeline is not None else ""
        if fingerprint not in known:
            own = replace(model, module=copy.deepcopy(model.module))  # an engine changes its module
            known[fingerprint] = observe_step(own, config, cluster, load, attention, stage * (cluster.ranks // stages), messages)
        seen.append(known[fingerprint])
        if last:
            break
    return predict(seen[::-1], cluster, hardware)


def _fingerprint(model: PlannedModel, pipeline: Pipeline, rank: int) -> str:
    """Return a text that is equal for ranks of a pipeline with the same computation, memory and traffic."""
    return repr([_fingerprint_of_stage(model, pipeline, stage) for stage in pipeline.placement.stages_of(rank)])


def _fingerprint_of_stage(model: PlannedModel, pipeline: Pipeline, stage: int) -> list[Any]:
    plan, span = pipeline.plan, pipeline.plan.span(stage)
    calls = [plan.calls[place] for place in span]
    numbers = [next((int(part) for part in reversed(call.path.split(".")) if part.isdigit()), -1) for call in calls]
    run = [fingerprint_of(model.module.get_submodule(call.path), number) for call, number in zip(calls, numbers, strict=True)]
    params = dict(model.module.named_parameters(remove_duplicate=False))
    held = [(tuple(params[name].shape), params[name].requires_grad) for name, stages in plan.holders.items() if stage in stages]
    tied = [stages for stages in plan.holders.values() if stage in stages and len(stages) > 1]
    borders = [_relative(plan.crossings[border], span.start) for border in (stage - 1, stage) if 0 <= border < plan.stages - 1]
    ends = stage == 0, stage == plan.stages - 1
    return [run, held, tied, borders, _relative(plan.changed, span.start), ends]


def _relative(crossings: tuple[Crossing, ...], start: int) -> list[tuple[int, int]]:
    return [(crossing.call - start, crossing.leaf) for crossing in crossings]


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
