"""What a rank keeps of a parameter of experts."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from hf_zero.core.units.registration import unregister
from hf_zero.core.units.tp_shard import TpShard, cut, is_elsewhere, is_expert, mark_tp_shard
from hf_zero.core.units.unit import find_unit


def keep(param: nn.Parameter, part: TpShard) -> None:
    """Replaces the values of ``param`` by those of ``part``, and notes that; collective after ``zero.Init``.

    A parameter that was loaded so stays as it is ([Note: held experts]), and one of another stage of a pipeline as empty as it is.
    """
    if is_expert(param):
        return
    if is_elsewhere(param):
        mark_tp_shard(param, replace(part, ranges=(), elsewhere=True))
        return
    owner = find_unit(param)
    if owner is None:
        values = cut(param.data, part)
    else:  # made by zero.Init, over all ranks
        with owner[0].unsharded():
            values = cut(param.detach(), part)
        unregister(param)
    param.data = values
    mark_tp_shard(param, part)
