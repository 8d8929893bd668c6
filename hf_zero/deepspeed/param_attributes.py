"""What a parameter of a unit carries: the mark of its owner, and the attributes that HF libraries read under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch

from hf_zero.comm.collectives import Collectives
from hf_zero.core.units.empty_values import refusal
from hf_zero.core.units.unit import OWNER, STATUS, ParamStatus, Unit, UnitState, find_unit, is_sharded
from hf_zero.core.units.unit_copy import copy_unit

_DS_METHODS = ("all_gather", "partition", "partition_numel", "ds_summary")
_DS_VALUES = ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor", "ds_persist", "ds_process_group", "ds_active_sub_modules")
_OURS = (OWNER, "__getstate__", "__deepcopy__", *_DS_METHODS, *_DS_VALUES)


def own(unit: Unit, announced: bool) -> None:
    """Marks the unit's parameters as its own, with the attributes that HF libraries read off a stage-3 parameter."""
    for index, (param, slot) in enumerate(zip(unit.params, unit.layout.slots, strict=True)):
        former = find_unit(param) if param is not None else None
        if former is not None and former[0] is not unit:
            former[0].forget(former[1])
        setattr(param, OWNER, (unit, index))
        # torch.save of a parameter itself (`param.cpu()` is one, on a CPU) writes its attributes too, process groups with them.
        param.__getstate__ = partial(_foreign_state, ref(param))  # type: ignore[union-attr]
        if unit.reshards:
            vars(param)["__deepcopy__"] = partial(_deep_copy, ref(param))
        else:
            vars(param).pop("__deepcopy__", None)
        if announced:
            announce(param, slot.shape, unit.shard_part(index, unit.shard), unit.collectives)
            param.ds_status = STATUS[unit.state]  # type: ignore[union-attr]
            param.ds_persist = not unit.reshards  # type: ignore[union-attr]


def disown(param: torch.Tensor) -> None:
    """Makes a parameter of a unit an ordinary one that no unit knows; its values are the caller's to set."""
    owner = find_unit(param)
    if owner is None:
        return
    owner[0].forget(owner[1])
    for name in _OURS:
        vars(param).pop(name, None)


def _foreign_state(itself: ref[Any]) -> dict[str, Any] | None:
    """What a pickled parameter takes along besides its values: the attributes that are not ours.

    Raises:
        StateError: It is released, so that nothing would be written.
    """
    param: Any = itself()
    owner = find_unit(param)
    if owner is not None and is_sharded(param):
        raise refusal(owner[0].layout.slots[owner[1]].name)
    return {name: value for name, value in vars(param).items() if name not in _OURS} or None


def _deep_copy(itself: ref[Any], memo: dict[int, Any]) -> Any:
    """What ``copy.deepcopy`` makes of a parameter that is released between uses.

    [Note: deep copies] People copy a model to average its weights or to compare with it. A parameter that is whole, inside a gather,
    becomes an ordinary whole one, as in torch. A released one becomes a released one of a copy of its unit, with copies of all
    parameters of that unit: nothing is sent, and the copy of a model can be gathered, saved and given to its own ``initialize``.
    """
    param: Any = itself()
    owner = find_unit(param)
    if owner is None or owner[0].state is UnitState.UNSHARDED:
        return type(param).__deepcopy__(param, memo)
    unit, index = owner
    copy = copy_unit(unit)
    own(copy, announced=True)
    for original, copied in zip(unit.params, copy.params, strict=True):
        if original is not None:
            memo.setdefault(id(original), copied)
    return copy.params[index]


def announce(param: Any, shape: torch.Size, own: torch.Tensor, collectives: Collectives) -> None:
    """Gives ``param`` DeepSpeed's stage-3 attributes, which libraries read off every parameter at stage 3, whole ones included.

    Args:
        param: The parameter; announced as whole and staying so.
        shape: Its whole shape.
        own: This rank's part of it, 1D.
        collectives: Network of the data-parallel axis.
    """
    param.ds_id = id(param)
    param.ds_shape = shape
    param.ds_numel = shape.numel()
    param.ds_status = ParamStatus.AVAILABLE
    param.ds_tensor = own
    param.ds_persist = True
    param.ds_process_group = collectives.topology.group
    param.ds_active_sub_modules = set()
    # Weak: a cycle through its own methods would keep a parameter's memory until the garbage collector runs.
    itself = ref(param)
    param.partition_numel = own.numel
    param.all_gather = partial(_api_gather, itself)
    param.partition = partial(_api_release, itself)
    param.ds_summary = partial(_api_summary, itself)


def _units_of(itself: ref[Any], params: Iterable[torch.Tensor] | None) -> list[Unit]:
    owners = [find_unit(param) for param in (params if params is not None else [itself()]) if param is not None]
    return list({id(owner[0]): owner[0] for owner in owners if owner is not None}.values())


def _api_gather(itself: ref[Any], param_list: Iterable[torch.Tensor] | None = None, *args: object, **kwargs: object) -> None:
    for unit in _units_of(itself, param_list):
        unit.unshard()


def _api_release(
    itself: ref[Any], param_list: Iterable[torch.Tensor] | None = None, *args: object, has_been_updated: bool = False, **kwargs: object
) -> None:
    for unit in _units_of(itself, param_list):
        if has_been_updated:
            unit.take_full()
        unit.reshard(leave=True)


def _api_summary(itself: ref[Any], *args: object, **kwargs: object) -> dict[str, Any]:
    param = itself()
    names = ("ds_id", "ds_status", "ds_numel", "ds_shape", "ds_persist", "requires_grad")
    return {name.removeprefix("ds_"): getattr(param, name, None) for name in names}
