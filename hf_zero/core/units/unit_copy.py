"""A copy of a sharded unit: what ``copy.deepcopy`` of a divided model is made of."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from hf_zero.core.units.layout import FROZEN
from hf_zero.core.units.packed import is_packed
from hf_zero.core.units.sharded_parameter import ShardedParameter
from hf_zero.core.units.unit import Unit, UnitSpec
from hf_zero.memory import host_memory


def copy_unit(unit: Unit) -> Unit:
    """A sharded unit with a copy of ``unit``'s shard and of each of its parameters, trained by nobody; local.

    It rests in memory: where ``unit`` rests in a file, the file is another engine's.
    """
    layout = replace(unit.layout, slots=tuple(replace(slot, group=FROZEN) for slot in unit.layout.slots))
    device = unit.collectives.topology.device
    unit.shard_storage.flush()
    buffer = host_memory.empty(layout.padded_numel, layout.dtype, device)
    buffer[unit.owned.start : unit.owned.stop].copy_(unit.shard)
    empty = torch.empty(0, dtype=layout.dtype, device=device)
    params = [None if param is None else _param_like(param, empty) for param in unit.params]
    storage = unit.shard_storage.of_copies()
    spec = UnitSpec(unit.collectives, shards=True, reshards=True, shard_storage=storage, listener=unit.listener)
    copied = Unit(layout, params, spec, buffer)
    copied.reshard()
    copied.built = unit.built
    return copied


def _param_like(param: nn.Parameter, empty: torch.Tensor) -> nn.Parameter:
    if is_packed(param):  # of a class whose constructor wants more
        return torch.Tensor._make_subclass(type(param), empty, False)  # type: ignore[attr-defined,no-any-return]
    kind = nn.Parameter if type(param) is ShardedParameter else type(param)
    return kind(empty, param.requires_grad)
