"""The unit: one flat buffer of parameters, divided over ranks, gathered and released as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from hf_zero import observe
from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.core.units.layout import FROZEN, UnitLayout
from hf_zero.core.units.own_part import OwnPart, has_memory, require_memory
from hf_zero.core.units.shard_storage import ON_DEVICE, ShardStorage
from hf_zero.core.units.whole_buffer import WholeBuffer
from hf_zero.errors import StateError
from hf_zero.memory import host_memory


class UnitState(Enum):
    """Where a unit's parameters are. Changed only by the methods of ``Unit`` in this file."""

    SHARDED = "sharded"  # each rank holds 1/world; parameters are empty tensors
    UNSHARDING = "gathering"  # the full buffer is allocated, the all-gather is in flight
    UNSHARDED = "gathered"  # the full buffer is there, parameters are views of it


class ParamStatus(Enum):
    """A parameter's state under the names that DeepSpeed's API uses (``param.ds_status``)."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


STATUS = {
    UnitState.SHARDED: ParamStatus.NOT_AVAILABLE,
    UnitState.UNSHARDING: ParamStatus.INFLIGHT,
    UnitState.UNSHARDED: ParamStatus.AVAILABLE,
}


@dataclass(frozen=True)
class UnitSpec:
    """How units of one engine are made.

    Attributes:
        collectives: Network of the data-parallel axis.
        shards: Each rank owns a part (stages 1 to 3); else every rank owns all (stage 0).
        reshards: Parameters are released between uses (stage 3).
        announced: Parameters carry DeepSpeed's stage-3 attributes (``ds_numel``, ...): at stage 3 on any number of ranks.
        master_dtype: Type of the masters of trainable units; equal to the parameters' type means the shard is its own master.
        sync_values: Take rank 0's values at construction, as DDP does.
        shard_storage: Where shards rest between uses.
    """

    collectives: Collectives
    shards: bool
    reshards: bool
    announced: bool = False
    master_dtype: torch.dtype | None = None
    sync_values: bool = True
    shard_storage: ShardStorage = ON_DEVICE


class Unit:
    """A flat buffer of parameters of one dtype, all trainable or all frozen.

    Attributes:
        layout: Offsets and division over ranks.
        params: The parameters, in the order of ``layout.slots``; None where one has moved to another unit.
        own: This rank's shard and master. The shard is a view of the buffer unless ``reshards``.
        rank: This rank's position among the owners (0 at stage 0).
        owned: Elements of the unit that this rank owns.
        trainable: Whether an optimizer updates it.
        reshards: Whether the full buffer goes away between uses.
        shard_storage: Where the shard rests between uses.
        state: Where the parameters are.
    """

    def __init__(self, layout: UnitLayout, params: Sequence[nn.Parameter | None], spec: UnitSpec, buffer: torch.Tensor) -> None:
        self.layout = layout
        self.params: list[nn.Parameter | None] = list(params)  # None: it has moved to another unit
        self.collectives = spec.collectives
        self.rank = spec.collectives.rank if spec.shards else 0
        self.owned = layout.shard_range(self.rank)
        self.reshards = spec.reshards
        self.trainable = any(slot.group != FROZEN for slot in layout.slots)
        self.state = UnitState.UNSHARDED
        self._whole = WholeBuffer(layout, buffer)  # emptied while SHARDED, by release() only
        self._whole.show(self.params)
        own = buffer[self.owned.start : self.owned.stop]
        self.shard_storage = spec.shard_storage
        shard = host_memory.empty(own.numel(), own.dtype, own.device).copy_(own) if self.reshards else own
        self.own = OwnPart(shard)
        self.own.shard = spec.shard_storage.rest(self, shard)
        self._pending: Pending | None = None
        self._shows_placeholders = False  # released, and the parameters show their shapes
        self._emptied = False  # whole, but its memory waits on the host
        self._pins: list[int | None] = []  # one entry per holder: the rank whose changes it will broadcast, or None

    @property
    def name(self) -> str:
        """Name of the unit, as in labels and messages."""
        return self.layout.name

    @property
    def full(self) -> torch.Tensor:
        """The whole buffer, (padded_numel,); only while gathered.

        Raises:
            StateError: The unit is not gathered.
        """
        if self.state is not UnitState.UNSHARDED:
            raise StateError(f"unit {self.name} is {self.state.value}; gather it first (hf_zero.zero.GatheredParameters)")
        self._require_whole()
        return self._whole.flat

    @property
    def bytes_to_unshard(self) -> int:
        """Bytes that gathering it now would allocate."""
        return self._whole.nbytes if self.state is UnitState.SHARDED else 0

    @property
    def shard(self) -> torch.Tensor:
        """This rank's part, (shard_numel,), where it rests; waits for an update that is under way."""
        return self.own.shard

    @property
    def master(self) -> torch.Tensor | None:
        """This rank's part in the master dtype, (shard_numel,); the shard itself when the types agree; None when frozen."""
        return self.own.master

    # -- gather and release -------------------------------------------------------------------------------------------

    def start_unshard(self) -> None:
        """Allocates the full buffer and starts the all-gather; collective. Does nothing unless SHARDED."""
        if self.state is not UnitState.SHARDED:
            return
        if not self._shows_placeholders:
            self._whole.refuse_assigned(self.params)
        if self.own.offloaded:
            require_memory(self.own.shard, f"unit {self.name}")
        self._whole.allocate()
        self._pending = self._all_gather()
        self._enter(UnitState.UNSHARDING)

    def _all_gather(self) -> Pending:
        self.own.settle()
        own = self._whole.flat[self.owned.start : self.owned.stop]
        with self.shard_storage.bringing(self, own) as source:
            pending = self.collectives.all_gather(self._whole.flat, source, self.name)
        pending.before_finish = partial(self.shard_storage.arrive, self)
        return pending

    def unshard(self) -> None:
        """Makes the parameters whole: waits for the all-gather, starting it if need be; collective."""
        if self.state is UnitState.UNSHARDED:
            self._require_whole()
            return
        self.start_unshard()
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        self._whole.show(self.params)
        self._shows_placeholders = False
        self._enter(UnitState.UNSHARDED)

    def show_placeholders(self) -> None:
        """Gives released parameters their shapes, without values, until the unit is gathered or released again; local.

        autograd compares a gradient with its parameter's shape, also where backward does not read the values.
        """
        if self.state is not UnitState.UNSHARDED and not self._shows_placeholders:
            self._whole.show_placeholders(self.params)
            self._shows_placeholders = True

    def reshard(self, leave: bool = False) -> bool:
        """Drops the full buffer, keeping the shard; returns whether it did. A pinned or non-reshards unit stays.

        Args:
            leave: Tensors that somebody took of the buffer keep their values, see [Note: tensors taken out of a gather].
        """
        if self._shows_placeholders:
            self._whole.hide(self.params)
            self._shows_placeholders = False
        if not self.reshards or self._pins or self.state is UnitState.SHARDED:
            return False
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        self._whole.free(self.params, leave)
        self._enter(UnitState.SHARDED)
        return True

    @contextmanager
    def unsharded(self) -> Iterator[torch.Tensor]:
        """The whole buffer inside the ``with``; collective. Nests; what was gathered before stays gathered after."""
        was_whole = self.pin()
        try:
            yield self._whole.flat
        finally:
            self.unpin(reshard=not was_whole)

    def pin(self, modifier_rank: int | None = None) -> bool:
        """Gathers and keeps the unit gathered until ``unpin``; collective. Returns whether it was whole already.

        Args:
            modifier_rank: Rank whose changes the holder will broadcast before it lets go.
        """
        if modifier_rank is not None and self.own.offloaded:
            for part in self.own.tensors():  # the changes will go there
                require_memory(part, f"unit {self.name}")
        was_whole = self.state is not UnitState.SHARDED
        self.unshard()
        self._pins.append(modifier_rank)
        _pinned.add(self)
        return was_whole

    def unpin(self, reshard: bool = True) -> None:
        """Undoes the last ``pin``; with ``release`` the last one also releases."""
        self._pins.pop()
        if not self._pins:
            _pinned.discard(self)
            if reshard:
                self.reshard(leave=True)

    def modifier_of_outer(self) -> int | None:
        """The modifier rank of a holder outside the innermost one, if any has one."""
        return next((rank for rank in self._pins[:-1] if rank is not None), None)

    @property
    def pinned(self) -> bool:
        """Whether somebody holds the unit gathered."""
        return bool(self._pins)

    def _enter(self, state: UnitState) -> None:
        self.state = state
        if self.reshards:
            observe.note(state.value, self.name)
            status = STATUS[state]
            for param in self.params:
                if param is not None:
                    param.ds_status = status  # type: ignore[attr-defined]

    # -- waiting on the host ------------------------------------------------------------------------------------------

    def _require_whole(self) -> None:
        if self.own.offloaded:
            require_memory(self._whole.flat, f"unit {self.name}")

    def mark_offloaded(self) -> None:
        """State of the unit was moved to the host: until ``mark_reloaded`` whoever asks for values that are not here is refused; local.

        Nobody can be kept from reading a whole parameter. It is empty meanwhile: operations find a wrong shape, not missing memory.
        """
        self.own.offloaded = True
        if self.state is UnitState.UNSHARDED and not has_memory(self._whole.flat):
            self._whole.hide(self.params)
            self._emptied = True

    def mark_reloaded(self) -> None:
        """All state has its memory again; local."""
        self.own.offloaded = False
        if self._emptied and self.state is UnitState.UNSHARDED:
            self._whole.show(self.params)
        self._emptied = False

    def forget(self, index: int) -> None:
        """Lets go of parameter ``index``: another unit owns it now."""
        self.params[index] = None

    # -- values -------------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Casts the master into the 16-bit shard, after an update; local. In fp32 they are the same memory."""
        self.own.cast_master()
        self.shard_storage.changed(self)

    def start_spread(self) -> Pending | None:
        """Starts the all-gather of updated shards into the whole buffer, for a unit that stays gathered; collective."""
        if self.state is not UnitState.UNSHARDED or (self.layout.world == 1 and not self.reshards):
            return None
        return self._all_gather()

    def take_assigned(self) -> None:
        """Takes over values that whole parameters were given outside of a gather, as ``param.data = value``; local."""
        if self.state is UnitState.UNSHARDED and not self._pins and self._whole.adopt(self.params):
            self.take_full()

    def take_full(self) -> None:
        """Copies this rank's part of the gathered buffer into shard and master, after the parameters were written to; local."""
        self._whole.adopt(self.params)
        if self.reshards:
            self.shard.copy_(self.full[self.owned.start : self.owned.stop])
            self.shard_storage.changed(self)
        self.own.refresh_master()

    def broadcast_from(self, source: int) -> None:
        """Makes the gathered buffer equal to rank ``source``'s on all ranks, and shards and masters with it; collective."""
        self._whole.adopt(self.params)
        self.collectives.broadcast(self.full, source, self.name)
        self.take_full()

    def shard_part(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """The part of parameter ``index`` that lies in ``flat``, a (shard_numel,) tensor of this rank; 1D, maybe empty."""
        part = self.layout.slots[index].range.intersect(self.owned).shift(-self.owned.start)
        return flat[part.start : part.stop] if part.numel else flat[:0]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a view of the buffer."""
        return self._whole.holds(tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        return self  # a copied module shares hooks, never buffers


# -- parameters that belong to a unit ---------------------------------------------------------------------------------

OWNER = "_hf_zero_owner"
_pinned: WeakSet[Unit] = WeakSet()


def shares_unsharded_memory(tensor: torch.Tensor) -> bool:
    """Whether ``tensor``, not itself in a unit, is a view of a unit that somebody holds gathered: it dies when the unit is released."""
    return any(unit.reshards and unit.holds(tensor) for unit in _pinned)


def find_unit(param: torch.Tensor) -> tuple[Unit, int] | None:
    """The unit that holds ``param`` and its index there, or None for an ordinary tensor."""
    return getattr(param, OWNER, None)


def is_sharded(param: torch.Tensor) -> bool:
    """Whether ``param`` is an empty tensor right now because its unit is not gathered."""
    owner = find_unit(param)
    return owner is not None and owner[0].state is not UnitState.UNSHARDED


def full_shape(param: torch.Tensor) -> torch.Size:
    """The shape of the whole parameter, gathered or not."""
    owner = find_unit(param)
    return owner[0].layout.slots[owner[1]].shape if owner is not None else param.shape
