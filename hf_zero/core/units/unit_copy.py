"""Sharded units made of others: a copy, of which ``copy.deepcopy`` of a divided model is made, and one of another type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from hf_zero.core.units.layout import FROZEN
from hf_zero.core.units.packed import is_packed, mark_packed
from hf_zero.core.units.sharded_parameter import whole_class
from hf_zero.core.units.unit import Unit, UnitSpec
from hf_zero.memory import host_memory


def copy_unit(unit: Unit) -> Unit:
    """A sharded unit with a copy of ``unit``'s shard and of each of its parameters, trained by nobody; local.

    It rests in memory: where ``unit`` rests in a file, the file is another engine's.
    """
    empty = torch.empty(0, dtype=unit.layout.dtype, device=unit.collectives.topology.device)
    params = [None if param is None else _param_like(param, empty) for param in unit.params]
    copied = _unit_of(unit, unit.layout.dtype, params)
    copied.reshard()
    copied.built = unit.built
    return copied


def _unit_of(unit: Unit, dtype: torch.dtype, params: Sequence[nn.Parameter | None]) -> Unit:
    """Return a unit of ``params`` with the values of ``unit``'s shard, whole buffer allocated but undefined outside of that."""
    layout = replace(unit.layout, dtype=dtype, slots=tuple(replace(slot, group=FROZEN) for slot in unit.layout.slots))
    unit.shard_storage.flush()
    buffer = host_memory.empty(layout.padded_numel, dtype, unit.collectives.topology.device)
    buffer[unit.owned.start : unit.owned.stop].copy_(unit.shard)
    storage = unit.shard_storage.of_copies()
    spec = UnitSpec(unit.collectives, shards=True, reshards=True, shard_storage=storage, listener=unit.listener)
    return Unit(layout, params, spec, buffer)


def _param_like(param: nn.Parameter, empty: torch.Tensor) -> nn.Parameter:
    if is_packed(param):  # of a class whose constructor wants more
        copied: nn.Parameter = torch.Tensor._make_subclass(type(param), empty, False)  # type: ignore[attr-defined]
        mark_packed(copied)
        return copied
    return whole_class(type(param))(empty, param.requires_grad)  # type: ignore[no-any-return]
