"""Metrics under tensor parallelism: accelerate gathers from every rank, and the ranks of a group have computed the same samples.

[Note: metrics] accelerate divides samples over groups of ranks where the configuration has ``autotp_size``, but ``gather_for_metrics``
(which Trainer evaluates and predicts with) joins what all ranks have: each sample would come once per rank of its group, and the rows
that pad the last batch would be cut off at the wrong place. So of an Accelerator that has prepared such an engine, what is gathered for
metrics is what the first rank of each group has, and so is what Trainer gathers to count the tokens that it has seen. All else gathers from
every rank as before; Trainer reckons with it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils import _pytree as pytree

from hf_zero.core.engine import Engine
from hf_zero.errors import UnsupportedError
from hf_zero.integrations import callers
from hf_zero.integrations.pipelines import parts_here, sharing_parts_here

# Accelerator -> stages of its pipeline, and ranks that hold each layer together: all of these compute the same samples, as do those of
# context parallelism outside of a step that has parts.
_sharers: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
_gathers: ContextVar[list[Any] | None] = ContextVar("hf_zero gathers", default=None)  # what gather_for_metrics has gathered so far


def count_samples_once(engine: Engine) -> None:
    """Notes for the Accelerator that is preparing ``engine`` how many ranks share their samples; see [Note: metrics].

    Raises:
        UnsupportedError: accelerate or transformers have no method any more without which samples would be counted several times.
    """
    topology = engine.collectives.topology
    model_axis, parts = topology.model, parts_here()
    if model_axis is None and parts == 1:
        return
    callers.require(callers.PREPARE, callers.GATHER, callers.METRICS, callers.EVALUATE)
    for call in callers.running(callers.PREPARE)[:1]:
        stages = topology.pipe.world if topology.pipe is not None else 1
        layers = model_axis.world // stages if model_axis is not None else 1
        _sharers.setdefault(call.caller, (stages, layers))


def gather(method: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """``Accelerator.gather``, of every rank; inside ``gather_for_metrics`` of the first rank of each group."""
    found, gathers = method(accelerator, *args, **kwargs), _gathers.get()
    if gathers is None:
        return found
    gathers.append(found)
    return _of_groups(accelerator, found)


def gather_for_metrics(method: Callable[..., Any], accelerator: Any, input_data: Any, use_gather_object: bool = False) -> Any:
    """``Accelerator.gather_for_metrics``, each sample once.

    Raises:
        UnsupportedError: accelerate's method does not gather with ``Accelerator.gather``.
    """
    stages, sharers = _sharers_of(accelerator)
    if stages * sharers == 1:
        return method(accelerator, input_data, use_gather_object)
    objects = use_gather_object or not all(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(input_data))
    place = accelerator.process_index
    if objects and isinstance(input_data, (list, tuple)) and (place % sharers or place >= accelerator.num_processes // stages):
        input_data = input_data[:0]  # lists are joined as long as they are
    gathers: list[Any] = []
    token = _gathers.set(gathers)
    try:
        found = method(accelerator, input_data, use_gather_object=objects)
    finally:
        _gathers.reset(token)
    if not objects and not gathers:
        raise UnsupportedError("Accelerator.gather_for_metrics no longer calls Accelerator.gather: each sample is counted several times")
    return found


def evaluation_loop(method: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """``Trainer.evaluation_loop``, whose seq2seq kind gathers with ``Accelerator.gather``; here each sample once too.

    It runs inside what callbacks of ours want around an evaluation.
    """
    accelerator = trainer.accelerator
    if trainer.gather_function == accelerator.gather:
        trainer.gather_function = partial(_gather_once, accelerator)  # until the loop ends, which sets it anew
    with ExitStack() as stack:
        for callback in trainer.callback_handler.callbacks:
            if hasattr(callback, "around_evaluation"):
                stack.enter_context(callback.around_evaluation())
        return method(trainer, *args, **kwargs)


def track_num_input_tokens(method: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """``Trainer._track_num_input_tokens``, which adds up what it gathers; here each sample once."""
    token = _gathers.set([])
    try:
        return method(trainer, *args, **kwargs)
    finally:
        _gathers.reset(token)


def _sharers_of(accelerator: Any) -> tuple[int, int]:
    """Return the stages of a pipeline, and the adjacent ranks that have computed the same samples at the moment."""
    if accelerator not in _sharers:
        return 1, 1
    stages, layers = _sharers[accelerator]
    return stages, layers * sharing_parts_here()


def _gather_once(accelerator: Any, tensor: Any) -> Any:
    return _of_groups(accelerator, accelerator.gather(tensor))


def _of_groups(accelerator: Any, gathered: Any) -> Any:
    (stages, sharers), ranks = _sharers_of(accelerator), accelerator.num_processes
    if stages * sharers == 1:
        return gathered
    return pytree.tree_map(lambda leaf: _of_first_ranks(leaf, ranks, stages, sharers), gathered)


def _of_first_ranks(gathered: torch.Tensor, ranks: int, stages: int, group: int) -> torch.Tensor:
    """Of ``gathered`` (ranks x n, ...) what the first rank of each group in the first stage has: (ranks / stages / group x n, ...)."""
    return gathered.unflatten(0, (stages, ranks // stages // group, group, len(gathered) // ranks))[0, :, 0].flatten(0, 1)
