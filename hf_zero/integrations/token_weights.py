"""Count the labels of an update of transformers' Trainer as on one rank, where ranks share samples.

On one rank Trainer divides the sum of all tokens' losses by the number of labels in all micro-steps of an update. Under sequence
parallelism (``ParallelismConfig(sp_size=...)``) it takes the mean over each micro-step's labels, because a loader of slices has
``shift_labels`` instead of ``labels``: rows with few labels, as in fine-tuning on completions, weigh too much. Here the labels are counted
once for all micro-steps of an update, and each mean is multiplied by its share of them. With ``average_tokens_across_devices=False`` each
rank counts its own samples; Trainer divides this number by the ranks that share them all the same, which is undone.

transformers before 5.19 counts each label once for every rank that has it, and multiplies losses by all ranks. Here the count is divided by
the ranks with the same samples, and a loss by the ranks that compute the whole of it, as later versions do.
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from hf_zero.errors import UnsupportedError
from hf_zero.integrations.context import cuts_batches
from hf_zero.integrations.pipelines import mesh_here, parts_here, sharing_parts_here, stages_here
from hf_zero.sequence_parallel.batches import labels_behind

_SHARES = "_hf_zero_shares"  # attribute of a Trainer: factors of the losses of the coming micro-steps
_SHARING = ("get_tp_size", "get_cp_size", "get_sp_size")  # methods of Trainer by which it divides a count
_LABELS = "shift_labels"
_IGNORED = -100


def count_labels(method: Callable[..., Any], trainer: Any, batches: list[Any], device: torch.device) -> Any:
    """Replace ``Trainer._get_num_items_in_batch``: count each label once. In training over slices also note the share that each micro-step
    has of the labels; collective there.

    Raises:
        UnsupportedError: The Trainer has a loss of its own, which transformers does not call under sequence parallelism.
    """
    divides = mesh_here() is None or _on_slices(trainer) or _divides_by_sizes(method)
    with nullcontext() if divides else _without_sizes(trainer.accelerator):
        found = method(trainer, batches, device)
    if isinstance(found, torch.Tensor) and mesh_here() is not None:
        found = _once_each(method, trainer, batches, found, divides)
    if not _on_slices(trainer) or not torch.is_grad_enabled():  # evaluation is over whole sequences
        return found
    _require_own_loss(trainer)
    shares: deque[torch.Tensor] = deque()
    if batches and _counts_tokens(trainer) and all(isinstance(batch.get(_LABELS), torch.Tensor) for batch in batches):
        counts = torch.zeros(1, 2, max(trainer.args.gradient_accumulation_steps, len(batches)), device=device)
        for index, batch in enumerate(batches):
            for kind, labels in enumerate((batch[_LABELS], _counted(trainer, batch[_LABELS]))):
                counts[0, kind, index] = (labels != _IGNORED).sum()
        size = trainer.get_sp_size()
        everywhere = trainer.accelerator.gather(counts)
        groups = everywhere.unflatten(0, (-1, size)).sum(1)  # the ranks of a group, which are adjacent, have slices of the same rows
        predicted, counted = groups[trainer.accelerator.process_index // size]
        total = counted.sum()
        if trainer.args.average_tokens_across_devices:
            total = groups[:, 1].sum() / len(groups)  # the gradients of the groups are averaged
        own = predicted / total.clamp(min=1)
        shares.extend(own[: len(batches)])
    vars(trainer)[_SHARES] = shares
    return found


def _once_each(method: Callable[..., Any], trainer: Any, batches: list[Any], found: torch.Tensor, divided: bool) -> torch.Tensor:
    """Return the number of labels that a rank's loss is divided by.

    Args:
        method: Trainer's own, which has counted.
        trainer: The Trainer.
        batches: The micro-steps of an update.
        found: The labels of all ranks, or of this one (``average_tokens_across_devices=False``).
        divided: ``found`` is divided by the ranks that share samples, as far as ``method`` knows them.
    """
    if trainer.args.average_tokens_across_devices:
        return found if divided else found / (_undivided_ranks() * parts_here())
    names = _names_in(method)
    found = found * math.prod(getattr(trainer, name)() for name in _SHARING if name in names)
    # Ranks that compute parts of a loss add them up; others compute the whole one.
    return found / parts_here() if batches and cuts_batches(trainer, batches[0]) else found


def _divides_by_sizes(method: Callable[..., Any]) -> bool:
    """Return whether ``method`` divides by the ranks that share samples; transformers before 5.19 only by a ``ParallelismConfig``."""
    return _SHARING[0] in _names_in(method)


def _names_in(method: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of attributes and functions that the code of Trainer's own ``method`` uses."""
    return inspect.unwrap(method).__code__.co_names


@contextmanager
def _without_sizes(accelerator: Any) -> Iterator[None]:
    """Hide the ``ParallelismConfig``, by which transformers before 5.19 would divide a count, and round the quotient down."""
    sizes = getattr(accelerator, "parallelism_config", None)
    if sizes is None:
        yield
        return
    accelerator.state.parallelism_config = None
    try:
        yield
    finally:
        accelerator.state.parallelism_config = sizes


def _undivided_ranks() -> int:
    """Return the number of ranks that have the same, undivided samples: those of tensor parallelism and of pipelines."""
    return int(getattr(mesh_here(), "tp", 1)) * stages_here()


def compute_loss(
    method: Callable[..., Any],
    trainer: Any,
    model: Any,
    inputs: Any,
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
    **more: Any,
) -> Any:
    """Replace ``Trainer.compute_loss``: multiply the loss of a micro-step by its share of the labels under sequence parallelism, and divide
    it by the ranks with the same samples if Trainer has multiplied it by them (transformers before 5.19).
    """
    found = method(trainer, model, inputs, return_outputs, num_items_in_batch, **more)
    factor: Any = 1 / _ranks_in_loss(method, trainer, num_items_in_batch)
    shares = vars(trainer).get(_SHARES)
    if shares and trainer.model.training and _on_slices(trainer):
        factor = shares.popleft()
        if not _is_scaled(trainer, num_items_in_batch):  # Trainer then takes the mean over micro-steps
            factor = factor * trainer.current_gradient_accumulation_steps
    elif factor == 1:
        return found
    loss = (found[0] if return_outputs else found) * factor
    return (loss, *found[1:]) if return_outputs else loss


def _ranks_in_loss(method: Callable[..., Any], trainer: Any, num_items_in_batch: Any) -> int:
    """Return the factor by which the loss of ``method`` is too large: transformers before 5.19 multiplies it by all ranks, also by those
    with the same samples. The later of these versions leave out those of a ``ParallelismConfig(tp_size=...)``.
    """
    averages = trainer.args.average_tokens_across_devices and (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func)
    if mesh_here() is None or not averages or num_items_in_batch is None or _divides_by_sizes(method):
        return 1
    sizes = getattr(trainer.accelerator, "parallelism_config", None)
    left_out = getattr(sizes, "tp_size", 1) if "tp_size" in _names_in(method) else 1
    return _undivided_ranks() * sharing_parts_here() // left_out


def _on_slices(trainer: Any) -> bool:
    sizes = getattr(trainer.accelerator, "parallelism_config", None)
    return sizes is not None and bool(getattr(sizes, "sp_enabled", False)) and sizes.sp_backend == "deepspeed"


def _counted(trainer: Any, shifted: torch.Tensor) -> torch.Tensor:
    """Return the labels that Trainer counts on one rank: with the first of each row, which nothing predicts, unless it knows the loss."""
    own = None if getattr(trainer, "_loss_shifts_labels", False) else labels_behind(shifted)
    return shifted if own is None else own


def _counts_tokens(trainer: Any) -> bool:
    """Return whether Trainer would divide the losses of this model by their number of tokens on one rank."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if hasattr(model, "accepts_loss_kwargs"):
        return bool(model.accepts_loss_kwargs)
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(type(model).forward).parameters.values())


def _is_scaled(trainer: Any, num_items_in_batch: Any) -> bool:
    """Return whether Trainer takes a loss as one that is divided by the number of micro-steps already."""
    said = getattr(trainer, "loss_is_scaled_for_ga", None)
    return (trainer.model_accepts_loss_kwargs and num_items_in_batch is not None) if said is None else bool(said)


def _require_own_loss(trainer: Any) -> None:
    named = {"label_smoothing_factor": trainer.label_smoother, "compute_loss_func": trainer.compute_loss_func}
    given = [name for name, value in named.items() if value is not None]
    if given:
        raise UnsupportedError(
            f"{' and '.join(given)} has no effect under sequence parallelism (sp_size {trainer.get_sp_size()}): transformers uses the "
            "model's own loss on slices there. Use context parallelism instead, which computes losses from outputs of whole sequences "
            f'("hf_zero": {{"context_parallel_size": {trainer.get_sp_size()}}} in the configuration, without sp_size), or leave it out'
        )
