"""The attributes that libraries read off a parameter at stage 3 under DeepSpeed's names, whole parameters included."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.core.units.listener import ParamListener
from hf_zero.core.units.state import UnitState
from hf_zero.core.units.unit import Unit, find_unit
from hf_zero.core.units.values import write_back


class ZeroParamStatus(Enum):
    """A parameter's state (``param.ds_status``)."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_STATUS = {
    UnitState.SHARDED: ZeroParamStatus.NOT_AVAILABLE,
    UnitState.UNSHARDING: ZeroParamStatus.INFLIGHT,
    UnitState.UNSHARDED: ZeroParamStatus.AVAILABLE,
}
_METHODS = ("all_gather", "partition", "partition_numel", "ds_summary")
_VALUES = ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor", "ds_persist", "ds_process_group", "ds_active_sub_modules")


class ParamAttributes(ParamListener):
    """Gives parameters DeepSpeed's stage-3 attributes and keeps them true."""

    attributes = (*_METHODS, *_VALUES)

    def registered(self, param: Any, shape: torch.Size, part: torch.Tensor, collectives: Collectives) -> None:
        param.ds_id = id(param)
        param.ds_shape = shape
        param.ds_numel = shape.numel()
        param.ds_status = ZeroParamStatus.AVAILABLE
        param.ds_tensor = part
        param.ds_persist = True
        param.ds_process_group = collectives.topology.group
        param.ds_active_sub_modules = set()
        # Weak: a cycle through its own methods would keep a parameter's memory until the garbage collector runs.
        itself = ref(param)
        param.partition_numel = part.numel
        param.all_gather = partial(_all_gather, itself)
        param.partition = partial(_partition, itself)
        param.ds_summary = partial(_summary, itself)

    def state_changed(self, params: Iterable[nn.Parameter | None], state: UnitState) -> None:
        status = _STATUS[state]
        for param in params:
            if param is not None:
                param.ds_status = status  # type: ignore[attr-defined]

    def stays_unsharded(self, params: Iterable[nn.Parameter | None], stays: bool) -> None:
        for param in params:
            if param is not None:
                param.ds_persist = stays  # type: ignore[attr-defined]


PARAM_ATTRIBUTES = ParamAttributes()


def _units_of(itself: ref[Any], params: Iterable[torch.Tensor] | None) -> list[Unit]:
    owners = [find_unit(param) for param in (params if params is not None else [itself()]) if param is not None]
    return list({id(owner[0]): owner[0] for owner in owners if owner is not None}.values())


def _all_gather(itself: ref[Any], param_list: Iterable[torch.Tensor] | None = None, *args: object, **kwargs: object) -> None:
    for unit in _units_of(itself, param_list):
        unit.unshard(exact=True)


def _partition(
    itself: ref[Any], param_list: Iterable[torch.Tensor] | None = None, *args: object, has_been_updated: bool = False, **kwargs: object
) -> None:
    for unit in _units_of(itself, param_list):
        if has_been_updated:
            write_back(unit)
        unit.reshard(leave=True)


def _summary(itself: ref[Any], *args: object, **kwargs: object) -> dict[str, Any]:
    param = itself()
    names = ("ds_id", "ds_status", "ds_numel", "ds_shape", "ds_persist", "requires_grad")
    return {name.removeprefix("ds_"): getattr(param, name, None) for name in names}
