"""Save and load optimizer states that are tensors of a library's own class (torchao's moments in 8 and 4 bits).

[Note: states in codes] A checkpoint has the plain tensors inside such a state and the name of its class. No class is looked up by that
name: the present optimizer makes a state of its own for the parameter, of its own class and block size, and takes the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hf_zero.core.optimizer.clones import state_after_a_step
from hf_zero.core.optimizer.param_states import WholeParam
from hf_zero.core.units.packed import inner_tensors, is_wrapped
from hf_zero.errors import CheckpointError

_KIND = "hf_zero_state_class"
_TENSORS = "tensors"


def unwrapped(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one parameter with plain tensors only, see [Note: states in codes]; copies no tensor."""
    return {key: _opened(value) if isinstance(value, torch.Tensor) and is_wrapped(value) else value for key, value in state.items()}


def _opened(value: torch.Tensor) -> dict[str, Any]:
    return {_KIND: type(value).__name__, _TENSORS: inner_tensors(value)}


def wrapped(state: dict[str, Any], inner: torch.optim.Optimizer, entry: WholeParam) -> dict[str, Any]:
    """Return a loaded state of one parameter as the present optimizer keeps it, see [Note: states in codes]; local.

    Args:
        state: The state, as ``unwrapped`` returned it.
        inner: The present optimizer.
        entry: The parameter.

    Raises:
        CheckpointError: The present optimizer keeps a tensor of another class, or tensors of other shapes in it.
    """
    codes = {key: value for key, value in state.items() if isinstance(value, dict) and _KIND in value}
    if not codes:
        return state
    own = state_after_a_step(inner, entry.slot.group, entry.param)
    for key, saved in codes.items():
        present = own.get(key)
        if not isinstance(present, torch.Tensor) or type(present).__name__ != saved[_KIND]:
            raise CheckpointError(
                f"the checkpoint has the optimizer state {key!r} of {entry.slot.name} as a {saved[_KIND]}, and {type(inner).__name__} "
                f"keeps a {type(present).__name__}: use the optimizer that saved it, or pass load_optimizer_states=False"
            )
        _fill(inner_tensors(present), saved[_TENSORS], f"the optimizer state {key!r} of {entry.slot.name}")
    return {key: own[key] if key in codes else value for key, value in state.items()}


def _fill(present: Mapping[str, torch.Tensor], saved: Mapping[str, Any], what: str) -> None:
    """Copy ``saved`` into the tensors inside a state.

    Raises:
        CheckpointError: Names or shapes differ, as they do with another block size.
    """
    shapes = {name: tuple(value.shape) for name, value in present.items()}
    found = {name: tuple(value.shape) for name, value in saved.items()}
    if shapes != found:
        raise CheckpointError(
            f"{what} has tensors of the shapes {found} in the checkpoint, and {shapes} with the present optimizer: give it the block_size "
            "that it was saved with, or pass load_optimizer_states=False"
        )
    for name, value in present.items():
        value.copy_(saved[name])
