"""Keep one rank's part of a unit: the shard, where it rests between uses, and the master, which an update may still be writing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from hf_zero.core.units.layout import UnitState
from hf_zero.errors import StateError
from hf_zero.system.planning import planning


class ShardOwner(Protocol):
    """What a storage needs to know of a unit.

    Attributes:
        state: Where the parameters are.
    """

    state: UnitState

    @property
    def shard(self) -> torch.Tensor:
        """Return this rank's part, (shard_numel,), where it rests."""


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
        """Return where an update on the host writes the new shard, (shard_numel,) in host memory; then comes ``send``."""
        return unit.shard

    def send(self, unit: ShardOwner) -> None:
        """Brings what was written to ``outgoing`` to where the shard rests, maybe still under way when this returns."""

    def flush(self) -> None:
        """Waits for what ``send`` has left under way between host and file."""

    def changed(self, unit: ShardOwner) -> None:
        """The shard was written to directly: forgets copies of it."""

    def of_copies(self) -> ShardStorage:
        """Return where the shards of a deep copy rest, which may outlive this storage."""
        return ON_DEVICE

    def close(self) -> None:
        """Lets go of files and buffers; the shards are not needed any more."""


ON_DEVICE = ShardStorage()


class Arriving(Protocol):
    """New values of a shard and its master that another thread may still be computing."""

    def wait(self) -> None:
        """Blocks until shard and master hold the new values."""


class OwnPart:
    """The shard, (shard_numel,) of the parameters' dtype, and the master, (shard_numel,) of the master dtype.

    [Note: updates under way] An offloaded unit may still be updated when ``step`` has returned. Nobody sees half of it: an all-gather, a
    checkpoint and everything else come to the values through ``shard`` and ``master``, which wait for this unit alone.

    Attributes:
        offloaded: Some of the unit's state waits on the host (``engine.offload_states``). Reading a shard or master that has no memory
            meanwhile would end the process; the properties raise instead.

    Args:
        shard: Where it rests.
    """

    def __init__(self, shard: torch.Tensor) -> None:
        self._shard = shard
        self._master: torch.Tensor | None = None
        self._arriving: Arriving | None = None
        self.offloaded = False

    def expect(self, values: Arriving) -> None:
        """Whoever reads shard or master from now on waits for ``values`` first."""
        self._arriving = values

    def settle(self) -> None:
        """Waits for the update that is under way, if there is one."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.wait()

    def tensors(self) -> list[torch.Tensor]:
        """Shard and master, whether or not they have memory now."""
        self.settle()
        return [self._shard] if self._master is None else [self._shard, self._master]

    def resting(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Shard and master as they are, maybe half updated, maybe without memory: for those who look at sizes. Waits for nothing."""
        return self._shard, self._master

    @property
    def shard(self) -> torch.Tensor:
        """Return this rank's part of the parameters, where it rests.

        Raises:
            StateError: It waits on the host.
        """
        self.settle()
        if self.offloaded:
            require_memory(self._shard, "the shard of a unit")
        return self._shard

    @shard.setter
    def shard(self, value: torch.Tensor) -> None:
        self._shard = value

    @property
    def master(self) -> torch.Tensor | None:
        """What the optimizer updates: the shard itself when the types agree; None where nothing is trained.

        Raises:
            StateError: It waits on the host.
        """
        self.settle()
        if self.offloaded and self._master is not None:
            require_memory(self._master, "the master of a unit")
        return self._master

    @master.setter
    def master(self, value: torch.Tensor | None) -> None:
        self._master = value

    def drop_master(self) -> None:
        """Frees the master; nothing is trained any more."""
        self.settle()
        self._master = None

    def refresh_master(self) -> None:
        """Carries changes of the shard into the master; elements whose 16-bit value is unchanged keep their fp32 bits; local."""
        if self.master is None or self.master is self.shard:
            return
        shard, master = self.shard.to(self.master.device), self.master
        as_shown = master.to(shard.dtype)
        # On a host the look is cheap; on a device it would wait for it.
        if shard.device.type == "cpu" and not planning() and torch.equal(as_shown.view(torch.uint8), shard.view(torch.uint8)):
            return
        torch.where(as_shown == shard, master, shard, out=master)


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the elements of ``tensor`` are there; False while they wait on the host after ``engine.offload_states``."""
    return not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def require_memory(tensor: torch.Tensor, what: str) -> None:
    """Raises when ``tensor`` has no memory.

    Raises:
        StateError: ``what`` waits on the host.
    """
    if not has_memory(tensor):
        raise StateError(f"{what} was read while it waits on the host; call engine.reload_states() first")
