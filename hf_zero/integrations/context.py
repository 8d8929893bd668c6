"""accelerate's and Trainer's context parallelism over an engine of ours: the same batch on all ranks of a group, cut by name or in place.

[Note: context parallelism of accelerate] accelerate's own patches torch's attention, drops masks and takes each rank's loss for its part's
mean. Here ``maybe_context_parallel`` cuts the buffers in place as accelerate documents it, and the model's hooks do the rest
(``sequence_parallel/context_forward.py``). Trainer's batches are cut by name, which knows how to pad each; where Trainer computes a loss
from outputs (label smoothing, ``compute_loss_func``) batches stay whole, because outputs are then. Evaluation is over whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from hf_zero.errors import ConfigError, StateError
from hf_zero.integrations.pipelines import mesh_here
from hf_zero.sequence_parallel.context_forward import divided_forwards, sliced_step
from hf_zero.sequence_parallel.layout import Layout
from hf_zero.sequence_parallel.state import ContextParallel


def prepare(method: Callable[..., Any], accelerator: Any, *args: Any) -> Any:
    """``Accelerator._prepare_cp``, which prepares torch's own; an engine of ours divides sequences by itself."""
    return args if _is_ours() else method(accelerator, *args)


def maybe_context_parallel(
    method: Callable[..., Any],
    accelerator: Any,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[torch.Tensor] | None = None,
) -> AbstractContextManager[Any]:
    """``Accelerator.maybe_context_parallel``, over an engine of ours.

    Raises:
        ConfigError: The buffers have no dimension for each, or lengths that do not divide.
        StateError: No engine has been prepared.
    """
    if not _is_ours():
        found: AbstractContextManager[Any] = method(accelerator, buffers, buffer_seq_dims, no_restore_buffers)
        return found
    return _cut_in_place(_groups_of(accelerator).layout, list(buffers or ()), list(buffer_seq_dims or ()), no_restore_buffers or set())


@contextmanager
def _cut_in_place(layout: Layout, buffers: list[torch.Tensor], dims: list[int], keep: set[torch.Tensor]) -> Iterator[None]:
    """Leaves this rank's part in every buffer for a while, and after it in those of ``keep``."""
    if len(buffers) != len(dims):
        raise ConfigError(f"maybe_context_parallel got {len(buffers)} buffers and {len(dims)} buffer_seq_dims; one for each is needed")
    for buffer, dim in zip(buffers, dims, strict=True):
        if buffer.shape[dim] % layout.multiple:
            raise ConfigError(
                f"maybe_context_parallel got a buffer of shape {tuple(buffer.shape)}, whose dimension {dim} is no multiple of "
                f"{layout.multiple} (two parts of a sequence for each of {layout.collectives.world} ranks); pad batches to such a length "
                f"(pad_to_multiple_of={layout.multiple}), or leave the context away and pass whole batches to the model"
            )
    whole = {id(buffer): buffer.detach().clone() for buffer in buffers}
    parts = {buffer.shape[dim] // layout.collectives.world for buffer, dim in zip(buffers, dims, strict=True)}
    for buffer, dim in zip(buffers, dims, strict=True):
        _replace(buffer, layout.cut(whole[id(buffer)], dim))
    try:
        with sliced_step(*parts):
            yield
    finally:
        kept = {id(buffer) for buffer in keep}
        for buffer in buffers:
            if id(buffer) not in kept:
                _replace(buffer, whole[id(buffer)])


def _replace(buffer: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        buffer.resize_(values.shape)
        buffer.copy_(values)


def prepare_inputs(method: Callable[..., Any], trainer: Any, model: Any, inputs: Any) -> Any:
    """``Trainer._prepare_context_parallel_inputs``: a context for the step, and its inputs."""
    if not _is_ours():
        return method(trainer, model, inputs)
    of_outputs = getattr(trainer, "label_smoother", None) is not None or getattr(trainer, "compute_loss_func", None) is not None
    if not torch.is_grad_enabled() or (of_outputs and "labels" in inputs):
        return nullcontext, inputs
    divided = divided_forwards(trainer.accelerator.unwrap_model(model))
    if divided is None:
        raise StateError("Trainer trains a model under context parallelism that no engine has prepared")
    parts = divided.parts_of(dict(inputs))
    return partial(sliced_step, parts["position_ids"].shape[1]), parts


def _groups_of(accelerator: Any) -> ContextParallel:
    engine = getattr(getattr(accelerator, "deepspeed_engine_wrapped", None), "engine", None)
    groups = getattr(engine, "sequence_parallel", None)
    if not isinstance(groups, ContextParallel):
        raise StateError("maybe_context_parallel needs a model that accelerator.prepare() has made an engine of, under context parallelism")
    return groups


def _is_ours() -> bool:
    mesh = mesh_here()
    return mesh is not None and mesh.cp > 1
