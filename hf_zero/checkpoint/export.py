"""Whole weights from a sharded model: a plain state dict on rank 0, gathered unit by unit."""

from __future__ import annotations

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.sharding.unit import Unit, find_unit


def consolidated_state_dict(
    module: nn.Module, collectives: Collectives, exclude_frozen_parameters: bool = False
) -> dict[str, torch.Tensor] | None:
    """The state dict of ``module`` with whole parameters of the training type, on the host; collective.

    At any time one unit is gathered. Every entry has a storage of its own; tied parameters share one tensor.

    Args:
        module: The user's module; its parameters may be released.
        collectives: The axis it is divided over.
        exclude_frozen_parameters: Leave out parameters that need no gradient (a PEFT base model).

    Returns:
        The dict on rank 0, None on every other rank.
    """
    entries = {
        name: value
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and not (exclude_frozen_parameters and _is_frozen(value))
    }
    writes = collectives.rank == 0
    copies: dict[int, torch.Tensor] = {}
    for unit, members in _by_unit(list(entries.values())):
        with unit.gathered():
            if writes:
                copies.update({id(param): _host_copy(param) for param in members})
    if not writes:
        return None
    for value in entries.values():
        if id(value) not in copies:
            copies[id(value)] = _host_copy(value)
    return {name: copies[id(value)] for name, value in entries.items()}


def _by_unit(values: list[torch.Tensor]) -> list[tuple[Unit, list[torch.Tensor]]]:
    """Units that hold any of ``values``, with the ones they hold, in the order they first appear: the same on every rank."""
    found: dict[int, tuple[Unit, list[torch.Tensor]]] = {}
    for value in values:
        owner = find_unit(value)
        if owner is not None:
            found.setdefault(id(owner[0]), (owner[0], []))[1].append(value)
    return list(found.values())


def _is_frozen(value: torch.Tensor) -> bool:
    return isinstance(value, nn.Parameter) and not value.requires_grad


def _host_copy(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to("cpu", copy=True).contiguous()
