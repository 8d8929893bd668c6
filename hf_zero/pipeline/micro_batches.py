"""Split a batch into parts that follow each other through a pipeline, and merge their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.system.trees import map_tensors, tensors_in

_FIRST = ("input_ids", "inputs_embeds", "pixel_values", "labels")
IGNORED = -100  # label that losses of transformers ignore
WEIGHTS = ("sum", "next tokens", "tokens", "samples")
"""How the losses of parts make up the batch's loss: a sum (``num_items_in_batch`` is given), or a mean weighted by each part's number of
labels after the first position, of labels, or of samples. Labels equal to ``IGNORED`` do not count."""


def rows_of(kwargs: Mapping[str, Any]) -> int:
    """Return the number of samples in the batch.

    Raises:
        UnsupportedError: No argument is a tensor with samples.
    """
    named = [kwargs[name] for name in _FIRST if isinstance(kwargs.get(name), torch.Tensor)]
    tensors = [*named, *(value for value in kwargs.values() if isinstance(value, torch.Tensor) and value.dim() > 0)]
    if not tensors:
        raise UnsupportedError("pipeline: none of the model's arguments is a tensor, so the batch cannot be divided")
    return int(tensors[0].shape[0])


def count_for(rows: int, wanted: int | None, stages: int) -> int:
    """Return the number of parts of a batch of ``rows``: ``wanted``, or, with None, the largest divisor of at most twice ``stages``.

    Raises:
        ConfigError: ``wanted`` does not divide ``rows``.
    """
    if wanted is None:
        return max(count for count in range(1, min(rows, 2 * stages) + 1) if rows % count == 0)
    if rows % wanted:
        usable = ", ".join(str(count) for count in range(1, rows + 1) if rows % count == 0)
        raise ConfigError(
            f"pipeline.micro_batches is {wanted}, which does not divide a batch of {rows} samples; {usable} would. Or set it "
            "to 'auto', which chooses a divisor"
        )
    return wanted


def split(kwargs: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the arguments of each part: its rows of the tensors with one row per sample, all other arguments unchanged.

    Raises:
        UnsupportedError: A tensor of more than one dimension has another number of rows.
    """
    rows = rows_of(kwargs)
    size = rows // count
    for key, tensor in tensors_in(dict(kwargs)):
        if tensor.dim() > 1 and tensor.shape[0] not in (rows, 1):
            raise UnsupportedError(
                f"pipeline: argument {key} is {tuple(tensor.shape)} in a batch of {rows} samples, so its rows cannot be shared out. Set "
                "pipeline.micro_batches to 1"
            )

    def part(index: int) -> dict[str, Any]:
        def rows_here(tensor: torch.Tensor) -> torch.Tensor:
            whole = tensor.dim() == 0 or tensor.shape[0] != rows
            return tensor if whole else tensor[index * size : (index + 1) * size]

        return {key: map_tensors(value, rows_here) for key, value in kwargs.items()}

    return [dict(kwargs)] if count == 1 else [part(index) for index in range(count)]


def weights_of(parts: Sequence[Mapping[str, Any]], how: str) -> list[float] | torch.Tensor:
    """Return the weight of each part's loss, shape (parts,)."""
    if how == "sum":
        return [1.0] * len(parts)
    if how == "samples":
        return [1.0 / len(parts)] * len(parts)
    labels = [part["labels"][..., 1:] if how == "next tokens" else part["labels"] for part in parts]
    counts = torch.stack([(label != IGNORED).sum() for label in labels]).float()
    return counts / counts.sum()


def possible_weights(kwargs: Mapping[str, Any]) -> list[str]:
    """Return the entries of ``WEIGHTS`` that may be right for a batch, the likeliest first."""
    labels = kwargs.get("labels")
    if kwargs.get("num_items_in_batch") is not None:
        return ["sum"]
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return ["samples"]
    return ["next tokens", "tokens", "samples"] if labels.dim() > 1 else ["tokens", "samples"]


def loss_of(result: Any) -> torch.Tensor | None:
    """Return the loss in a model's result: the entry ``loss`` of a mapping, or else the first tensor if it is 0-dim."""
    if isinstance(result, Mapping):
        found = result.get("loss")
        return found if isinstance(found, torch.Tensor) else None
    first = next((tensor for _, tensor in tensors_in(result)), None)
    return first if first is not None and first.dim() == 0 else None


def mergeable(result: Any, rows: int) -> bool:
    """Return whether the results of parts can be merged: each tensor is the loss or has a row per sample."""
    loss = loss_of(result)
    return all(tensor is loss or (tensor.dim() > 0 and tensor.shape[0] == rows) for _, tensor in tensors_in(result))


def merge(results: Sequence[Any], weights: Sequence[float] | torch.Tensor) -> Any:
    """Return the results of all parts as one: rows concatenated, losses summed with ``weights``; differentiable."""
    if len(results) == 1:
        return results[0]
    loss = loss_of(results[0])
    columns = list(zip(*([tensor for _, tensor in tensors_in(result)] for result in results), strict=True))
    merged = iter(sum(map(_weighted, column, weights)) if column[0] is loss else torch.cat(column) for column in columns)
    return map_tensors(results[0], lambda _: next(merged))


def _weighted(value: torch.Tensor, weight: float | torch.Tensor) -> torch.Tensor:
    """Return a part's summand of the batch's loss; 0 where the part has no label, as its own mean is no number then."""
    return (torch.where(weight > 0, value, 0) if isinstance(weight, torch.Tensor) else value) * weight
