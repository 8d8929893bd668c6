"""Compute one optimizer step's gradients from several micro-batches, in the order of the pipeline's schedule.

Parameters get several gradients per backward then: autograd adds all but the first to the flat buffer itself (``InPlaceCollector``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from hf_zero.comm.collectives import Collectives
from hf_zero.core.engine import Engine
from hf_zero.core.schedule.gradient_sums import GradientPolicy
from hf_zero.core.schedule.gradients import BufferPool, Collector
from hf_zero.core.schedule.reducer import Reducer
from hf_zero.core.step.precision import cast_floating
from hf_zero.core.units.unit import Unit
from hf_zero.core.units.whole_buffer import is_only_view
from hf_zero.errors import ConfigError, StateError, UnsupportedError
from hf_zero.pipeline.apply import DividesItself, pipeline_of
from hf_zero.pipeline.forward import pipelined
from hf_zero.pipeline.micro_batches import loss_of

T = TypeVar("T")


def require_iterator(source: Any) -> Iterator[Any]:
    """Return ``source`` if it is an iterator.

    Raises:
        ConfigError: ``source`` is no iterator.
    """
    if not isinstance(source, Iterator):
        raise ConfigError(f"data_iter is a {type(source).__name__}; an iterator is allowed, iter(loader) for example")
    return source


def read_together(
    networks: Sequence[Collectives], read: Callable[[], T], report: Callable[[T], Any] = lambda _: None
) -> tuple[T, list[Any]]:
    """Return the result of ``read`` on this rank, and the reports that the ranks of the first network make of theirs; collective over all
    networks, one after the other.

    No rank goes on alone: a rank without data would leave the others waiting in the batch.

    Args:
        networks: Axes that together reach every rank of the batch.
        read: Function that returns this rank's data.
        report: Function that makes this rank's report from its data.

    Raises:
        StopIteration: On every rank, if data ended on one.
        StateError: On the other ranks, if a rank failed to read for another reason; that rank raises its own error.
    """
    found: T | None = None
    failure: Exception | None = None
    try:
        found = read()
    except Exception as error:  # also errors of a data set
        failure = error
    rank = dist.get_rank() if dist.is_initialized() else 0
    why = failure and (isinstance(failure, StopIteration), f"rank {rank} has no data for this batch: {type(failure).__name__}: {failure}")
    reports: list[Any] = []
    for network in networks:
        answers = network.gather_objects((None if reports or found is None else report(found), why), "data of a batch")
        reports = reports or [answer for answer, _ in answers]
        why = next((other for _, other in answers if other), None)
    if failure is not None:
        raise failure
    if why:
        raise StopIteration(why[1]) if why[0] else StateError(why[1])
    assert found is not None
    return found, reports


def train_batch(engine: Engine, data_iter: Iterator[Mapping[str, Any]]) -> torch.Tensor:
    """Train one batch: ``gradient_accumulation_steps`` micro-batches forward and backward, and one step; collective.

    With ``pipeline.stages`` the micro-batches run through the stages in the order of ``pipeline.schedule``, so that a stage keeps the
    activations of few of them. Without a pipeline they run one after the other.

    Args:
        engine: An engine whose model returns its loss.
        data_iter: Iterator over the arguments of the model, a dict for each micro-batch; the same on all ranks that hold one model.

    Returns:
        The mean loss of all micro-batches and data-parallel ranks, 0-dim, on every rank.

    Raises:
        StateError: The engine has no optimizer.
        ConfigError: The iterator yields an object that is no dict of arguments.
        StopIteration: On every rank, where one rank has too few micro-batches for a batch.
        UnsupportedError: The model returns no loss, or the micro-batches are of several kinds.
    """
    _require_training(engine)
    forward, data = pipelined(engine.module), engine.collectives.data
    networks = [data] if forward is None else [forward.together, data]
    calls, _ = read_together(networks, lambda: _read(engine, data_iter))
    engine.module.train()
    if forward is not None:
        loss = backward_of(engine, calls)
        engine.step()
    else:
        loss = torch.stack([_micro_step(engine, call) for call in calls]).mean()
    data.all_reduce(loss, "mean loss").wait()
    return loss.div_(data.world)


def _read(engine: Engine, data_iter: Iterator[Mapping[str, Any]]) -> list[dict[str, Any]]:
    device, batches = engine.collectives.topology.device, require_iterator(data_iter)
    calls = [next(batches) for _ in range(engine.accumulation.steps)]
    for call in calls:
        if not isinstance(call, Mapping):
            raise ConfigError(f"data_iter gave a {type(call).__name__}; a dict of the model's arguments is allowed, labels among them")
    return [tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), dict(call)) for call in calls]


def _micro_step(engine: Engine, call: Mapping[str, Any]) -> torch.Tensor:
    loss = loss_of(engine(**call))
    if loss is None:
        raise UnsupportedError("train_batch needs a model that returns its loss: give it labels")
    engine.backward(loss)
    engine.step()
    return loss.detach().float()


def backward_of(engine: Engine, calls: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Compute and reduce the gradients of the mean loss of ``calls``, which make up one optimizer step; collective.

    Args:
        engine: An engine whose module is divided over stages.
        calls: Arguments of the module for each micro-batch, all of one kind.

    Returns:
        The mean of the losses on this rank's samples, 0-dim fp32, on every rank of the pipeline.

    Raises:
        StateError: The module is not divided over stages, or the engine has no optimizer.
    """
    forward = pipelined(engine.module)
    if forward is None:
        raise StateError("a schedule of a pipeline needs an engine that trains a module over pipeline.stages")
    if engine.precision.casts_inputs and engine.precision.param_dtype is not None:
        calls = [cast_floating(call, engine.precision.param_dtype) for call in calls]
    batch = forward.prepare(calls, engine.autocast)
    with whole_step(engine):
        loss = forward.train(batch, engine.scaler.scale / len(calls))
    engine.spikes.loss.add(loss)
    return loss


@contextmanager
def whole_step(engine: Engine) -> Iterator[None]:
    """Count all forwards and backwards in the context, in any order, as the micro-steps of one optimizer step; reduce at the end.
    Collective.

    Raises:
        StateError: The engine has no optimizer.
    """
    _require_training(engine)
    assert engine.stepper is not None
    with engine.clock.phase("backward"):
        engine.accumulation.begin_all()
        engine.stepper.begin_micro_step(True, False, 1.0)
        engine.runtime.backward.begin(mixed=True)
        try:
            yield
            _take_left(engine.stepper.reducer)
        except BaseException:
            engine.runtime.backward.abort()
            raise
        engine.runtime.backward.end()


def _require_training(engine: Engine) -> None:
    if engine.stepper is None or engine.optimizer is None:
        raise StateError("an engine without optimizer does not train")


def _take_left(reducer: Reducer) -> None:
    """Collect gradients left in ``param.grad``: schedules that compute weight gradients separately run no hook of a parameter."""
    for entry in reducer.gradients:
        for index in range(len(entry.unit.params)):
            reducer.collect(entry, index)


def collector_of(model: nn.Module) -> type[Collector]:
    """Return the class that collects the gradients of ``model``: ``InPlaceCollector`` where batches run in parts through pipeline
    stages.
    """
    return InPlaceCollector if pipeline_of(model) is not None or isinstance(model, DividesItself) else Collector


class InPlaceCollector(Collector):
    """Gradients of one unit, to which autograd adds in place.

    [Note: added in place] Where a parameter gets several gradients in one backward (the micro-batches of a pipeline), the first one is
    copied into the flat buffer ([Note: stolen gradients]). Autograd adds the following gradients to that place, without a hook, while they
    are in the cache. The sums and their order stay the same, because this is done only where gradient and buffer have one dtype and nothing
    is scaled. Until the backward ends, ``param.grad`` is the parameter's place in the flat buffer.
    """

    def __init__(self, unit: Unit, policy: GradientPolicy, pool: BufferPool) -> None:
        super().__init__(unit, policy, pool)
        self._several = False  # gradients of the present step came in several pieces

    def _write(self, grads: Mapping[int, torch.Tensor]) -> None:
        super()._write(grads)
        self._several |= self.piecemeal
        flat = self.flat
        if flat is not None and self.piecemeal and self._scale == 1.0 and flat.dtype == self._unit.layout.dtype:
            self._begin_in_place({index: self.place(flat, index) for index in grads})

    def _begin_in_place(self, places: Mapping[int, torch.Tensor]) -> None:
        """Point ``param.grad`` at these places, which hold the first gradients, so that autograd adds the following ones there."""
        for index, place in places.items():
            param = self._unit.params[index]
            if param is not None:
                param.grad = place
                self.in_place.add(index)

    def _end_in_place(self) -> None:
        for index in self.in_place:
            param = self._unit.params[index]
            if param is not None:
                param.grad = None
        self.in_place.clear()

    def clear(self, total: torch.Tensor | None) -> None:
        """Discard all gradients; see ``Collector.clear``.

        [Note: kept memory] On a host, allocating memory costs more than writing to it. With several gradients per backward, the memory is
        in use from the first part's backward on, when most activations exist, so freeing it gains nothing. The next step's gradients
        therefore reuse it, if this rank holds the whole sum and no script has kept a view of it.
        """
        super().clear(total)
        # The sum may be on the host while the unit is on a device.
        whole = total is not None and total.numel() == self._unit.layout.padded_numel and total.device.type == "cpu"
        if total is not None and whole and self._several and self._unit.collectives.topology.device.type == "cpu" and is_only_view(total):
            self.pool.give(total)
        self._several = False
