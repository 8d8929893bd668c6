"""Run the context parallelism of accelerate and Trainer with an engine: cut the batch that all ranks of a group share.

[Note: context parallelism of accelerate] accelerate's own implementation patches torch's attention, drops masks, and treats each rank's
loss as the mean of its part. Here ``maybe_context_parallel`` cuts the buffers in place, as accelerate documents it, and hooks of the model
do the rest (``sequence_parallel/context_forward.py``). Trainer's batches are cut by the names of their tensors, which determine the
padding. If Trainer computes a loss from outputs (label smoothing, ``compute_loss_func``), or the model's forward is a script's own, batches
are not cut, because the loss needs complete outputs. Evaluation uses complete sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from hf_zero.errors import ConfigError, StateError
from hf_zero.integrations.parallelism import require_same_attention
from hf_zero.integrations.pipelines import mesh_here
from hf_zero.sequence_parallel.batches import copy_marks
from hf_zero.sequence_parallel.context_forward import divided_forwards, sliced_step
from hf_zero.sequence_parallel.joining import Layout
from hf_zero.sequence_parallel.state import ContextParallel


def prepare(method: Callable[..., Any], accelerator: Any, *args: Any) -> Any:
    """Replace ``Accelerator._prepare_cp``, which prepares torch's context parallelism: skip it, because the engine divides sequences.

    Raises:
        ConfigError: A model has another attention implementation than the ``sp_handler`` names.
    """
    if not _is_ours():
        return method(accelerator, *args)
    require_same_attention(accelerator.parallelism_config, (given for given in args if isinstance(given, torch.nn.Module)))
    return args


def maybe_context_parallel(
    method: Callable[..., Any],
    accelerator: Any,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[torch.Tensor] | None = None,
) -> AbstractContextManager[Any]:
    """Replace ``Accelerator.maybe_context_parallel``: return a context in which each buffer has only this rank's part of its sequence.

    Raises:
        ConfigError: The numbers of buffers and of ``buffer_seq_dims`` differ, or a length is not divisible.
        StateError: The Accelerator has not prepared an engine.
    """
    if not _is_ours():
        found: AbstractContextManager[Any] = method(accelerator, buffers, buffer_seq_dims, no_restore_buffers)
        return found
    return _cut_in_place(_groups_of(accelerator).layout, list(buffers or ()), list(buffer_seq_dims or ()), no_restore_buffers or set())


@contextmanager
def _cut_in_place(layout: Layout, buffers: list[torch.Tensor], dims: list[int], keep: set[torch.Tensor]) -> Iterator[None]:
    """Replace every buffer by this rank's part inside the context; at the end restore all buffers except those in ``keep``."""
    if len(buffers) != len(dims):
        raise ConfigError(
            f"maybe_context_parallel got {len(buffers)} buffers and {len(dims)} buffer_seq_dims; pass one dimension per buffer"
        )
    for buffer, dim in zip(buffers, dims, strict=True):
        if buffer.shape[dim] % layout.multiple:
            raise ConfigError(
                f"maybe_context_parallel got a buffer of shape {tuple(buffer.shape)}, whose dimension {dim} is not a multiple of "
                f"{layout.multiple} (two parts of a sequence for each of {layout.collectives.world} ranks). Pad batches to a multiple "
                f"(pad_to_multiple_of={layout.multiple}), or remove this context and pass complete batches to the model"
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


def cuts_batches(trainer: Any, inputs: Any) -> bool:
    """Return whether a rank of context parallelism gets its part of ``inputs``: in training, unless a loss needs whole sequences."""
    divided = divided_forwards(trainer.model) if _is_ours() else None
    if divided is not None and divided.inside:
        return False
    of_outputs = getattr(trainer, "label_smoother", None) is not None or getattr(trainer, "compute_loss_func", None) is not None
    return torch.is_grad_enabled() and not (of_outputs and "labels" in inputs)


def prepare_inputs(method: Callable[..., Any], trainer: Any, model: Any, inputs: Any) -> Any:
    """Replace ``Trainer._prepare_context_parallel_inputs``: return a context for the training step, and this rank's part of its inputs."""
    if not _is_ours():
        return method(trainer, model, inputs)
    if not cuts_batches(trainer, inputs):
        return nullcontext, inputs
    divided = divided_forwards(trainer.accelerator.unwrap_model(model))
    if divided is None:
        raise StateError(
            "context parallelism is on, but no engine has prepared the model of this Trainer. Set deepspeed= in TrainingArguments"
        )
    parts = divided.parts_of(dict(inputs))
    return partial(sliced_step, parts["position_ids"].shape[1]), parts


def keep_marks(method: Callable[..., Any], trainer: Any, inputs: Any) -> Any:
    """Replace ``Trainer._prepare_inputs``, which copies a batch to a device: the copy keeps the marks of a slice and of its
    positions.
    """
    found = method(trainer, inputs)
    if isinstance(inputs, Mapping) and isinstance(found, Mapping):
        copy_marks(inputs, found)
    return found


def _groups_of(accelerator: Any) -> ContextParallel:
    engine = getattr(getattr(accelerator, "deepspeed_engine_wrapped", None), "engine", None)
    groups = getattr(engine, "sequence_parallel", None)
    if not isinstance(groups, ContextParallel):
        raise StateError(
            "maybe_context_parallel needs an engine with context parallelism, but there is none; call accelerator.prepare(model, ...) first"
        )
    return groups


def _is_ours() -> bool:
    mesh = mesh_here()
    return mesh is not None and mesh.cp > 1
