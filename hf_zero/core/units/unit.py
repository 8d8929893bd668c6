"""Define the unit: one flat buffer of parameters, sharded over ranks, unsharded and resharded as one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch
from torch import nn

from hf_zero import observe
from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.comm.quantized import BlockCodes, Codes, Float8Codes
from hf_zero.core.units.alone import AloneParams
from hf_zero.core.units.checksums import checksum
from hf_zero.core.units.layout import FROZEN, UnitLayout, UnitState
from hf_zero.core.units.marks import ParamListener, is_wrapped
from hf_zero.core.units.shard import ON_DEVICE, Derived, NotedWrites, OwnPart, SecondaryCopy, ShardStorage, require_memory
from hf_zero.core.units.sharded_parameter import OWNER
from hf_zero.core.units.whole_buffer import WholeBuffer
from hf_zero.errors import StateError
from hf_zero.memory import host_memory
from hf_zero.native.masters import same_bits
from hf_zero.system.planning import has_values


@dataclass(frozen=True)
class Built:
    """Dtype and device that the parameters of a unit had when their module was built.

    [Note: as it was built] A random number depends on the type and the device that it is drawn for: a 16-bit normal sample is not a rounded
    fp32 one, and each device has its own generator. So until the model is built its units have the dtype that constructors gave, unsharded
    parameters are on the device that they were built on, and the cast to the run's dtype is done at the end. A model that is sharded while
    it is built then has the same bits as one that was built unsharded and cast.

    Attributes:
        dtype: Dtype that the constructors gave.
        device: Device that the constructors gave.
        shown: Whether the model is still being built, so that unsharded parameters have this dtype and device.
    """

    dtype: torch.dtype
    device: torch.device
    shown: bool


class Pins:
    """Stack of holders that pin a unit, the innermost last; false when empty."""

    def __init__(self) -> None:
        self._modifier_ranks: list[int | None] = []

    def __bool__(self) -> bool:
        return bool(self._modifier_ranks)

    def add(self, modifier_rank: int | None) -> None:
        """Add a holder, which before its removal broadcasts the changes of ``modifier_rank`` (None: no changes to broadcast)."""
        self._modifier_ranks.append(modifier_rank)

    def remove(self) -> None:
        """Remove the innermost holder."""
        self._modifier_ranks.pop()

    @property
    def modifier_of_outer(self) -> int | None:
        """Return the modifier rank of a holder outside the innermost one, if any has one."""
        return next((rank for rank in self._modifier_ranks[:-1] if rank is not None), None)


@dataclass(frozen=True)
class UnitSpec:
    """Settings for the units of one engine.

    Attributes:
        collectives: Network of the data-parallel axis.
        shards: Whether each rank owns one part of a unit (stages 1 to 3); else every rank owns the complete unit (stage 0).
        reshards: Whether parameters are resharded between uses (stage 3).
        master_dtype: Dtype of the masters of trainable units; if it equals the parameters' dtype, the shard is its own master.
        sync_values: Whether construction broadcasts rank 0's values, as DDP does.
        shard_storage: Where shards are kept between uses.
        listener: Is notified of changes to the parameters.
        quantized: Whether the schedule's all-gathers carry 8-bit codes, see [Note: exact values].
        float8: Dtype of these codes if each parameter has one scale, [Note: gathers of float8]; None for a scale for each block.
        node: Network of the ranks that keep secondary copies between them, see [Note: secondary copies].
        copy_lasts: Whether updates refill these copies, see [Note: parameters in the node].
    """

    collectives: Collectives
    shards: bool
    reshards: bool
    master_dtype: torch.dtype | None = None
    sync_values: bool = True
    shard_storage: ShardStorage = ON_DEVICE
    listener: ParamListener = field(default_factory=ParamListener)
    quantized: bool = False
    float8: torch.dtype | None = None
    node: Collectives | None = None
    copy_lasts: bool = False


class Training(Protocol):
    """The engine of some units: its module, and whether it still trains the module.

    Attributes:
        module: The module whose parameters are in the units.
        trains: Whether the engine still trains the module.
        idle: Whether no forward or backward runs, and no backward can follow.
        units: Returns all units of the engine.
    """

    module: nn.Module

    @property
    def trains(self) -> bool: ...

    @property
    def idle(self) -> bool: ...

    def units(self) -> Sequence[Unit]: ...

    def release_param(self, unit: Unit, index: int) -> None:
        """Note that the parameter at ``index`` of ``unit`` is about to move to another unit."""


class Unit:
    """A flat buffer of parameters of one dtype, all trainable or all frozen.

    [Note: exact values] If a unit is quantized, the whole buffer holds the values of the codes while the schedule has unsharded it: forward
    and backward compute with these values. Shard and master never hold them. A caller that pins the unit (``GatheredParameters``, saving, a
    generation that gathers the model) gets exact values, by a second all-gather if the unit is unsharded already; a unit that always stays
    unsharded holds exact values.

    Attributes:
        layout: Offsets and division over ranks.
        name: Name of the unit, as in labels and messages.
        params: The parameters, in the order of ``layout.slots``; None where one has moved to another unit.
        whole: The whole buffer and the parameters' views of it; without memory while SHARDED.
        own: This rank's shard and master; the shard is a view of the buffer unless ``reshards``.
        pins: Holders that keep the unit unsharded.
        alone: Parameters that a holder keeps unsharded while the rest is sharded.
        rank: This rank's position among the owners (0 at stage 0).
        owned: Range of elements of the unit that this rank owns.
        trainable: Whether an optimizer updates the unit.
        reshards: Whether the whole buffer is freed between uses.
        shard_storage: Where the shard is kept between uses.
        listener: Is notified of changes to the parameters.
        secondary: The copy of the unit that the ranks of a node keep between them.
        derived: Values that are computed from the shards of all ranks and kept between gathers.
        state: Sharded, unsharding or unsharded.
        pinned_in_graph: Whether it was pinned with gradients on since the last update: functions may have saved its parameters.
        quantized: Whether the schedule's all-gathers carry codes.
        codes: The codes.
        exact: Whether the whole buffer holds, or is about to hold, the values of the shards; otherwise the values of their codes.
        gathers: Number of open ``GatheredParameters`` contexts that contain the unit.
        unsaved: Positions of parameters that the script has saved without values and not gathered since.
        written: Parameters that this rank has seen written since the last step, by position; the ranks compare them.
        rests: Whether all of its parameters are frozen at present: no step reduces or updates it, see [Note: trained parameters].
        belongs_to: Weak reference to the ``Training`` of its engine; None if it belongs to none.
        built: Dtype and device of the parameters before ``zero.Init`` sharded them; None for every other unit.
    """

    def __init__(self, layout: UnitLayout, params: Sequence[nn.Parameter | None], spec: UnitSpec, buffer: torch.Tensor) -> None:
        self.layout = layout
        self.name = layout.name
        self.params: list[nn.Parameter | None] = list(params)
        self.collectives = spec.collectives
        self.rank = spec.collectives.rank if spec.shards else 0
        self.owned = layout.shard_range(self.rank)
        self.reshards = spec.reshards
        self.trainable = any(slot.group != FROZEN for slot in layout.slots)
        self.rests = False
        self.gathers = 0
        self.unsaved, self.written = set[int](), NotedWrites[int]()
        self.state = UnitState.UNSHARDED
        self.pins = Pins()
        self.pinned_in_graph = False
        self.belongs_to: ref[Training] | None = None
        self.alone = AloneParams(self)
        self.listener = spec.listener
        self.secondary = SecondaryCopy(spec.node, spec.copy_lasts)
        self.whole = WholeBuffer(layout, buffer, self.params, self.alone)
        own = buffer[self.owned.start : self.owned.stop]
        self.shard_storage = spec.shard_storage
        shard = host_memory.empty(own.numel(), own.dtype, own.device).copy_(own) if self.reshards else own
        self.own = OwnPart(shard)
        self.own.shard = spec.shard_storage.rest(self, shard)
        self.exact = True
        self.quantized = spec.quantized
        ends = self.owned.start, self.owned.stop
        self.codes: Codes = BlockCodes() if spec.float8 is None else Float8Codes(spec.float8, layout.spans, ends)
        self.derived = Derived(self.secondary, self.codes)
        self.built: Built | None = None
        self._pending: Pending | None = None

    @property
    def full(self) -> torch.Tensor:
        """Return the whole buffer, (padded_numel,); only while unsharded.

        Raises:
            StateError: The unit is not unsharded, or its memory was moved to the host.
        """
        if self.state is not UnitState.UNSHARDED:
            raise StateError(f"unit {self.name} is {self.state.value}; gather it first (hf_zero.zero.GatheredParameters)")
        self.whole.require_shown(f"unit {self.name}")
        return self.whole.flat

    @property
    def bytes_to_unshard(self) -> int:
        """Return the number of bytes that unsharding the unit now would allocate."""
        return self.whole.nbytes if self.state is UnitState.SHARDED else 0

    @property
    def shard(self) -> torch.Tensor:
        """Return this rank's shard, (shard_numel,), in its storage; waits for a running update."""
        return self.own.shard

    @property
    def master(self) -> torch.Tensor | None:
        """Return this rank's part in the master dtype, (shard_numel,); the shard itself if the dtypes are the same; None when frozen."""
        return self.own.master

    def shard_part(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """Return the part of parameter ``index`` that lies in ``flat``, a (shard_numel,) tensor of this rank; 1D, maybe empty."""
        part = self.layout.slots[index].range.intersect(self.owned).shift(-self.owned.start)
        return flat[part.start : part.stop] if part.numel else flat[:0]

    # -- unshard and reshard ------------------------------------------------------------------------------------------

    def start_unshard(self, exact: bool = False) -> None:
        """Allocate the whole buffer and start the all-gather; collective. Does nothing unless SHARDED.

        Args:
            exact: Gather exact values, see [Note: exact values].
        """
        if self.state is not UnitState.SHARDED:
            return
        self.alone.take_assigned()
        if self.own.offloaded:
            require_memory(self.own.shard, f"unit {self.name}")
        if exact:
            self.derived.agree(self.collectives.data)
        self.whole.allocate()
        if self.secondary.here and not (exact and self.quantized):
            self.exact = not self.quantized
            self._pending = self.derived.from_node(self.whole.flat, self.name)
        else:
            self._pending = self.start_all_gather(exact)
        self._enter(UnitState.UNSHARDING)

    def start_all_gather(self, exact: bool) -> Pending:
        """Start the all-gather of the shards into the whole buffer, which has memory; collective. ``exact`` as in ``start_unshard``."""
        self.own.settle()
        self.exact = exact or not self.quantized
        gather = self.derived.gather(self.collectives, self.exact)
        own = self.whole.flat[self.owned.start : self.owned.stop]
        with self.shard_storage.gather_source(self, own) as source:
            pending = gather(self.whole.flat, source, self.name)
        pending.before_finish = partial(self.shard_storage.arrive, self)
        return pending

    def unshard(self, exact: bool = False) -> None:
        """Unshard the parameters: wait for the all-gather, and start it first if necessary; collective.

        Args:
            exact: See ``start_unshard``.

        Raises:
            StateError: A script assigned ``data`` to a parameter without values; all parameters are unsharded nevertheless.
        """
        if self.state is UnitState.UNSHARDED:
            self.whole.require_shown(f"unit {self.name}")
        else:
            self.start_unshard(exact)
            self._wait()
            self.whole.show()
            if self.alone.joined():
                self.pins.add(None)
                _pinned.add(self)
            self._enter(UnitState.UNSHARDED)
        if exact and not self.exact:
            self.start_all_gather(exact=True).wait()
        self.refuse_assigned()

    def refuse_assigned(self) -> None:
        """Drop ``data`` that was assigned to parameters without values, and raise if there was any; local.

        Raises:
            StateError: Some was assigned in this unit; ``data`` assigned in other units of the engine is dropped and named too.
        """
        names = self.whole.drop_assigned()
        training = self.belongs_to() if names and self.belongs_to is not None else None
        for unit in training.units() if training is not None else ():
            names += unit.whole.drop_assigned()
        if names:
            several = len(names) > 1
            raise StateError(
                f"parameter{'s' * several} {', '.join(names[:5])}{f' and {len(names) - 5} more' if names[5:] else ''} "
                f"{'were' if several else 'was'} given data while {'they were' if several else 'it was'} divided (ZeRO stage 3) or "
                "offloaded, so the data was discarded. Set it on all ranks inside "
                "`with hf_zero.zero.GatheredParameters([parameter], modifier_rank=0):`"
            )

    def show_placeholders(self) -> None:
        """Give sharded parameters their shapes, without values, until the unit is unsharded or resharded; local.

        Autograd compares a gradient's shape with its parameter's shape, even where backward does not read the values. Where ``reshard`` has
        kept values for autograd, the parameters show these values instead.
        """
        if self.state is not UnitState.UNSHARDED:
            self.alone.take_assigned()
            self.whole.show_placeholders()
            self.alone.show()

    def free_kept(self) -> None:
        """Free the values that ``reshard`` has kept for autograd; local."""
        self.whole.free_kept_memory()
        if self.state is not UnitState.UNSHARDED:
            self.whole.hide()
            self.alone.show()

    def reshard(self, leave: bool = False, for_autograd: bool = False, adopt: bool = True) -> bool:
        """Free the whole buffer and keep the shard; return whether it did. A pinned unit, and one that never reshards, does not change.

        Args:
            leave: Tensors that a script took from the buffer keep their values, see [Note: tensors taken out of a gather].
            for_autograd: Keep the present values for ``show_placeholders``, until ``whole.free_kept_memory``.
            adopt: Keep values that were written to the parameters.
        """
        if self.state is not UnitState.UNSHARDED:
            self.alone.take_assigned()
            self.whole.hide()
            self.alone.show()
        if not self.reshards or self.pins or self.state is UnitState.SHARDED:
            return False
        shown = self.state is UnitState.UNSHARDED
        self._wait()
        if shown and adopt:
            self._adopt_written()
            if self.exact:
                self.show_older()
        self.whole.free(leave, for_autograd, self.awaited)
        self._enter(UnitState.SHARDED)
        return True

    def awaited(self) -> bool:
        """Return whether a forward or backward runs, or a later backward may read the present values; local."""
        training = self.belongs_to() if self.belongs_to is not None else None
        return training is not None and not training.idle

    def show_older(self, index: int | None = None, value: torch.Tensor | None = None) -> None:
        """Copy values to buffers that a later backward may read; the arguments are those of ``WholeBuffer.show_older``. Local.

        If no backward may follow, these buffers belong to a script and keep their values: [Note: tensors taken out of a gather].
        """
        if self.awaited():
            self.whole.show_older(index, value)

    def _adopt_written(self) -> None:
        """Keep this rank's part of the values that were written while the parameters were unsharded; local.

        [Note: writes that torch does not count] ``param.data.mul_(2)`` changes neither version nor address of a parameter. So this rank's
        part of the buffer is compared with the shard, which costs the host 2/N of a pass over the parameters on N ranks. On a device the
        host does not wait for a comparison: the shard is overwritten, and the next step compares it with the master. Exempt are buffers
        that hold values of codes, shards in files, and, on a device, units with secondary copies.
        """
        counted = set[int]()
        for index, value in self.whole.written_values():
            counted.add(index)
            self.written.add(index, checksum(value))
            if not self.exact and self.whole.holds(value):  # for codes: an element that still equals its code's value was not written
                own, coded_own = self.shard_part(index, self.shard), self.shard_part(index, self.codes.coded(self.shard))
                part = self.layout.slots[index].range.intersect(self.owned).shift(-self.layout.slots[index].offset)
                value = value.reshape(-1).clone()
                value[part.start : part.stop] = torch.where(value[part.start : part.stop] == coded_own, own, value[part.start : part.stop])
            self.alone.adopt_value(index, value)
        if self.exact and not self.shard_storage.on_disk and has_values(self.whole.flat):
            self._adopt_uncounted(counted)

    def _adopt_uncounted(self, counted: Collection[int]) -> None:
        """Keep writes that torch has not counted, except for the parameters at ``counted``, which the caller has adopted; local."""
        own, shard = self.whole.flat[self.owned.start : self.owned.stop], self.own.shard
        on_host = own.device.type == "cpu"
        if shard.device != own.device or (on_host and same_bits(own, shard)):
            return
        if not on_host and self.secondary.here:
            return
        if not (on_host or counted):
            shard.copy_(own)
            return
        for index, slot in enumerate(self.layout.slots):
            if index in counted:
                continue
            if on_host:
                self.alone.adopt_value(index, self.whole.flat[slot.range.start : slot.range.stop])
            else:
                self.shard_part(index, shard).copy_(self.shard_part(index, own))

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
            if self.exact is not self.quantized:
                self.secondary.keep(self.whole.flat)

    def _enter(self, state: UnitState) -> None:
        self.state = state
        if self.reshards:
            observe.note(state.value, self.name)
            self.listener.state_changed(self.params, state)
            if self.alone:
                self.alone.notify()

    # -- holders ------------------------------------------------------------------------------------------------------

    @contextmanager
    def unsharded(self) -> Iterator[torch.Tensor]:
        """Yield the whole buffer, unsharded inside the ``with``; collective. Nests; a unit that was unsharded before stays unsharded."""
        was_whole = self.pin()
        try:
            yield self.whole.flat
        finally:
            self.unpin(reshard=not was_whole)

    def pin(self, modifier_rank: int | None = None) -> bool:
        """Unshard the unit with exact values and keep it unsharded until ``unpin``; collective. Return whether it was unsharded already.

        Args:
            modifier_rank: Rank whose changes the holder will broadcast before ``unpin``.
        """
        if modifier_rank is not None and self.own.offloaded:
            for part in self.own.tensors():  # write_back will copy the changes to them
                require_memory(part, f"unit {self.name}")
        was_whole = self.state is not UnitState.SHARDED
        self.unshard(exact=True)
        self.pins.add(modifier_rank)
        self.pinned_in_graph |= torch.is_grad_enabled()
        _pinned.add(self)
        return was_whole

    def unpin(self, reshard: bool = True, adopt: bool = True) -> None:
        """Undo the last ``pin``. With ``reshard``, removing the last pin also reshards the unit; ``adopt`` as in ``reshard``."""
        self.pins.remove()
        if not self.pins:
            _pinned.discard(self)
            if reshard:
                self.reshard(leave=True, adopt=adopt)

    @property
    def pinned(self) -> bool:
        """Return whether a holder keeps the unit unsharded."""
        return bool(self.pins)

    def set_offloaded(self, offloaded: bool) -> None:
        """Record that some state of the unit was moved to the host, or that all of it has its memory again; local.

        While some state is on the host, requests for its values raise. Reads of an unsharded parameter cannot be intercepted, so the
        parameter is emptied: operations then find a wrong shape, not missing memory.
        """
        self.own.offloaded = offloaded
        if self.state is UnitState.UNSHARDED:
            self.whole.follow_memory()

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        return self  # a copied module shares hooks, never buffers


# -- parameters that belong to a unit ---------------------------------------------------------------------------------

_pinned: WeakSet[Unit] = WeakSet()


def shares_unsharded_memory(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor``, not a unit's parameter, is a view of a pinned unit's buffer: resharding would free its memory."""
    return any(unit.reshards and unit.whole.holds(tensor) for unit in _pinned)


def trained_of(units: Iterable[Unit]) -> list[Unit]:
    """Return the units that a step reduces and updates, in the same order."""
    return [unit for unit in units if not unit.rests]


def find_unit(param: torch.Tensor) -> tuple[Unit, int] | None:
    """Return the unit that contains ``param`` and the parameter's index in it, or None for an ordinary tensor."""
    return getattr(param, OWNER, None)


def is_sharded(param: torch.Tensor) -> bool:
    """Return whether ``param`` is an empty tensor now: its unit is not unsharded, and no holder keeps the parameter alone."""
    owner = find_unit(param)
    return owner is not None and owner[0].state is not UnitState.UNSHARDED and owner[1] not in owner[0].alone


def full_shape(param: torch.Tensor) -> torch.Size:
    """Return the full shape of a parameter, sharded or not."""
    owner = find_unit(param)
    return owner[0].layout.slots[owner[1]].shape if owner is not None and not is_wrapped(param) else param.shape
