"""Where a unit's shard rests between uses: on the training device; offload has other places."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from hf_zero.core.units.state import UnitState


class ShardOwner(Protocol):
    """What a storage needs to know of a unit.

    Attributes:
        state: Where the parameters are.
    """

    state: UnitState

    @property
    def shard(self) -> torch.Tensor:
        """This rank's part, (shard_numel,), where it rests."""


class ShardStorage:
    """The device: a shard is used where it is. Subclasses keep it elsewhere and bring it when a unit is unsharded.

    Attributes:
        reshards: Units are resharded between uses even if one rank owns all of them.
        passing: Shards rest here on the host until ``initialize`` brings them to where they rest, and are freed then (``zero.Init``).
        on_disk: Shards rest in a file.
    """

    reshards = False
    passing = False
    on_disk = False

    def rest(self, unit: ShardOwner, shard: torch.Tensor) -> torch.Tensor:
        """Takes the shard of a new unit, (shard_numel,) on the device; returns the tensor that stands for it from now on."""
        return shard

    def bringing(self, unit: ShardOwner, own: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Gives what an all-gather sends; collectives issued inside are ordered behind the copy.

        Args:
            unit: The unit, about to be unsharded.
            own: This rank's part of its whole buffer, which may be filled and sent.
        """
        return nullcontext(unit.shard)

    def arrive(self, unit: ShardOwner) -> None:
        """Called when the all-gather has ended: the device's stream waits for what is still under way."""

    def outgoing(self, unit: ShardOwner) -> torch.Tensor:
        """Where an update on the host writes the new shard, (shard_numel,) in host memory; then comes ``send``."""
        return unit.shard

    def send(self, unit: ShardOwner) -> None:
        """Brings what was written to ``outgoing`` to where the shard rests, maybe still under way when this returns."""

    def flush(self) -> None:
        """Waits for what ``send`` has left under way between host and file."""

    def changed(self, unit: ShardOwner) -> None:
        """The shard was written to directly: forgets copies of it."""

    def of_copies(self) -> ShardStorage:
        """Where the shards of a deep copy rest, which may outlive this storage."""
        return ON_DEVICE

    def close(self) -> None:
        """Lets go of files and buffers; the shards are not needed any more."""


ON_DEVICE = ShardStorage()
