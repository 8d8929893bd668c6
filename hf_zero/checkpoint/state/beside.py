"""States that are restored with an engine but are no part of its checkpoint format: random generators, and objects of the script.

Random generators are Python's, NumPy's, torch's on the host and the device, and named states. A checkpoint of an engine with rewinds
(``spike_action: "rewind"``) holds these states in its client state, under a key of ours that no caller of ``load_checkpoint`` sees; a
snapshot holds them beside the client state. Under the same key a replica group holds the numbers of the batches that are taken.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from hf_zero.activation_checkpointing.random_states import random_states
from hf_zero.errors import CheckpointError
from hf_zero.observe import log_rank0

_NUMPY = "MT19937"  # the only kind of NumPy's global generator
_KEY = "hf_zero.beside"
_BATCHES = "batches"


class Batches(Protocol):
    """The batches of a run by their numbers, where the engine and not the script knows which of them are taken."""

    def batches(self) -> dict[str, Any]:
        """Return the batches after the last step, as plain JSON values."""

    def continue_with(self, batches: Mapping[str, Any]) -> None:
        """Continue with the batches of a loaded checkpoint, unless this process has read batches already."""


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators that a training step draws from, as plain values and tensors on the host.

    Args:
        device: Device of this rank.
    """
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "device": None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device),
        "named": {name: state.clone() for name, state in random_states().get_states().items()},
    }


def restore_generators(states: Mapping[str, Any], device: torch.device) -> None:
    """Set all generators to states of ``generator_states``; the device's is left alone where it was saved on another kind of device."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((_NUMPY, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if states["device"] is not None and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states["device"], device)
    random_states().set_states(states["named"])


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
        log_rank0("the states were saved by %d ranks, but this run has %d: random generators are not restored", states["ranks"], world)


def joined(client_state: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, Any]:
    """Return a client state with the states of ``states_beside``, or with the values of ``with_batches``, in it."""
    return {**client_state, _KEY: dict(states)}


def divided(client_state: Any) -> tuple[Any, dict[str, Any] | None]:
    """Return the caller's part of a loaded client state, and the states of ``states_beside`` in it; None if it has none."""
    if not isinstance(client_state, dict) or _KEY not in client_state:
        return client_state, None
    found = client_state[_KEY]
    return {key: value for key, value in client_state.items() if key != _KEY}, found if "random" in found else None


def with_batches(client_state: Mapping[str, Any], batches: Batches) -> dict[str, Any]:
    """Return a client state with the numbers of ``batches`` in it."""
    return joined(client_state, {_BATCHES: batches.batches()})


def batches_in(client_state: Any) -> Mapping[str, Any] | None:
    """Return the numbers of batches in a loaded client state; None if it has none."""
    found = client_state.get(_KEY) if isinstance(client_state, dict) else None
    return None if found is None else found.get(_BATCHES)
