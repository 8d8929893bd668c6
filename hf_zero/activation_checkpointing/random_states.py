"""Keep named states of the random number generator, so that dropout differs between ranks inside split layers and is equal outside.

Ranks that hold one layer together need equal dropout masks for activations that are copies of each other, and different masks for
activations of which each rank has a part. The default generator gives the equal masks; a named state, seeded by rank, gives the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_zero.comm.process_groups import default_device
from hf_zero.errors import StateError

MODEL_PARALLEL = "model-parallel-rng"
# Distance between the seed of split layers and the seed of the rest.
_OFFSET = 2718


class RandomStates:
    """A table of named states of this rank's default random generator; ``fork`` runs code with one of them."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Remove all named states and their seeds."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return a copy of the table: name -> state."""
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace the table by a copy of ``states``."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a state that starts from ``seed``; the generator's own state does not change.

        Raises:
            StateError: The name or the seed is in use; two names with one seed would draw the same numbers.
        """
        if name in self._states or seed in self._seeds:
            what = f"the name {name!r}" if name in self._states else f"seed {seed}"
            raise StateError(
                f"random state {name!r} with seed {seed}: {what} is already in use. Choose another, or call reset(), which "
                "removes all random states"
            )
        self._seeds.add(seed)
        before = _get_state()
        device = default_device()
        if device.type == "cpu":
            torch.manual_seed(seed)
        else:
            with torch.accelerator.device_index(device.index):
                torch.get_device_module(device).manual_seed(seed)
        self._states[name] = _get_state()
        _set_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw random numbers from the state ``name`` inside the ``with`` block, and store the advanced state at its end.

        Raises:
            StateError: There is no state of that name.
        """
        if name not in self._states:
            known = ", ".join(sorted(self._states)) or "none"
            raise StateError(f"there is no random state {name!r}, only: {known}. Call model_parallel_cuda_manual_seed(seed) first")
        before = _get_state()
        _set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _get_state()
            _set_state(before)


_states = RandomStates()


def random_states() -> RandomStates:
    """Return the table of named random states of this process; activation checkpointing restores it for recomputation."""
    return _states


def seed_model_parallel(seed: int, model_rank: int) -> None:
    """Seed the default generator with ``seed``, and the state of split layers with a seed that depends on ``model_rank``."""
    _states.reset()
    torch.manual_seed(seed)  # all devices
    _states.add(MODEL_PARALLEL, seed + _OFFSET + model_rank)


def _get_state() -> torch.Tensor:
    device = default_device()  # device of this rank, which may not be the current device
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _set_state(state: torch.Tensor) -> None:
    device = default_device()
    torch.set_rng_state(state) if device.type == "cpu" else torch.get_device_module(device).set_rng_state(state, device)
