"""Named states of the random number generator, so that dropout can differ inside split layers and agree outside.

Ranks that hold one layer together need equal masks where their activations are copies of each other and different ones where
each has a part. The default generator gives the first; a named state, seeded by rank, the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_zero.comm.device import default_device
from hf_zero.errors import StateError

MODEL_PARALLEL = "model-parallel-rng"
# Keeps the seeds of split layers away from those of everything else.
_OFFSET = 2718


class RandomStates:
    """States of this rank's default generator under names; ``fork`` runs code under one of them."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forgets all names."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """A copy of the table."""
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replaces the table."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Begins a state from a seed; the generator itself stays as it is.

        Raises:
            StateError: The name or the seed is taken: two names with one seed would draw the same numbers.
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
        """Draws from the state ``name`` inside the ``with``, and keeps where it got to.

        Raises:
            StateError: Nothing was added under that name.
        """
        if name not in self._states:
            known = ", ".join(sorted(self._states)) or "none"
            raise StateError(f"no random state {name!r}; there are: {known}. Call model_parallel_cuda_manual_seed(seed) first")
        before = _get_state()
        _set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _get_state()
            _set_state(before)


_states = RandomStates()


def random_states() -> RandomStates:
    """Return the states of this process; activation checkpointing restores them for recomputation."""
    return _states


def seed_model_parallel(seed: int, model_rank: int) -> None:
    """Seeds the default generator with ``seed`` and the state of split layers with one that differs per model rank."""
    _states.reset()
    torch.manual_seed(seed)  # all devices
    _states.add(MODEL_PARALLEL, seed + _OFFSET + model_rank)


def _get_state() -> torch.Tensor:
    device = default_device()  # of this rank, which need not be the current one
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _set_state(state: torch.Tensor) -> None:
    device = default_device()
    torch.set_rng_state(state) if device.type == "cpu" else torch.get_device_module(device).set_rng_state(state, device)
