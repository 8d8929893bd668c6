"""Random numbers of forwards over slices."""

from __future__ import annotations

import torch

from hf_zero.comm.collectives import Collectives


class Randomness:
    """[Note: dropout over slices]

    Scripts set one seed on every rank. The ranks of a group would then draw one mask of dropout for all slices of a sequence and for all
    groups of heads. So each rank draws from a stream of its own during the forward, which begins at a number drawn from the common one:
    that goes on alike on all ranks, for whatever the script draws from it, and is what checkpoints hold. Ranks that were seeded
    differently stay so.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._rank = collectives.rank
        self._device = collectives.topology.device
        self._outer: list[torch.Tensor] | None = None

    def enter(self, training: bool) -> None:
        """Begins the rank's own stream; evaluation draws nothing."""
        if not training:
            return
        start = int(torch.randint(2**31, ()))
        self._outer = [torch.get_rng_state()]
        own = torch.Generator().manual_seed(start * 1024 + self._rank)
        torch.set_rng_state(own.get_state())
        if self._device.type != "cpu":
            module = getattr(torch, self._device.type)
            self._outer.append(module.get_rng_state(self._device))
            module.set_rng_state(torch.Generator(self._device).manual_seed(start * 1024 + self._rank).get_state(), self._device)

    def leave(self) -> None:
        """Goes on with the common stream."""
        if self._outer is None:
            return
        torch.set_rng_state(self._outer[0])
        if len(self._outer) > 1:
            getattr(torch, self._device.type).set_rng_state(self._outer[1], self._device)
        self._outer = None
