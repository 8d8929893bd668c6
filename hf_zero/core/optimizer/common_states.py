"""Handle state that an optimizer keeps for all parameters together, under keys that are texts (MADGRAD's count ``state["k"]``).

Each rank has it whole, and it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch


def common_states(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the states under keys that are texts, live values; does not wait for updates."""
    state: Any = optimizer.state
    return {key: value for key, value in dict.items(state) if isinstance(key, str)}


def states_by_param(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """Return the states of single parameters, live; does not wait for updates."""
    return {key: value for key, value in dict.items(optimizer.state) if isinstance(key, torch.Tensor)}


def set_common_states(optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> None:
    """Replace all states under keys that are texts with copies of ``values``."""
    state: dict[Any, Any] = optimizer.state
    for key in common_states(optimizer):
        dict.pop(state, key)
    for key, value in values.items():
        dict.__setitem__(state, key, deepcopy(value))
