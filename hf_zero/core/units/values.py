"""Values on their way between a unit's whole buffer, its shard and its master."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from hf_zero.comm.collectives import Pending
from hf_zero.comm.quantized import coded
from hf_zero.core.units.layout import UnitState
from hf_zero.core.units.sharded_parameter import point
from hf_zero.core.units.unit import Unit
from hf_zero.system.planning import planning


def publish(units: Sequence[Unit]) -> None:
    """Casts masters into 16-bit shards, after an update, in one launch on a device; local. In fp32 they are the same memory."""
    changed = [(unit.shard, unit.master) for unit in units if unit.master is not None and unit.master is not unit.shard]
    if changed:
        shards, masters = zip(*changed, strict=True)
        torch._foreach_copy_(shards, masters)
    for unit in units:
        shard_changed(unit)


def shard_changed(unit: Unit) -> None:
    """The shard was written to: copies of it are forgotten; local, on every rank."""
    unit.shard_storage.changed(unit)
    unit.secondary.forget()
    unit.alone.outdate()


def all_gather_updated(unit: Unit) -> Pending | None:
    """Starts the all-gather of updated shards, for a unit that stays unsharded or whose node keeps a copy that lasts; collective.

    Parameters that somebody holds alone are brought at once.
    """
    unit.alone.refresh()
    if unit.state is UnitState.UNSHARDED:
        return None if unit.layout.world == 1 and not unit.reshards else unit.start_all_gather(exact=unit.pinned)
    return _fill_copy(unit) if unit.secondary.lasts else None


def _fill_copy(unit: Unit) -> Pending:
    own = torch.empty(unit.layout.shard_numel, dtype=unit.layout.dtype, device=unit.collectives.topology.device)
    with unit.shard_storage.bringing(unit, own) as source:
        pending = unit.secondary.fill(unit.collectives, source, unit.quantized, unit.name)
    pending.before_finish = partial(unit.shard_storage.arrive, unit)
    return pending


def write_back(unit: Unit) -> None:
    """Copies this rank's part of the whole buffer into shard and master, after the parameters were written to; local."""
    unit.whole.adopt()
    if unit.reshards:
        values = unit.full[unit.owned.start : unit.owned.stop]
        if not unit.exact:  # what still is as its code says was not written to
            shard = unit.shard.to(values.device)
            values = torch.where(values == coded(shard), shard, values)
        unit.shard.copy_(values)
        shard_changed(unit)
    unit.own.refresh_master()
    unit.whole.note_versions()


def adopt_writes(unit: Unit) -> None:
    """Carry what a script has written to the parameters of ``unit`` into its shard and its master; local. See docs/parameters.md.

    Whole parameters count: memory that they were given (``param.data = value``), and what was written in place, ``.data`` included.
    Of masters in a wider type those elements are replaced whose value in the parameters' type is another.

    Raises:
        StateError: A sharded parameter was given data, or a whole one data of another shape.
    """
    if unit.own.offloaded:
        return  # the holder of ``offload_states`` has carried it over before
    unit.whole.refuse_assigned()
    if unit.state is not UnitState.UNSHARDED:
        unit.alone.adopt()
        return
    assigned, written = unit.whole.adopt()
    if unit.reshards and unit.exact:
        _adopt_own(unit)
    if assigned or written or (unit.trainable and _is_beside(unit)):
        unit.own.refresh_master()
    if written:
        unit.whole.note_versions()


def _is_beside(unit: Unit) -> bool:
    """Return whether shard and master can be compared without moving one of them from the host to a device or back."""
    shard, master = unit.own.resting()
    return master is not None and master is not shard and master.device == shard.device


def _adopt_own(unit: Unit) -> None:
    """Copy this rank's part of a whole buffer into the shard where it is another; local."""
    values, shard = unit.full[unit.owned.start : unit.owned.stop], unit.shard
    # A device is not waited for: the copy changes nothing where both are equal.
    on_host = values.device.type == "cpu" and shard.device.type == "cpu" and not planning()
    if not (on_host and torch.equal(values.view(torch.uint8), shard.view(torch.uint8))):
        shard.copy_(values)
        shard_changed(unit)
        unit.own.refresh_master()


def broadcast_from(unit: Unit, source: int) -> None:
    """Makes the whole buffer equal to rank ``source``'s on all ranks, and shards and masters with it; collective.

    Of experts each rank takes what its own are on ``source`` or on the ranks that hold all experts together with it.
    """
    unit.whole.adopt()
    topology = unit.collectives.topology
    unit.collectives.data.broadcast(unit.full, source // topology.expert_places if topology.of_experts else source, unit.name)
    write_back(unit)


def show_as_built(unit: Unit) -> None:
    """Gives whole parameters the type and device that they were built with ([Note: as it was built]); local.

    What is written to them reaches the unit as values of other memory do (``param.data = value``): with ``broadcast_from``.
    """
    for param, slot, view in zip(unit.params, unit.layout.slots, map(unit.whole.view, range(len(unit.params))), strict=True):
        if unit.built is None or param is None or not slot.numel:
            continue
        shown = view.to(unit.built.device, unit.built.dtype)
        if shown is not view and param.data_ptr() == view.data_ptr():  # else an outer holder shows it already
            point(param, shown, empties=False)
