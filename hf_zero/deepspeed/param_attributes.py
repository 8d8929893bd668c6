"""Provide the attributes that libraries read from parameters at stage 3 under DeepSpeed's names (``param.ds_*``)."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.core.units.layout import UnitState
from hf_zero.core.units.marks import OUTER, ParamListener, with_outer
from hf_zero.core.units.unit import Unit, find_unit, is_sharded
from hf_zero.core.units.values import own_part_changed, write_back
from hf_zero.errors import StateError


class ZeroParamStatus(Enum):
    """The state of a parameter (``param.ds_status``): gathered, sharded, or being gathered."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """The placement of a parameter's values (``param.ds_param_type``): on every rank, or divided over ranks."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


_STATUS = {
    UnitState.SHARDED: ZeroParamStatus.NOT_AVAILABLE,
    UnitState.UNSHARDING: ZeroParamStatus.INFLIGHT,
    UnitState.UNSHARDED: ZeroParamStatus.AVAILABLE,
}
_METHODS = ("all_gather", "all_gather_coalesced", "partition", "partition_numel", "ds_summary")
_VALUES = ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor", "ds_persist", "ds_process_group", "ds_active_sub_modules")
_PLACE = ("ds_param_type", "ds_zero_partition_rank", "ds_zero_partition_world_size", "is_external_param")
_OF_NODES = ("ds_secondary_tensor", "ds_zero_param_process_group")  # always None, because a node's copies belong to units


class ParamAttributes(ParamListener):
    """A listener that sets DeepSpeed's stage-3 attributes on parameters and updates them at each change."""

    attributes = (*_METHODS, *_VALUES, *_PLACE, *_OF_NODES)

    def registered(self, param: Any, shape: torch.Size, part: torch.Tensor, collectives: Collectives) -> None:
        param.ds_id = id(param)
        param.ds_shape = shape
        param.ds_numel = shape.numel()
        param.ds_status = ZeroParamStatus.AVAILABLE
        param.ds_tensor = _own_part(param, part)
        param.ds_persist = True
        param.ds_process_group = collectives.topology.group
        param.ds_active_sub_modules = set()
        param.ds_param_type = ZeroParamType.PARTITIONED
        param.ds_zero_partition_rank = collectives.topology.rank
        param.ds_zero_partition_world_size = collectives.topology.world
        param.is_external_param = False
        for name in _OF_NODES:
            setattr(param, name, None)
        # Use weak references: a reference cycle would keep a parameter's memory until the garbage collector runs.
        itself = ref(param)
        param.partition_numel = part.numel
        param.all_gather = partial(_all_gather, itself)
        param.all_gather_coalesced = partial(_all_gather_coalesced, itself)
        param.partition = partial(_partition, itself)
        param.ds_summary = partial(_summary, itself)

    def state_changed(self, params: Iterable[nn.Parameter | None], state: UnitState) -> None:
        status = _STATUS[state]
        for param in params:  # runs for each parameter in each forward and backward
            if param is not None:
                attributes = param.__dict__
                attributes["ds_status"] = status
                if OUTER in attributes:
                    for shown in with_outer(param):
                        shown.ds_status = status

    def stays_unsharded(self, params: Iterable[nn.Parameter | None], stays: bool) -> None:
        for shown in _shown(params):
            shown.ds_persist = stays


def _shown(params: Iterable[nn.Parameter | None]) -> Iterable[Any]:
    return (shown for param in params if param is not None for shown in with_outer(param))


PARAM_ATTRIBUTES = ParamAttributes()


class OwnPartOfParameter(torch.Tensor):
    """A view of this rank's part of a parameter (``param.ds_tensor``); ``ds_tensor.data = value`` writes to shard and master."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    parameter: ref[Any]

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """Return the part as a plain tensor of the same memory."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Write new values to the shard and its master.

        Raises:
            StateError: The shapes differ, or the parameter is unsharded at the moment.
        """
        param = self.parameter()
        unit, index = (None, 0) if param is None else find_unit(param) or (None, 0)
        fits = value.shape == self.shape
        if not fits or (param is not None and unit is not None and not is_sharded(param)):
            name = "a parameter" if unit is None else unit.layout.slots[index].name
            raise StateError(
                f"ds_tensor.data of {name} was given a tensor of shape {tuple(value.shape)}, but the parameter "
                f"{'is unsharded now' if fits else f'has {self.numel()} elements on this rank'}. While the parameter is sharded, assign "
                "the shard of this rank, of shape (elements,); to write the whole parameter, use `with "
                "deepspeed.zero.GatheredParameters([param], modifier_rank=0):`"
            )
        self.detach().copy_(value)
        if unit is not None:
            own_part_changed(unit)
            unit.own.refresh_master()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


def _own_part(param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    if type(part) is not torch.Tensor:
        return part
    own: OwnPartOfParameter = part.detach().as_subclass(OwnPartOfParameter)
    own.parameter = ref(param)
    return own


def _units_of(itself: ref[Any], params: Iterable[torch.Tensor] | None) -> list[Unit]:
    owners = [find_unit(param) for param in (params if params is not None else [itself()]) if param is not None]
    return list({id(owner[0]): owner[0] for owner in owners if owner is not None}.values())


def _all_gather(itself: ref[Any], param_list: Iterable[torch.Tensor] | None = None, *args: object, **kwargs: object) -> None:
    for unit in _units_of(itself, param_list):
        unit.unshard(exact=True)


class _Gathered:
    """Handle of a gather that is already complete, for callers that wait for it."""

    def wait(self, **kwargs: object) -> None:
        """Return immediately, because the gather is complete."""


def _all_gather_coalesced(itself: ref[Any], params: Iterable[torch.Tensor], *args: object, **kwargs: object) -> _Gathered:
    _all_gather(itself, params)
    return _Gathered()


def _partition(
    itself: ref[Any], param_list: Iterable[torch.Tensor] | None = None, *args: object, has_been_updated: bool = False, **kwargs: object
) -> None:
    for unit in _units_of(itself, param_list):
        if has_been_updated:
            write_back(unit)
        unit.reshard(leave=True, adopt=has_been_updated)


def _summary(itself: ref[Any], *args: object, **kwargs: object) -> dict[str, Any]:
    param = itself()
    names = ("ds_id", "ds_status", "ds_numel", "ds_shape", "ds_persist", "requires_grad")
    return {name.removeprefix("ds_"): getattr(param, name, None) for name in names}
