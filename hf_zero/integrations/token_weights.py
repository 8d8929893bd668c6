"""Weigh the micro-steps of transformers' Trainer by their labels under sequence parallelism, as on one rank.

On one rank Trainer divides the sum of all tokens' losses by the number of labels in all micro-steps of an update. Under sequence
parallelism (``ParallelismConfig(sp_size=...)``) it takes the mean over each micro-step's labels, because a loader of slices has
``shift_labels`` instead of ``labels``: rows with few labels, as in fine-tuning on completions, weigh too much. Here the labels are counted
once for all micro-steps of an update, and each mean is multiplied by its share of them.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from hf_zero.errors import UnsupportedError

_SHARES = "_hf_zero_shares"  # attribute of a Trainer: factors of the losses of the coming micro-steps
_LABELS = "shift_labels"
_IGNORED = -100


def count_labels(method: Callable[..., Any], trainer: Any, batches: list[Any], device: torch.device) -> Any:
    """Replace ``Trainer._get_num_items_in_batch``: also note the share of each micro-step's labels under sequence parallelism; collective.

    Raises:
        UnsupportedError: The Trainer has a loss of its own, which transformers does not call under sequence parallelism.
    """
    found = method(trainer, batches, device)
    if not _on_slices(trainer):
        return found
    _require_own_loss(trainer)
    shares: deque[torch.Tensor] = deque()
    if batches and _counts_tokens(trainer) and all(isinstance(batch.get(_LABELS), torch.Tensor) for batch in batches):
        counts = torch.zeros(1, max(trainer.args.gradient_accumulation_steps, len(batches)), device=device)
        for index, batch in enumerate(batches):
            counts[0, index] = (batch[_LABELS] != _IGNORED).sum()
        size = trainer.get_sp_size()
        everywhere = trainer.accelerator.gather(counts)
        groups = everywhere.view(-1, size, counts.shape[1]).sum(1)  # the ranks of a group, which are adjacent, have slices of the same rows
        own = groups[trainer.accelerator.process_index // size]
        if trainer.args.average_tokens_across_devices:
            own = own * (len(groups) / groups.sum().clamp(min=1))  # the gradients of the groups are averaged
        else:
            own = own / own.sum().clamp(min=1)
        shares.extend(own[: len(batches)])
    vars(trainer)[_SHARES] = shares
    return found


def compute_loss(
    method: Callable[..., Any],
    trainer: Any,
    model: Any,
    inputs: Any,
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
    **more: Any,
) -> Any:
    """Replace ``Trainer.compute_loss``: multiply the loss of a micro-step by its share of the labels under sequence parallelism."""
    found = method(trainer, model, inputs, return_outputs, num_items_in_batch, **more)
    shares = vars(trainer).get(_SHARES)
    if not shares or not trainer.model.training or not _on_slices(trainer):
        return found
    factor = shares.popleft()
    if not _is_scaled(trainer, num_items_in_batch):  # Trainer then takes the mean over micro-steps
        factor = factor * trainer.current_gradient_accumulation_steps
    loss = (found[0] if return_outputs else found) * factor
    return (loss, *found[1:]) if return_outputs else loss


def _on_slices(trainer: Any) -> bool:
    sizes = getattr(trainer.accelerator, "parallelism_config", None)
    return sizes is not None and bool(getattr(sizes, "sp_enabled", False)) and sizes.sp_backend == "deepspeed"


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
            f"{' and '.join(given)} has no effect under sequence parallelism (sp_size {trainer.get_sp_size()}): transformers takes the "
            "model's own loss of slices there. Use context parallelism instead, which computes losses from outputs of whole sequences "
            f'("hf_zero": {{"context_parallel_size": {trainer.get_sp_size()}}} in the configuration, without sp_size), or leave it out'
        )
