"""Make units from parameters, whether these are ordinary tensors or in other units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hf_zero.core.units.layout import build_layout
from hf_zero.core.units.packed import is_packed
from hf_zero.core.units.registration import register
from hf_zero.core.units.shard import ON_DEVICE
from hf_zero.core.units.unit import Unit, UnitSpec, find_unit, full_shape
from hf_zero.core.units.whole_buffer import view_of
from hf_zero.errors import StateError
from hf_zero.memory import host_memory


@dataclass(frozen=True)
class NamedParam:
    """A parameter that will be part of a unit: its dotted name, the parameter, and its optimizer param group (or ``FROZEN``). Scales of a
    packed weight are a plain tensor.
    """

    name: str
    param: nn.Parameter
    group: int


def build_unit(name: str, members: Sequence[NamedParam], dtype: torch.dtype, spec: UnitSpec) -> Unit:
    """Make an unsharded unit of ``members``; collective.

    Values are copied from the parameters themselves, or from the unit that they belong to now (``zero.Init``, another engine), which they
    leave. At most this one unit is unsharded, in the wider of the old and the new dtype.

    Args:
        name: Name of the unit.
        members: The parameters; all trainable or all frozen.
        dtype: The new dtype of the parameters.
        spec: Settings for the units of this engine.

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
        collectives.data.world if spec.shards else 1,
        [member.param.dtype if is_packed(member.param) else dtype for member in members],
    )
    params = [members[index].param for index in order]
    wide = _widest([dtype, *(param.dtype for param in params if not is_packed(param))])
    values = host_memory.empty(layout.padded_numel, wide, collectives.topology.device).zero_()
    for slot, param in zip(layout.slots, params, strict=True):
        _copy_value(view_of(values, slot), param, slot.name)
    if spec.sync_values and any(find_unit(param) is None for param in params):
        collectives.data.broadcast(values, 0, name)
    buffer = values if wide == dtype else host_memory.cast(values, dtype)
    unit = Unit(layout, params, spec, buffer)
    if unit.trainable:
        master_dtype = spec.master_dtype or dtype
        # The master is made from values in the dtype of the parameters, so that a model that zero.Init has cast at construction gets the
        # same masters.
        own_master = master_dtype == dtype and spec.shard_storage is ON_DEVICE
        # A master is created on the device even if the shard is kept elsewhere: only an offloaded optimizer moves it.
        unit.own.master = unit.shard if own_master else host_memory.cast(unit.full[unit.owned.start : unit.owned.stop], master_dtype)
    register(unit)
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
        target.copy_(param.detach())
        return
    with owner[0].unsharded():
        target.copy_(param.detach())
