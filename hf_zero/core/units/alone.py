"""Unshard single parameters while the rest of their unit stays sharded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol
from weakref import ref

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.core.units.layout import UnitLayout, UnitState
from hf_zero.core.units.marks import ParamListener, own_shape
from hf_zero.core.units.shard import ON_DEVICE, Derived, OwnPart, ShardStorage
from hf_zero.core.units.sharded_parameter import point
from hf_zero.core.units.whole_buffer import WholeBuffer, ordinary_tensors
from hf_zero.errors import StateError
from hf_zero.native.masters import same_bits


class Divided(Protocol):
    """The part of a unit that ``AloneParams`` uses; the attributes are those of ``Unit``."""

    layout: UnitLayout
    params: list[nn.Parameter | None]
    collectives: Collectives
    rank: int
    reshards: bool
    quantized: bool
    state: UnitState
    listener: ParamListener
    shard_storage: ShardStorage
    derived: Derived
    whole: WholeBuffer
    own: OwnPart

    @property
    def name(self) -> str:
        """Return the name of the unit, as in labels."""

    @property
    def shard(self) -> torch.Tensor:
        """Return this rank's shard, (shard_numel,)."""

    def shard_part(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """Return the part of parameter ``index`` in a (shard_numel,) tensor."""

    def show_older(self, index: int | None = None, value: torch.Tensor | None = None) -> None:
        """Copy values to buffers that a later backward may read."""

    def unpin(self, reshard: bool = True) -> None:
        """Undo one pin."""


@dataclass
class _Held:
    value: torch.Tensor  # complete values, of the parameter's shape
    holders: int
    current: bool = True  # False: the shards have been written to since the values were fetched


class AloneParams:
    """The parameters of one unit that holders have unsharded one by one.

    [Note: a parameter alone] Scripts hand weights to inference engines with ``GatheredParameters([parameter])`` in a loop over a model,
    parameter by parameter, and often keep many of them until a message is full. Unsharding the unit each time would send a complete layer
    for each of its parameters, and each parameter that is kept would keep a layer's memory. So if less than half of a sharded unit is
    requested, the owners broadcast only the elements of these parameters. If the unit is unsharded meanwhile, it stays unsharded and pinned
    until the holders release the parameters, and the holders' writes are in it, as if the unit had been pinned from the beginning. The
    complete unit is unsharded instead if its shards are not kept on the device, if its all-gathers carry codes, or if it contains packed
    weights, which need their scales.
    """

    def __init__(self, unit: Divided) -> None:
        self._owner = ref(unit)  # a strong reference would form a cycle and keep the unit's memory until the garbage collector runs
        self._held: dict[int, _Held] = {}
        self._joined = False

    @property
    def _unit(self) -> Divided:
        unit = self._owner()
        if unit is None:
            raise StateError(
                "a parameter was gathered after its engine was freed; keep a reference to the engine while you read its parameters"
            )
        return unit

    def __bool__(self) -> bool:
        return bool(self._held)

    def __contains__(self, index: object) -> bool:
        return index in self._held

    def serves(self, indices: Iterable[int]) -> bool:
        """Return whether the parameters at these positions can be unsharded alone; the answer is the same on every rank."""
        unit, slots = self._unit, self._unit.layout.slots
        rests = unit.state is UnitState.SHARDED and unit.shard_storage is ON_DEVICE and not (unit.own.offloaded or unit.quantized)
        if not rests or not unit.reshards or unit.layout.world == 1 or any(slot.shown_as is not None for slot in slots):
            return False
        return 2 * sum(slots[index].numel for index in {*indices, *self._held}) < unit.layout.numel

    def add(self, indices: Iterable[int]) -> None:
        """Unshard the parameters at ``indices``, for which ``serves`` has returned True; collective."""
        for index in sorted(indices):
            if index in self._held:
                self._held[index].holders += 1
                continue
            slot = self._unit.layout.slots[index]
            self._held[index] = _Held(self._whole(index).view(slot.shape), 1)
            self._show(index)
        self.notify()

    def remove(self, indices: Iterable[int]) -> None:
        """Undo ``add``. When no parameter is left, unpin the unit if it was unsharded meanwhile, which may reshard it."""
        gone = []
        for index in sorted(indices):
            self._held[index].holders -= 1
            if not self._held[index].holders:
                gone.append(index)
                del self._held[index]
        if not self._joined:
            self._empty(gone)
        elif not self._held:
            self._joined = False
            self._unit.unpin()

    def values(self) -> dict[int, torch.Tensor]:
        """Return the held parameters' own tensors by position."""
        return {index: held.value for index, held in self._held.items()}

    def assigned(self) -> bool:
        """Return whether a held parameter was pointed at other memory; local."""
        shown = ((self._unit.params[index], value) for index, value in self.values().items())
        return any(param is not None and value.numel() and param.data_ptr() != value.data_ptr() for param, value in shown)

    def take_assigned(self) -> None:
        """Copy ``data`` that was assigned to held parameters (``param.data = value``) into their own tensors; local."""
        for index, held in self._held.items():
            param = self._unit.params[index]
            if (
                param is not None
                and not self._joined
                and param.data_ptr() != held.value.data_ptr()
                and own_shape(param) == held.value.shape
            ):
                held.value.copy_(param.data)

    def adopt(self) -> None:
        """Copy writes to the held parameters into shard and master; local."""
        self.take_assigned()
        for index, held in self._held.items() if not self._joined else ():
            self.adopt_value(index, held.value)

    def adopt_value(self, index: int, value: torch.Tensor) -> None:
        """Copy this rank's part of the complete ``value`` of parameter ``index`` into shard and master, if it differs; local."""
        unit = self._unit
        slot = unit.layout.slots[index]
        unit.show_older(index, value)
        part, own = slot.range.intersect(unit.layout.shard_range(unit.rank)).shift(-slot.offset), unit.shard_part(index, unit.shard)
        values = value.detach().reshape(-1)[part.start : part.stop]
        if part.numel and not same_bits(values, own.to(values.device)):
            own.copy_(values)
            unit.shard_storage.changed(unit)
            unit.derived.changed_here = True
            unit.own.refresh_master()

    def joined(self) -> bool:
        """Copy the held parameters' values into the unit, which was just unsharded; return whether the unit must be pinned for them now."""
        for index, held in self._held.items():
            param = self._unit.params[index]
            view = self._unit.whole.view(index)
            if param is not None and held.current:
                view.copy_(held.value)
            held.value = view
        first, self._joined = bool(self._held) and not self._joined, bool(self._held)
        return first

    def outdate(self) -> None:
        """Mark the held values as outdated, because the shards were written to; local."""
        for held in self._held.values():
            held.current = False

    def refresh(self) -> None:
        """Fetch outdated values again; collective."""
        for index, held in sorted(self._held.items()):
            if not held.current and not self._joined:
                held.value.copy_(self._whole(index).view_as(held.value))
            held.current = True

    def show(self) -> None:
        """Point the held parameters at their values again, after all parameters of the unit were pointed elsewhere; local."""
        for index in self._held if not self._joined else ():
            self._show(index)

    def notify(self) -> None:
        """Notify the listener that the held parameters are unsharded; local."""
        self._unit.listener.state_changed([self._unit.params[index] for index in self._held], UnitState.UNSHARDED)

    def _whole(self, index: int) -> torch.Tensor:
        return whole_from_owners(self._unit, index, self._unit.shard, self._unit.name)

    def _show(self, index: int) -> None:
        param = self._unit.params[index]
        if param is not None:
            point(param, self._held[index].value, empties=False)

    def _empty(self, indices: Iterable[int]) -> None:
        params = [param for index in indices if (param := self._unit.params[index]) is not None]
        for param in params:
            with ordinary_tensors():
                empty = param.new_empty(0)
            point(param, empty, empties=True)
        self._unit.listener.state_changed(params, self._unit.state)


def whole_from_owners(unit: Divided, index: int, flat: torch.Tensor, label: str) -> torch.Tensor:
    """Return the complete parameter ``index`` of a tensor that is sharded like the unit; each owner broadcasts its part. Collective.

    Args:
        unit: The unit.
        index: Position of the parameter in the unit.
        flat: This rank's part of the tensor, (shard_numel,).
        label: Label of the collectives.

    Returns:
        A new tensor, (numel,), on the engine's device.
    """
    slot, layout = unit.layout.slots[index], unit.layout
    with ordinary_tensors():
        whole = torch.empty(slot.numel, dtype=flat.dtype, device=unit.collectives.topology.device)
    for rank in owners(layout, index):
        part = slot.range.intersect(layout.shard_range(rank)).shift(-slot.offset)
        target = whole[part.start : part.stop]
        if rank == unit.rank:
            target.copy_(unit.shard_part(index, flat))
        if layout.world > 1:
            unit.collectives.broadcast(target, rank, label)
    return whole


def owners(layout: UnitLayout, index: int) -> range:
    """Return the ranks whose shards contain parameter ``index``."""
    where = layout.slots[index].range
    return range(where.start // layout.shard_numel, -(-where.stop // layout.shard_numel)) if where.numel else range(0)
