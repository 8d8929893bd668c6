"""One optimizer step's gradients of several micro-batches, in the order of the pipeline's schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hf_zero.core.engine import Engine
from hf_zero.core.schedule.reducer import Reducer
from hf_zero.errors import StateError
from hf_zero.pipeline.forward import pipelined


def backward_of(engine: Engine, calls: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Computes and reduces the gradients of the mean loss of ``calls``, which make up an optimizer step; collective.

    Args:
        engine: Its module is divided over stages.
        calls: Arguments of the module for each micro-batch, of one kind.

    Returns:
        The mean of the losses on this rank's samples, 0-dim fp32, on every rank of the pipeline.

    Raises:
        StateError: The module is not divided, or the engine does not train.
    """
    forward = pipelined(engine.module)
    if forward is None:
        raise StateError("a schedule of a pipeline needs an engine that trains a module over pipeline.stages")
    with whole_step(engine), engine.autocast():
        loss = forward.train(calls, engine.scaler.scale / len(calls))
    engine.progress.last_loss = loss
    return loss


@contextmanager
def whole_step(engine: Engine) -> Iterator[None]:
    """Forwards and backwards inside, in any order, are those of all micro-steps of one optimizer step; the end reduces. Collective.

    Raises:
        StateError: The engine does not train.
    """
    if engine.stepper is None or engine.optimizer is None:
        raise StateError("an engine without optimizer does not train")
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


def _take_left(reducer: Reducer) -> None:
    """Takes gradients that are in ``param.grad``: schedules that compute those of weights by themselves run no hook of a parameter."""
    for entry in reducer.gradients:
        for index in range(len(entry.unit.params)):
            reducer.collect(entry, index)
