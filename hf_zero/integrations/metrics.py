"""Count each sample once in metrics under tensor parallelism, pipelines and context parallelism, whose ranks share samples; add an
engine's measurements to Trainer's logs, and so to every tracker that Trainer reports to; count the parameters of a sharded model whole.
[Note: metrics] accelerate divides samples over groups of ranks if the configuration has ``autotp_size``, but ``gather_for_metrics``
(with which Trainer evaluates and predicts) joins the tensors of all ranks. Each sample would appear once per rank of its group, and the
rows that pad the last batch would be cut off at the wrong place. So for an Accelerator that has prepared such an engine, the result of
``gather_for_metrics`` has the tensors of the first rank of each group only. The same holds when Trainer gathers to count tokens.
Every other gather still joins all ranks, because Trainer expects it.
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
from hf_zero.core.units.parts import counting_divided
from hf_zero.core.units.sharded_parameter import counts_whole_sizes
from hf_zero.errors import UnsupportedError
from hf_zero.integrations import callers, methods
from hf_zero.integrations.pipelines import parts_here, sharing_parts_here

# Accelerator -> number of pipeline stages, and number of ranks that hold each layer together. All these ranks compute the same samples;
# so do the ranks of context parallelism outside of a step whose batch is cut.
_sharers: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
_gathers: ContextVar[list[Any] | None] = ContextVar("hf_zero gathers", default=None)  # results of gather so far


def count_samples_once(engine: Engine) -> None:
    """Record for the Accelerator that prepares ``engine`` how many ranks share their samples; see [Note: metrics].

    Raises:
        UnsupportedError: accelerate or transformers lack a wrapped method, so samples would be counted several times.
    """
    topology = engine.collectives.topology
    model_axis, parts = topology.model, parts_here()
    if model_axis is None and parts == 1:
        return
    callers.require(methods.PREPARE, methods.GATHER, methods.METRICS, methods.EVALUATE)
    for call in callers.running(methods.PREPARE)[:1]:
        stages = topology.pipe.world if topology.pipe is not None else 1
        layers = model_axis.world // stages if model_axis is not None else 1
        _sharers.setdefault(call.caller, (stages, layers))


def gather(method: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``Accelerator.gather``: inside ``gather_for_metrics`` keep only the tensors of the first rank of each group."""
    found, gathers = method(accelerator, *args, **kwargs), _gathers.get()
    if gathers is None:
        return found
    gathers.append(found)
    return _of_groups(accelerator, found)


def gather_for_metrics(method: Callable[..., Any], accelerator: Any, input_data: Any, use_gather_object: bool = False) -> Any:
    """Replace ``Accelerator.gather_for_metrics``: return each sample once.

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
        raise UnsupportedError(
            "Accelerator.gather_for_metrics no longer calls Accelerator.gather: each sample would be counted several times"
        )
    return found


def evaluation_loop(method: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``Trainer.evaluation_loop``: count each sample once also in seq2seq trainers, which gather with ``Accelerator.gather``.

    The loop runs inside the contexts that callbacks of hf_zero return from ``around_evaluation``.
    """
    accelerator = trainer.accelerator
    if trainer.gather_function == accelerator.gather:
        trainer.gather_function = partial(_gather_once, accelerator)  # the loop resets it at its end
    with ExitStack() as stack:
        for callback in trainer.callback_handler.callbacks:
            if hasattr(callback, "around_evaluation"):
                stack.enter_context(callback.around_evaluation())
        return method(trainer, *args, **kwargs)


def track_num_input_tokens(method: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``Trainer._track_num_input_tokens``, which sums gathered token counts: count each sample once."""
    token = _gathers.set([])
    try:
        return method(trainer, *args, **kwargs)
    finally:
        _gathers.reset(token)


def store_flos(method: Callable[..., Any], trainer: Any) -> None:
    """Replace ``Trainer.store_flos``, which sums the operations that ranks have counted for their samples: count each sample once."""
    before = trainer.state.total_flos
    method(trainer)
    stages, sharers = _sharers_of(trainer.accelerator)
    if stages * sharers > 1:
        trainer.state.total_flos = before + (trainer.state.total_flos - before) / (stages * sharers)


def has_mixed_mesh_grads(method: Callable[..., Any], trainer: Any, model: Any) -> bool:
    """Replace ``Trainer._has_mixed_mesh_grads``, which reads the gradients of all parameters to find meshes of ``DTensor``s.

    An engine's gradients are plain tensors, and reading them is a warning at stages 1 to 3, or with ``show_gradients`` a gather.
    """
    return False if isinstance(model, Engine) else method(trainer, model)


def _sharers_of(accelerator: Any) -> tuple[int, int]:
    """Return the number of pipeline stages, and the number of adjacent ranks that have computed the same samples."""
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
    """Return the rows of ``gathered`` (ranks x n, ...) from each group's first rank in stage 0: (ranks / stages / group x n, ...)."""
    return gathered.unflatten(0, (stages, ranks // stages // group, group, len(gathered) // ranks))[0, :, 0].flatten(0, 1)


_PREFIX = "Train/"  # Trainer's callbacks for trackers add their own prefix


def log(function: Callable[..., Any], trainer: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
    """Replace ``Trainer.log``: add the engine's measurements since the last training log to each log with a loss."""
    engine = getattr(trainer, "model_wrapped", None)
    if isinstance(engine, Engine) and "loss" in logs:
        measured, engine.reports.measured = engine.reports.measured, {}
        logs |= {name.removeprefix(_PREFIX).lower(): value for name, value in measured.items()}
    return function(trainer, logs, *args, **kwargs)


def count_whole(original: Callable[..., int], model: torch.nn.Module, *args: Any, **kwargs: Any) -> int:
    """Replace a method that counts a model's parameters or their bytes: sharded ones, which are empty between their uses, and parts that
    tensor parallelism, experts or stages have left on this rank count whole.
    """
    with counts_whole_sizes(), counting_divided(model.parameters()):
        return original(model, *args, **kwargs)
