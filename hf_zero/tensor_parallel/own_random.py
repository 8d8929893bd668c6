"""A random stream of this rank's own among those that hold one model together."""

from __future__ import annotations

from collections.abc import Callable

import torch


def own_random(rank: int, device: torch.device) -> Callable[[], None]:
    """Gives this rank a random stream of its own until the returned function is called.

    [Note: random numbers in split modules] The seed is drawn from the common stream, so every rank draws the same number, the common stream
    goes on the same everywhere, and recomputation under activation checkpointing, which restores it, replays the same masks.

    Args:
        rank: Among the ranks of the model axis.
        device: Where numbers will be drawn.
    """
    seed = int(torch.randint(2**62, (), dtype=torch.long)) + rank + 1
    if device.type == "cpu":
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)
        return lambda: torch.set_rng_state(state)
    module = getattr(torch, device.type)
    device_state = module.get_rng_state(device)
    module.manual_seed(seed)
    return lambda: module.set_rng_state(device_state, device)
