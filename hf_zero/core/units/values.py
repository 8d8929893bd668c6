"""Move values between a unit's whole buffer, its shard and its master, and to memory of their own where a script has shared theirs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from hf_zero.comm.back_end import open_collectives
from hf_zero.comm.collectives import Pending
from hf_zero.comm.quantized import Float8Codes, compare_scales
from hf_zero.comm.topology import Topology
from hf_zero.core.units.layout import UnitState
from hf_zero.core.units.marks import own_shape
from hf_zero.core.units.shard import ON_DEVICE
from hf_zero.core.units.sharded_parameter import point
from hf_zero.core.units.unit import Unit
from hf_zero.errors import StateError
from hf_zero.native.masters import same_bits
from hf_zero.observe import warn_once
from hf_zero.system.planning import has_values


def publish(units: Sequence[Unit]) -> None:
    """Cast masters into 16-bit shards after an update, in one launch on a device; local. In fp32, shard and master are the same memory."""
    changed = [(unit.shard, unit.master) for unit in units if unit.master is not None and unit.master is not unit.shard]
    if changed:
        shards, masters = zip(*changed, strict=True)
        torch._foreach_copy_(shards, masters)
    for unit in units:
        unit.derived.changes += 1
        shard_changed(unit)


def shard_changed(unit: Unit) -> None:
    """Drop copies of the shard after a write to it. Local; every rank must call it."""
    unit.shard_storage.changed(unit)
    unit.derived.forget()
    unit.alone.outdate()


def all_gather_updated(unit: Unit) -> Pending | None:
    """Start the all-gather of updated shards, for a unit that stays unsharded or whose node keeps a lasting copy; collective.

    Values of parameters that are held alone have been fetched again when it returns.
    """
    unit.alone.refresh()
    if unit.state is UnitState.UNSHARDED:
        return None if unit.layout.world == 1 and not unit.reshards else unit.start_all_gather(exact=unit.pinned)
    return _fill_copy(unit) if unit.secondary.lasts else None


def _fill_copy(unit: Unit) -> Pending:
    own = torch.empty(unit.layout.shard_numel, dtype=unit.layout.dtype, device=unit.collectives.topology.device)
    with unit.shard_storage.gather_source(unit, own) as source:
        pending = unit.secondary.fill(unit.collectives, source, unit.quantized, unit.name)
    pending.before_finish = partial(unit.shard_storage.arrive, unit)
    return pending


def own_part_changed(unit: Unit) -> None:
    """Drop copies of the shard after a write to it that other ranks may not have made, see [Note: dropped together]; local."""
    unit.shard_storage.changed(unit)
    unit.derived.changed_here = True
    unit.alone.outdate()


def agree_on_scales(units: Iterable[Unit]) -> None:
    """Compare the scales of sharded units that are gathered as float8, [Note: scales of a step]; collective if there are any.

    A unit whose shard is fetched from the host or a file compares its scales in its next all-gather.
    """
    rests = [unit for unit in units if unit.state is UnitState.SHARDED and unit.shard_storage is ON_DEVICE]
    shards = [(unit.codes, unit.shard) for unit in rests if isinstance(unit.codes, Float8Codes) and not unit.codes.agreed]
    if shards:
        compare_scales(shards, rests[0].collectives)


def write_back(unit: Unit) -> None:
    """Copy this rank's part of the whole buffer into shard and master, after the parameters were written to; local."""
    unit.whole.adopt(separate=partial(separate, unit))
    if unit.whole.converted:
        _warn_of_types(unit)
    if unit.reshards:
        values = unit.full[unit.owned.start : unit.owned.stop]
        if not unit.exact:  # elements that still equal their code's value were not written to
            shard = unit.shard.to(values.device)
            values = torch.where(values == unit.codes.coded(shard), shard, values)
        unit.shard.copy_(values)
        shard_changed(unit)
    unit.own.refresh_master()
    unit.whole.note_versions()
    unit.derived.changes += 1


def adopt_writes(unit: Unit, idle: bool = True) -> None:
    """Copy values that a script has written to the parameters of ``unit`` into its shard and its master; local. See docs/parameters.md.

    It covers unsharded parameters: memory assigned to them (``param.data = value``), and writes in place, also to ``.data``. In a master of
    a wider dtype, an element is replaced only if it differs from the parameter's value after a cast to the parameters' dtype.

    Args:
        unit: The unit.
        idle: See ``WholeBuffer.adopt``.

    Raises:
        StateError: A script assigned ``data`` to a sharded parameter, or ``data`` of another shape to an unsharded one, or ``data`` between
            a forward and its backward, or the ``data`` of another parameter.
    """
    if unit.own.offloaded:
        return  # ``offload_states`` has adopted the writes before it moved the state
    unit.refuse_assigned()
    _refuse_shared(unit)
    if unit.state is not UnitState.UNSHARDED:
        unit.alone.adopt()
        if unit.reshards and unit.own.resting()[0].device.type != "cpu" and _is_beside(unit):  # [Note: writes that torch does not count]
            unit.own.refresh_master()
        return
    assigned, written = unit.whole.adopt(idle, partial(separate, unit))
    _refuse_shared(unit)
    if unit.whole.converted:
        _warn_of_types(unit)
    unit.derived.changes += bool(assigned or written)
    if (assigned or written) and unit.trainable and unit.layout.world > 1:
        unit.written.touched.update(slot.name for slot in (*assigned, *written))
    if unit.reshards and unit.exact:
        _adopt_own(unit)
    if assigned or written or (unit.trainable and _is_beside(unit)):
        unit.own.refresh_master()
    if written:
        unit.whole.note_versions()


def _refuse_shared(unit: Unit) -> None:
    """Raise the error of a parameter that shares the memory of another one, once; local."""
    shared, unit.whole.shared = unit.whole.shared, ""
    if shared:
        raise StateError(shared)


def _warn_of_types(unit: Unit) -> None:
    """Warn that a script has converted parameters to other types, which the engine does not follow; local."""
    converted, unit.whole.converted = unit.whole.converted, set()
    for types in sorted(converted) if unit.built is None else ():
        warn_once(
            f"parameters were converted {types} after initialize(), by model.to(dtype) or param.data = value: an engine keeps the types of "
            "its parameters, which have their own type and the rounded values from the next step on. To train in another precision "
            "convert the model before initialize(), or set bf16, fp16 or torch_autocast in the configuration; to save another type "
            "convert the state dict"
        )


def adopt_present_writes(unit: Unit) -> None:
    """Copy writes as ``adopt_writes`` does, with ``idle`` set to whether the engine of ``unit`` is idle now; local.

    Raises:
        StateError: See ``adopt_writes``.
    """
    adopt_writes(unit, not unit.awaited())


def _is_beside(unit: Unit) -> bool:
    """Return whether shard and master can be compared without a copy between host and device."""
    shard, master = unit.own.resting()
    return master is not None and master is not shard and master.device == shard.device


def _adopt_own(unit: Unit) -> None:
    """Copy this rank's part of a whole buffer into the shard, if they differ; local."""
    values, shard = unit.full[unit.owned.start : unit.owned.stop], unit.shard
    # On a device the host does not wait for a comparison: the copy changes nothing if both are equal.
    on_host = values.device.type == "cpu" and shard.device.type == "cpu" and has_values(shard)
    if not (on_host and same_bits(values, shard)):
        shard.copy_(values)
        own_part_changed(unit) if on_host else shard_changed(unit)
        unit.own.refresh_master()


def broadcast_from(unit: Unit, source: int, indices: Iterable[int]) -> None:
    """Copy the whole buffer of rank ``source`` to all ranks, and update shards and masters with it; collective.

    Each rank receives its own experts from the expert group of ``source``. Ranks of other columns of the model axis receive the parameters
    at ``indices``, which all of them hold.
    """
    unit.whole.adopt(separate=partial(separate, unit))
    topology, slots = unit.collectives.topology, unit.layout.slots
    place, _ = place_of(topology, source)
    unit.collectives.data.broadcast(unit.full, place // topology.expert_places if topology.of_experts else place, unit.name)
    for index in indices:
        broadcast_over_layers(topology, unit.full[slots[index].range.start : slots[index].range.stop], source, slots[index].name)
    write_back(unit)


def place_of(topology: Topology, source: int) -> tuple[int, int]:
    """Return the position of rank ``source`` on the data-parallel axis, and on the axis of the ranks that hold layers together."""
    return divmod(source, topology.layers.model.world) if topology.layers.model is not None else (source, 0)


def broadcast_over_layers(topology: Topology, values: torch.Tensor, source: int, label: str) -> None:
    """Copy ``values``, which the column of rank ``source`` has from it, to the ranks that hold layers together with it; collective."""
    if topology.layers.model is not None:
        open_collectives(topology.layers.model).broadcast(values, place_of(topology, source)[1], label)


def show_as_built(unit: Unit) -> None:
    """Show unsharded parameters with the dtype and device that they were built with ([Note: as it was built]); local.

    ``broadcast_from`` copies values written to them into the unit, like values of other assigned memory (``param.data = value``).
    """
    for param, slot, view in zip(unit.params, unit.layout.slots, map(unit.whole.view, range(len(unit.params))), strict=True):
        if unit.built is None or param is None or not slot.numel:
            continue
        shown = view.to(unit.built.device, unit.built.dtype)
        if shown is not view and param.data_ptr() == view.data_ptr():  # else an outer holder has pointed it at a converted tensor already
            point(param, shown, empties=False)


@torch.no_grad()
def separate(unit: Unit) -> None:
    """Copy the values of parameters that were pointed at the memory of other parameters; local.

    Values that a script has assigned are copied into the units one after the other. If two parameters have exchanged their ``data``, the
    first copy would overwrite the values of the second. If two parameters share memory now, plain PyTorch would train both as one; units
    cannot, so ``whole.shared`` gets the error.

    Args:
        unit: A unit with a parameter that was pointed at other memory.
    """
    training = unit.belongs_to() if unit.belongs_to is not None else None
    units = training.units() if training is not None else [unit]
    by_memory = {memory: one for one in units if (memory := one.whole.flat.untyped_storage().data_ptr())}
    by_memory |= {value.untyped_storage().data_ptr(): one for one in units for value in one.alone.values().values()}
    for one in units:
        for index, param in enumerate(one.params):
            holder = by_memory.get(param.untyped_storage().data_ptr()) if param is not None and param.numel() else None
            if param is None or holder is None or param.data_ptr() == _place_of(one, index):
                continue
            other = _at(holder, param)
            if other:
                one.whole.shared = (
                    f"parameter {one.layout.slots[index].name} was given the memory of {other} (param.data = other.data), so plain PyTorch "
                    "would train both as one tensor, which an engine cannot. To copy values, write param.data.copy_(other.data) or "
                    "param.data = other.data.clone(); to tie two parameters, use one nn.Parameter in both modules before initialize()"
                )
            point(param, param.data.clone(), empties=False)


def _place_of(unit: Unit, index: int) -> int:
    """Return the address of the values of parameter ``index``: in the whole buffer, or in a tensor of its own if it was gathered alone."""
    alone = unit.alone.values()
    return (alone[index] if index in alone else unit.whole.view(index)).data_ptr()


def _at(holder: Unit, param: torch.Tensor) -> str:
    """Return the name of a parameter in its own place in ``holder`` whose memory ``param`` uses too; "" if there is none."""
    for index, value in holder.alone.values().items():
        other = holder.params[index]
        if other is not None and other is not param and param.data_ptr() == other.data_ptr() == value.data_ptr():
            return holder.layout.slots[index].name
    if param.untyped_storage().data_ptr() != holder.whole.flat.untyped_storage().data_ptr():
        return ""
    start = (param.data_ptr() - holder.whole.flat.data_ptr()) // holder.whole.flat.element_size()
    for index, slot in enumerate(holder.layout.slots):
        other = holder.params[index]
        overlaps = slot.offset < start + own_shape(param).numel() and start < slot.offset + slot.numel
        if overlaps and other is not None and other is not param and other.data_ptr() == holder.whole.view(index).data_ptr():
            return slot.name
    return ""
