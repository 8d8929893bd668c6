"""The unit: one flat buffer of parameters, divided over ranks, gathered and released as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import nn

from hf_zero import observe
from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.errors import StateError
from hf_zero.sharding.layout import FROZEN, Range, UnitLayout, build_layout


class UnitState(Enum):
    """Where a unit's parameters are. Changed only by the methods of ``Unit`` in this file."""

    SHARDED = "sharded"  # each rank holds 1/world; parameters are empty tensors
    GATHERING = "gathering"  # the full buffer is allocated, the all-gather is in flight
    GATHERED = "gathered"  # the full buffer is there, parameters are views of it


class ParamStatus(Enum):
    """A parameter's state under the names that DeepSpeed's API uses (``param.ds_status``)."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_STATUS = {
    UnitState.SHARDED: ParamStatus.NOT_AVAILABLE,
    UnitState.GATHERING: ParamStatus.INFLIGHT,
    UnitState.GATHERED: ParamStatus.AVAILABLE,
}


@dataclass(frozen=True)
class NamedParam:
    """A parameter on its way into a unit: its dotted name, itself, and its optimizer param group (or ``FROZEN``)."""

    name: str
    param: nn.Parameter
    group: int


@dataclass(frozen=True)
class UnitSpec:
    """How units of one engine are made.

    Attributes:
        collectives: Network of the data-parallel axis.
        shards: Each rank owns a part (stages 1 to 3); else every rank owns all (stage 0).
        releasable: Parameters are released between uses (stage 3).
        announced: Parameters carry DeepSpeed's stage-3 attributes (``ds_numel``, ...): at stage 3 on any number of ranks.
        master_dtype: Type of the masters of trainable units; equal to the parameters' type means the shard is its own master.
        sync_values: Take rank 0's values at construction, as DDP does.
    """

    collectives: Collectives
    shards: bool
    releasable: bool
    announced: bool = False
    master_dtype: torch.dtype | None = None
    sync_values: bool = True


class Unit:
    """A flat buffer of parameters of one dtype, all trainable or all frozen.

    Attributes:
        layout: Offsets and division over ranks.
        params: The parameters, in the order of ``layout.slots``; None where one has moved to another unit.
        shard: This rank's part, (shard_numel,), of the parameters' dtype. A view of the buffer unless ``releasable``.
        master: This rank's part in the master dtype, (shard_numel,); the shard itself when the types agree; None when frozen.
        rank: This rank's position among the owners (0 at stage 0).
        trainable: Whether an optimizer updates it.
        releasable: Whether the full buffer goes away between uses.
        state: Where the parameters are.
    """

    def __init__(self, layout: UnitLayout, params: Sequence[nn.Parameter], spec: UnitSpec, buffer: torch.Tensor) -> None:
        self.layout = layout
        self.params: list[nn.Parameter | None] = list(params)  # None: it has moved to another unit
        self.collectives = spec.collectives
        self.rank = spec.collectives.rank if spec.shards else 0
        self.releasable = spec.releasable
        self.trainable = any(slot.group != FROZEN for slot in layout.slots)
        self.state = UnitState.GATHERED
        self.master: torch.Tensor | None = None
        self._buffer = buffer  # (padded_numel,); storage emptied while SHARDED, by release() only
        self._views = self._make_views()
        self._full_bytes = buffer.untyped_storage().nbytes()
        self._empty = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
        own = buffer[self.owned.start : self.owned.stop]
        self.shard = own.clone() if self.releasable else own
        self._pending: Pending | None = None
        self._pins: list[int | None] = []  # one entry per holder: the rank whose changes it will broadcast, or None

    @property
    def name(self) -> str:
        """Name of the unit, as in labels and messages."""
        return self.layout.name

    @property
    def owned(self) -> Range:
        """Elements of the unit that this rank owns."""
        return self.layout.shard_range(self.rank)

    @property
    def full(self) -> torch.Tensor:
        """The whole buffer, (padded_numel,); only while gathered.

        Raises:
            StateError: The unit is not gathered.
        """
        if self.state is not UnitState.GATHERED:
            raise StateError(f"unit {self.name} is {self.state.value}; gather it first (hf_zero.zero.GatheredParameters)")
        return self._buffer

    # -- gather and release -------------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Allocates the full buffer and starts the all-gather; collective. Does nothing unless SHARDED."""
        if self.state is not UnitState.SHARDED:
            return
        self._buffer.untyped_storage().resize_(self._full_bytes)
        self._pending = self.collectives.all_gather(self._buffer, self.shard, self.name)
        self._enter(UnitState.GATHERING)

    def gather(self) -> None:
        """Makes the parameters whole: waits for the all-gather, starting it if need be; collective."""
        if self.state is UnitState.GATHERED:
            return
        self.start_gather()
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        self._point_at_views()
        self._enter(UnitState.GATHERED)

    def release(self, leave: bool = False) -> bool:
        """Drops the full buffer, keeping the shard; returns whether it did. A pinned or non-releasable unit stays.

        Args:
            leave: Tensors that somebody took of the buffer keep their values, see [Note: tensors taken out of a gather].
        """
        if not self.releasable or self._pins or self.state is UnitState.SHARDED:
            return False
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        for param in self.params:
            if param is not None:
                param.data = self._empty
        if leave and self._is_held():
            self._buffer = torch.empty_like(self._buffer)
            self._views = self._make_views()
        self._buffer.untyped_storage().resize_(0)
        self._enter(UnitState.SHARDED)
        return True

    def _make_views(self) -> list[torch.Tensor]:
        return [self._buffer[slot.range.start : slot.range.stop].view(slot.shape) for slot in self.layout.slots]

    def _is_held(self) -> bool:
        """[Note: tensors taken out of a gather]

        ``state[name] = param.detach().cpu()`` inside ``GatheredParameters`` is how scripts collect weights; on a CPU it copies nothing,
        so the tensor shares the buffer's storage. When such a tensor, or one that autograd saved, is alive, the storage stays with
        it and the unit takes another buffer. While the model runs this is not done: what autograd saved is to be freed then.
        """
        own = 2 + len(self._views)  # the buffer, the storage object asked here, the views
        return torch._C._storage_Use_Count(self._buffer.untyped_storage()._cdata) > own  # type: ignore[attr-defined]

    @contextmanager
    def gathered(self) -> Iterator[torch.Tensor]:
        """The whole buffer inside the ``with``; collective. Nests; what was gathered before stays gathered after."""
        was_whole = self.pin()
        try:
            yield self._buffer
        finally:
            self.unpin(release=not was_whole)

    def pin(self, modifier_rank: int | None = None) -> bool:
        """Gathers and keeps the unit gathered until ``unpin``; collective. Returns whether it was whole already.

        Args:
            modifier_rank: Rank whose changes the holder will broadcast before it lets go.
        """
        was_whole = self.state is not UnitState.SHARDED
        self.gather()
        self._pins.append(modifier_rank)
        _pinned.add(self)
        return was_whole

    def unpin(self, release: bool = True) -> None:
        """Undoes the last ``pin``; with ``release`` the last one also releases."""
        self._pins.pop()
        if not self._pins:
            _pinned.discard(self)
            if release:
                self.release(leave=True)

    def modifier_of_outer(self) -> int | None:
        """The modifier rank of a holder outside the innermost one, if any has one."""
        return next((rank for rank in self._pins[:-1] if rank is not None), None)

    @property
    def pinned(self) -> bool:
        """Whether somebody holds the unit gathered."""
        return bool(self._pins)

    def _enter(self, state: UnitState) -> None:
        self.state = state
        if self.releasable:
            observe.note(state.value, self.name)
            status = _STATUS[state]
            for param in self.params:
                if param is not None:
                    param.ds_status = status  # type: ignore[attr-defined]

    def _point_at_views(self) -> None:
        for param, view in zip(self.params, self._views, strict=True):
            if param is not None:
                param.data = view

    def forget(self, index: int) -> None:
        """Lets go of parameter ``index``: another unit owns it now."""
        self.params[index] = None

    # -- values -------------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Casts the master into the 16-bit shard, after an update; local. In fp32 they are the same memory."""
        if self.master is not None and self.master is not self.shard:
            self.shard.copy_(self.master)

    def start_spread(self) -> Pending | None:
        """Starts the all-gather of updated shards into the whole buffer, for a unit that stays gathered; collective."""
        if self.layout.world == 1 or self.state is not UnitState.GATHERED:
            return None
        return self.collectives.all_gather(self._buffer, self.shard, self.name)

    def drop_master(self) -> None:
        """Frees the master; the unit is not trained any more."""
        self.master = None

    def take_full(self) -> None:
        """Copies this rank's part of the gathered buffer into shard and master, after the parameters were written to; local."""
        if self.releasable:
            self.shard.copy_(self.full[self.owned.start : self.owned.stop])
        self.refresh_master()

    def refresh_master(self) -> None:
        """Carries changes of the shard into the master; elements whose 16-bit value is unchanged keep their fp32 bits; local."""
        if self.master is None or self.master is self.shard:
            return
        changed = self.master.to(self.shard.dtype) != self.shard
        self.master.copy_(torch.where(changed, self.shard.to(self.master.dtype), self.master))

    def broadcast_from(self, source: int) -> None:
        """Makes the gathered buffer equal to rank ``source``'s on all ranks, and shards and masters with it; collective."""
        self.collectives.broadcast(self.full, source, self.name)
        self.take_full()

    def shard_part(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """The part of parameter ``index`` that lies in ``flat``, a (shard_numel,) tensor of this rank; 1D, maybe empty."""
        part = self.layout.slots[index].range.intersect(self.owned).shift(-self.owned.start)
        return flat[part.start : part.stop] if part.numel else flat[:0]

    def gather_param(self, index: int, flat: torch.Tensor, what: str) -> torch.Tensor:
        """The full value of parameter ``index`` in a sharded (shard_numel,) tensor such as a moment; collective.

        Returns:
            A new tensor of the parameter's shape and ``flat``'s dtype.
        """
        slot = self.layout.slots[index]
        if self.layout.world == 1:
            return flat[slot.range.start : slot.range.stop].view(slot.shape).clone()
        whole = torch.empty(self.layout.padded_numel, dtype=flat.dtype, device=flat.device)
        self.collectives.all_gather(whole, flat.contiguous(), f"{self.name}: {what}").wait()
        return whole[slot.range.start : slot.range.stop].view(slot.shape).clone()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a view of the buffer."""
        return tensor.untyped_storage().data_ptr() == self._buffer.untyped_storage().data_ptr() != 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        return self  # a copied module shares hooks, never buffers


# -- parameters that belong to a unit ---------------------------------------------------------------------------------

_OWNER = "_hf_zero_owner"
_pinned: WeakSet[Unit] = WeakSet()


def shares_gathered_memory(tensor: torch.Tensor) -> bool:
    """Whether ``tensor``, not itself in a unit, is a view of a unit that somebody holds gathered: it dies when the unit is released."""
    return any(unit.releasable and unit.holds(tensor) for unit in _pinned)


def find_unit(param: torch.Tensor) -> tuple[Unit, int] | None:
    """The unit that holds ``param`` and its index there, or None for an ordinary tensor."""
    return getattr(param, _OWNER, None)


def is_released(param: torch.Tensor) -> bool:
    """Whether ``param`` is an empty tensor right now because its unit is not gathered."""
    owner = find_unit(param)
    return owner is not None and owner[0].state is not UnitState.GATHERED


def full_shape(param: torch.Tensor) -> torch.Size:
    """The shape of the whole parameter, gathered or not."""
    owner = find_unit(param)
    return owner[0].layout.slots[owner[1]].shape if owner is not None else param.shape


_DS_METHODS = ("all_gather", "partition", "partition_numel", "ds_summary")
_DS_VALUES = ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor", "ds_persist", "ds_process_group", "ds_active_sub_modules")


def _own(unit: Unit, announced: bool) -> None:
    """Marks the unit's parameters as its own, with the attributes that HF libraries read off a stage-3 parameter."""
    for index, (param, slot) in enumerate(zip(unit.params, unit.layout.slots, strict=True)):
        former = find_unit(param) if param is not None else None
        if former is not None and former[0] is not unit:
            former[0].forget(former[1])
        setattr(param, _OWNER, (unit, index))
        # torch.save of a parameter itself (`param.cpu()` is one, on a CPU) writes its attributes too, process groups with them.
        param.__getstate__ = partial(_foreign_state, ref(param))  # type: ignore[union-attr]
        if announced:
            announce(param, slot.shape, unit.shard_part(index, unit.shard), unit.collectives)
            param.ds_status = _STATUS[unit.state]  # type: ignore[union-attr]
            param.ds_persist = not unit.releasable  # type: ignore[union-attr]


def _foreign_state(itself: ref[Any]) -> dict[str, Any] | None:
    """What a pickled parameter takes along besides its values: the attributes that are not ours."""
    ours = {_OWNER, "__getstate__", *_DS_METHODS, *_DS_VALUES}
    return {name: value for name, value in vars(itself()).items() if name not in ours} or None


def announce(param: Any, shape: torch.Size, own: torch.Tensor, collectives: Collectives) -> None:
    """Gives ``param`` DeepSpeed's stage-3 attributes, which libraries read off every parameter at stage 3, whole ones included.

    Args:
        param: The parameter; announced as whole and staying so.
        shape: Its whole shape.
        own: This rank's part of it, 1D.
        collectives: Network of the data-parallel axis.
    """
    param.ds_id = id(param)
    param.ds_shape = shape
    param.ds_numel = shape.numel()
    param.ds_status = ParamStatus.AVAILABLE
    param.ds_tensor = own
    param.ds_persist = True
    param.ds_process_group = collectives.topology.group
    param.ds_active_sub_modules = set()
    # Weak: a cycle through its own methods would keep a parameter's memory until the garbage collector runs.
    itself = ref(param)
    param.partition_numel = own.numel
    param.all_gather = partial(_api_gather, itself)
    param.partition = partial(_api_release, itself)
    param.ds_summary = partial(_api_summary, itself)


def _units_of(itself: ref[Any], params: Iterable[torch.Tensor] | None) -> list[Unit]:
    owners = [find_unit(param) for param in (params if params is not None else [itself()]) if param is not None]
    return list({id(owner[0]): owner[0] for owner in owners if owner is not None}.values())


def _api_gather(itself: ref[Any], param_list: Iterable[torch.Tensor] | None = None, *args: object, **kwargs: object) -> None:
    for unit in _units_of(itself, param_list):
        unit.gather()


def _api_release(
    itself: ref[Any], param_list: Iterable[torch.Tensor] | None = None, *args: object, has_been_updated: bool = False, **kwargs: object
) -> None:
    for unit in _units_of(itself, param_list):
        if has_been_updated:
            unit.take_full()
        unit.release(leave=True)


def _api_summary(itself: ref[Any], *args: object, **kwargs: object) -> dict[str, Any]:
    param = itself()
    names = ("ds_id", "ds_status", "ds_numel", "ds_shape", "ds_persist", "requires_grad")
    return {name.removeprefix("ds_"): getattr(param, name, None) for name in names}


def disown(param: torch.Tensor) -> None:
    """Makes a gathered parameter an ordinary one again: its own storage, none of our attributes."""
    owner = find_unit(param)
    if owner is None:
        return
    if owner[0].state is not UnitState.GATHERED:
        raise StateError(f"parameter {owner[0].layout.slots[owner[1]].name} is released; gather it before it leaves its unit")
    owner[0].forget(owner[1])
    param.data = param.data.clone()
    for attribute in (_OWNER, "__getstate__", *_DS_METHODS, *_DS_VALUES):
        if attribute in vars(param):
            delattr(param, attribute)


# -- construction -----------------------------------------------------------------------------------------------------


def build_unit(name: str, members: Sequence[NamedParam], dtype: torch.dtype, spec: UnitSpec) -> Unit:
    """Makes a unit of ``members``, gathered; collective.

    Values come from the parameters themselves, or from the unit they belong to now (``zero.Init``, another engine), which
    they leave. At most this one unit is held whole, in the wider of the old and the new dtype.

    Args:
        name: Name of the unit.
        members: The parameters; all trainable or all frozen.
        dtype: Their type from now on.
        spec: How units of this engine are made.

    Raises:
        StateError: A parameter has no data (meta device).
    """
    collectives = spec.collectives
    layout, order = build_layout(
        name,
        [(member.name, full_shape(member.param)) for member in members],
        [member.group for member in members],
        dtype,
        collectives.world if spec.shards else 1,
    )
    params = [members[index].param for index in order]
    wide = _widest([dtype, *(param.dtype for param in params)])
    values = torch.zeros(layout.padded_numel, dtype=wide, device=collectives.topology.device)
    for slot, param in zip(layout.slots, params, strict=True):
        _copy_value(values[slot.range.start : slot.range.stop], param, slot.name)
    if spec.sync_values and any(find_unit(param) is None for param in params):
        collectives.broadcast(values, 0, name)
    buffer = values if wide == dtype else values.to(dtype)
    unit = Unit(layout, params, spec, buffer)
    unit._point_at_views()
    if unit.trainable:
        master_dtype = spec.master_dtype or dtype
        # From the 16-bit values, as DeepSpeed does: a model that zero.Init cast at construction gives the same masters.
        unit.master = unit.shard if master_dtype == dtype else unit.shard.to(master_dtype)
    _own(unit, spec.announced)
    return unit


def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    result: torch.dtype | None = None
    for dtype in dtypes:
        result = dtype if result is None else torch.promote_types(result, dtype)
    if result is None:
        raise StateError("a unit needs at least one parameter")
    return result


def _copy_value(target: torch.Tensor, param: nn.Parameter, name: str) -> None:
    if param.is_meta:
        raise StateError(
            f"parameter {name} is on the meta device: it has no values to train. Load or initialise the model first "
            "(from_pretrained, or model.to_empty() and an initialisation)"
        )
    owner = find_unit(param)
    if owner is None:
        target.copy_(param.detach().reshape(-1))
        return
    with owner[0].gathered():
        target.copy_(param.detach().reshape(-1))
