"""Keep one rank's part of a unit: the shard and its storage, and the master, which an update may still be writing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from hf_zero.core.units.layout import UnitState
from hf_zero.errors import StateError
from hf_zero.system.planning import has_values


class ShardOwner(Protocol):
    """The part of a unit that a storage uses.

    Attributes:
        state: State of the unit.
    """

    state: UnitState

    @property
    def shard(self) -> torch.Tensor:
        """Return this rank's shard, (shard_numel,), in its storage."""


class ShardStorage:
    """Storage on the device, where shards are used directly. Subclasses keep shards elsewhere and fetch them when a unit is unsharded.

    Attributes:
        reshards: Units are resharded between uses even if one rank owns all of them.
        passing: Shards rest here on the host until ``initialize`` brings them to where they rest, and are freed then (``zero.Init``).
        on_disk: Shards rest in a file.
    """

    reshards = False
    passing = False
    on_disk = False

    def rest(self, unit: ShardOwner, shard: torch.Tensor) -> torch.Tensor:
        """Store the shard of a new unit, (shard_numel,) on the device; return the tensor that represents it from now on."""
        return shard

    def bringing(self, unit: ShardOwner, own: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Return a context that gives the tensor which an all-gather sends; collectives issued inside are ordered after the copy.

        Args:
            unit: The unit, about to be unsharded.
            own: This rank's part of the unit's whole buffer, which may be filled and sent.
        """
        return nullcontext(unit.shard)

    def arrive(self, unit: ShardOwner) -> None:
        """Finish an all-gather: the device's stream waits for copies that are still running."""

    def outgoing(self, unit: ShardOwner) -> torch.Tensor:
        """Return the host buffer, (shard_numel,), to which an update on the host writes the new shard; ``send`` comes next."""
        return unit.shard

    def send(self, unit: ShardOwner) -> None:
        """Copy the contents of ``outgoing`` to the shard's storage; the copy may still run when this returns."""

    def flush(self) -> None:
        """Wait for the copies between host and file that ``send`` has started."""

    def changed(self, unit: ShardOwner) -> None:
        """Drop copies of the shard after a direct write to it."""

    def of_copies(self) -> ShardStorage:
        """Return the storage for shards of deep copies, which may outlive this storage."""
        return ON_DEVICE

    def close(self) -> None:
        """Free files and buffers; the shards are not needed any more."""


ON_DEVICE = ShardStorage()


class Arriving(Protocol):
    """New values of a shard and its master that another thread may still be computing."""

    def wait(self) -> None:
        """Wait until shard and master hold the new values."""


class OwnPart:
    """This rank's part of a unit: the shard, (shard_numel,) of the parameters' dtype, and the master, (shard_numel,) of the master dtype.

    [Note: updates under way] An offloaded unit may still be updated when ``step`` has returned. Nobody sees half of it: an all-gather, a
    checkpoint and everything else come to the values through ``shard`` and ``master``, which wait for this unit alone.

    Attributes:
        offloaded: Whether some of the unit's state is on the host (``engine.offload_states``). Reading a shard or master that has no memory
            meanwhile would end the process; the properties raise instead.

    Args:
        shard: The shard in its storage.
    """

    def __init__(self, shard: torch.Tensor) -> None:
        self._shard = shard
        self._master: torch.Tensor | None = None
        self._arriving: Arriving | None = None
        self.offloaded = False

    def expect(self, values: Arriving) -> None:
        """Make readers of shard and master wait for ``values`` from now on."""
        self._arriving = values

    def settle(self) -> None:
        """Wait for the running update, if there is one."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.wait()

    def tensors(self) -> list[torch.Tensor]:
        """Return shard and master, whether or not they have memory now."""
        self.settle()
        return [self._shard] if self._master is None else [self._shard, self._master]

    def resting(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return shard and master without waiting, perhaps half updated or without memory: for callers that only need sizes."""
        return self._shard, self._master

    @property
    def shard(self) -> torch.Tensor:
        """Return this rank's part of the parameters, in its storage.

        Raises:
            StateError: It was moved to the host.
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
        """Return the tensor that the optimizer updates: the shard itself if the dtypes are the same; None if nothing is trained.

        Raises:
            StateError: It was moved to the host.
        """
        self.settle()
        if self.offloaded and self._master is not None:
            require_memory(self._master, "the master of a unit")
        return self._master

    @master.setter
    def master(self, value: torch.Tensor | None) -> None:
        self._master = value

    def drop_master(self) -> None:
        """Free the master, because the unit is not trained any more."""
        self.settle()
        self._master = None

    def refresh_master(self) -> None:
        """Carry changes of the shard into the master; elements whose 16-bit value is unchanged keep their fp32 bits; local."""
        if self.master is None or self.master is self.shard:
            return
        shard, master = self.shard.to(self.master.device), self.master
        as_shown = master.to(shard.dtype)
        # On a host the comparison is cheap; on a device the host would wait for it.
        if shard.device.type == "cpu" and has_values(shard) and torch.equal(as_shown.view(torch.uint8), shard.view(torch.uint8)):
            return
        torch.where(as_shown == shard, master, shard, out=master)


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has memory; False while ``engine.offload_states`` has moved its elements to the host."""
    return not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def require_memory(tensor: torch.Tensor, what: str) -> None:
    """Raise if ``tensor`` has no memory.

    Raises:
        StateError: ``what`` was moved to the host.
    """
    if not has_memory(tensor):
        raise StateError(f"{what} was read while it waits on the host; call engine.reload_states() first")
