"""Report parameters that had no gradient in a step, as an error or a warning."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from hf_zero.comm.collectives import Collectives
from hf_zero.core.schedule.gradients import UnitGradients
from hf_zero.errors import StateError
from hf_zero.observe import warn_once


def require_all(gradients: Iterable[UnitGradients], data: Collectives, model: Collectives | None) -> None:
    """Check that every parameter had a gradient on every rank since the last step; collective.

    Args:
        gradients: Gradients of the trained units.
        data: Network of the data-parallel ranks.
        model: Network of the ranks that hold other parts of the model; None without.

    Raises:
        StateError: On every rank, if a rank had no gradient of a parameter; names it.
    """
    unused = [name for entry in gradients for name in entry.collected.unused()]
    by_rank = data.gather_objects(unused, "parameters without gradient")
    if model is not None:
        by_rank = [line for part in model.gather_objects(by_rank, "parameters without gradient") for line in part]
    # In the model's order, each once; every rank has the same lists.
    names = list(dict.fromkeys(name for line in by_rank for name in line))
    if names:
        ranks = [rank for rank, line in enumerate(by_rank) if line]
        raise StateError(
            f"{', '.join(names)}: no gradient in this step on rank(s) {', '.join(map(str, ranks))} of {len(by_rank)}, and "
            "zero_optimization.ignore_unused_parameters is false. Let the loss depend on them, freeze them before initialize(), or "
            "set the key to true: a parameter without a gradient on any rank is then left as it is"
        )


def warn_of_decay(
    gradients: Iterable[UnitGradients],
    shards: Iterable[torch.Tensor],
    groups: Sequence[Mapping[str, Any]],
    resting: Mapping[int, Collection[int]],
) -> None:
    """Warn of parameters that get weight decay though they had no gradient since the last step, as far as this rank can tell; local.

    A gradient from another rank shows in this rank's part of the sum, if this rank has a part of the parameter.

    Args:
        gradients: Gradients of the trained units.
        shards: Their reduced gradients, 1D each, in the same order.
        groups: Param groups of the optimizer.
        resting: Positions of the parameters that are not updated, by id of their unit.
    """
    names = []
    for entry, shard in zip(gradients, shards, strict=True):
        if type(shard) is not torch.Tensor:
            return  # a plan's tensors have no values
        unused = set(entry.collected.unused())
        for index, slot in enumerate(entry.unit.layout.slots if unused else ()):
            if index in resting.get(id(entry.unit), ()):
                continue
            if slot.name in unused and groups[slot.group].get("weight_decay") and not entry.unit.shard_part(index, shard).any():
                names.append(slot.name)
    if names:
        shown = ", ".join([*names[:3], *["..."] * bool(names[3:])])
        warn_once(
            f"{len(names)} parameter(s) had no gradient on this rank in the first step ({shown}). "
            "Their weight decay applies even if no rank has a gradient of them: with OneBitAdam, with replica groups, for weights that "
            "several stages of a pipeline hold, and if their optimizer states share a file with those of others (offload to nvme), the "
            "engine cannot skip them as plain PyTorch does. Freeze parameters that the loss never uses: requires_grad_(False)"
        )
