"""States that go back with an engine although no checkpoint format of the engine holds them: random generators, and objects of the script.

A checkpoint of an engine that may go back (``spike_action: "rewind"``) holds them in its client state, under a key of ours that no caller
of ``load_checkpoint`` sees; a snapshot holds them beside the client state.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_zero.checkpoint.state.random_generators import generator_states, restore_generators
from hf_zero.errors import CheckpointError
from hf_zero.observe import log_rank0

_KEY = "hf_zero.beside"


def states_beside(objects: Sequence[Any], device: torch.device, world: int) -> dict[str, Any]:
    """Return the states of this rank as values that a client state can hold.

    Args:
        objects: Objects with ``state_dict`` and ``load_state_dict``: schedulers that the script or its library steps.
        device: Device of this rank.
        world: Number of ranks that save together.
    """
    return {
        "random": generator_states(device),
        "ranks": world,
        "objects": [copy.deepcopy(one.state_dict()) for one in objects],
    }


def restore_beside(states: Mapping[str, Any], objects: Sequence[Any], device: torch.device, world: int) -> None:
    """Give the states of ``states_beside`` back; local. With another number of ranks the random generators stay as they are.

    Raises:
        CheckpointError: They are of another number of objects.
    """
    saved = states["objects"]
    if len(saved) != len(objects):
        raise CheckpointError(
            f"{len(saved)} objects of the script were saved beside the engine, and {len(objects)} are registered now: register all "
            "schedulers with engine.rewind_also() before the first step"
        )
    for one, state in zip(objects, saved, strict=True):
        one.load_state_dict(state)
    if states["ranks"] == world:
        restore_generators(states["random"], device)
    else:
        log_rank0("the saved states are of %d ranks, these are %d: random generators stay as they are", states["ranks"], world)


def joined(client_state: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, Any]:
    """Return a client state with the states of ``states_beside`` in it."""
    return {**client_state, _KEY: dict(states)}


def divided(client_state: Any) -> tuple[Any, dict[str, Any] | None]:
    """Return the caller's part of a loaded client state, and the states of ``states_beside`` in it; None if it has none."""
    if not isinstance(client_state, dict) or _KEY not in client_state:
        return client_state, None
    return {key: value for key, value in client_state.items() if key != _KEY}, client_state[_KEY]
