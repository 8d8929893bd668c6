"""Read the param groups of a torch optimizer: the group of each parameter, and the learning rate of each group."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from hf_zero.errors import ConfigError


def learning_rates(groups: Iterable[dict[str, Any]]) -> list[float]:
    """Return the learning rate of each param group; nan if the optimizer sets it itself (Adafactor with ``relative_step``)."""
    return [math.nan if group["lr"] is None else float(group["lr"]) for group in groups]


def group_of_params(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[int, int]:
    """Return the index of the param group of each parameter of the optimizer, by id, frozen ones included.

    Raises:
        ConfigError: The optimizer holds a tensor that is not a parameter of the model, or has been stepped before.
    """
    if not _is_fresh(optimizer):
        raise ConfigError(
            f"the {type(optimizer).__name__} given to initialize() already has state for {len(optimizer.state)} parameters; "
            "pass a new optimizer, and resume with load_checkpoint()"
        )
    groups: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in names:
                raise ConfigError(
                    f"parameter {position} of param group {index} (shape {tuple(param.shape)}) of the optimizer is not a parameter of the "
                    "model; build the optimizer from the parameters of the model that is passed to initialize()"
                )
            groups[id(param)] = index
    return groups


def _is_fresh(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer was never stepped. Adagrad fills its state at construction, with step 0; entries without content, which
    a look at ``state`` has left (``train()`` of schedule-free optimizers), are removed.
    """
    for param in [param for param, state in optimizer.state.items() if not state]:
        del optimizer.state[param]
    return all("step" in state and float(state["step"]) == 0 for state in optimizer.state.values())
