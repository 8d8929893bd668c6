"""Save param groups, and find the saved group whose hyper-parameters a present one takes over: by parameter names, not by position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hf_zero.checkpoint.files.catalog import Catalog
from hf_zero.checkpoint.format.names import MASTER
from hf_zero.checkpoint.format.records import GroupRecord, UnitRecord, present_params
from hf_zero.checkpoint.format.values import Encoder
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.units.names import has_left
from hf_zero.core.units.unit import Unit
from hf_zero.errors import CheckpointError

# Options of the implementation, which do not change results. The present values stay, so that a run can move between devices.
EXECUTION_KEYS = frozenset({"params", "fused", "foreach", "capturable"})
_PER_GROUP = ("lr", "lrs", "lambdas", "momentums")  # last words of a scheduler's keys such as base_lrs, _last_lr, lr_lambdas


def group_records(optimizer: ShardedOptimizer, encoder: Encoder) -> tuple[GroupRecord, ...]:
    """Return the param groups with the names of their parameters.

    Raises:
        CheckpointError: A param group holds a value that cannot be saved.
    """
    records = []
    for index, group in enumerate(optimizer.param_groups):
        values = {key: value for key, value in group.items() if key not in EXECUTION_KEYS}
        records.append(GroupRecord(names_in_group(optimizer.units, index), encoder.encode(values, f"optimizer.param_groups[{index}]")))
    return tuple(records)


def complete_groups(groups: Sequence[GroupRecord], units: Iterable[UnitRecord]) -> tuple[GroupRecord, ...]:
    """Return rank 0's param groups, completed with the parameters of other pipeline stages that ``units`` lists."""
    names = [dict.fromkeys(group.params) for group in groups]
    for unit, param in present_params(units):
        if unit.kind == MASTER and param.group >= 0:
            names[param.group][param.name] = None
    return tuple(replace(group, params=tuple(own)) for group, own in zip(groups, names, strict=True))


def sources_of_groups(optimizer: ShardedOptimizer, groups: Sequence[GroupRecord], catalog: Catalog) -> list[int | None]:
    """Return for each present param group the index of the first saved group with a parameter of it; None if there is none.

    Groups that train nothing have no names: all their parameters are frozen, or they are in another pipeline stage. So a present group
    without names, and a saved one without names, belong to the group at their position, unless another group has taken it by name.
    """
    names = [{catalog.canonical(name) for name in names_in_group(optimizer.units, index)} for index in range(len(optimizer.param_groups))]
    sources = [next((place for place, saved in enumerate(groups) if own & set(saved.params)), None) for own in names]
    taken = set(sources)
    return [
        index if source is None and index < len(groups) and index not in taken and not (names[index] and groups[index].params) else source
        for index, source in enumerate(sources)
    ]


def for_present_groups(saved: Any, present: Any, sources: Sequence[int | None], count: int) -> Any:
    """Return the saved state of a scheduler with its values per param group in the order of the present groups.

    Param groups take over hyper-parameters by parameter name, so the learning rates that a scheduler keeps must follow them: torch's
    ``base_lrs`` and the like are lists by position. States of inner schedulers (``_schedulers``) are changed too.

    Args:
        saved: Saved state of the scheduler, decoded.
        present: State of the present scheduler; a present group without a saved one keeps its value.
        sources: Index of the saved group of each present group; None if there is none.
        count: Number of saved groups.

    Raises:
        CheckpointError: The present scheduler lacks a value for a present group without a saved one.
    """
    if list(sources) == list(range(count)) or not isinstance(saved, Mapping):
        return saved
    found = dict(saved)
    for key, value in saved.items():
        own = present.get(key) if isinstance(present, Mapping) else None
        if isinstance(value, (list, tuple)) and len(value) == count and key.rsplit("_", 1)[-1] in _PER_GROUP:
            found[key] = type(value)(_value(key, value, own, index, source) for index, source in enumerate(sources))
        elif isinstance(value, list) and isinstance(own, list) and len(own) == len(value):  # states of inner schedulers
            found[key] = [for_present_groups(one, other, sources, count) for one, other in zip(value, own, strict=True)]
    return found


def _value(key: str, saved: Sequence[Any], present: Any, index: int, source: int | None) -> Any:
    if source is not None:
        return saved[source]
    if isinstance(present, (list, tuple)) and index < len(present):
        return present[index]
    raise CheckpointError(
        f"scheduler[{key!r}] has a value for each of {len(saved)} saved param groups, and none for param group {index} of this optimizer, "
        "whose parameters were not trained: pass load_lr_scheduler_states=False"
    )


def names_in_group(units: Sequence[Unit], group: int) -> tuple[str, ...]:
    """Return the names of the parameters in ``units`` that the param group ``group`` trains."""
    slots = (slot for unit in units for slot in unit.layout.slots if slot.group == group)
    return tuple(slot.name for slot in slots if not has_left(slot.name))


def update_group(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set the hyper-parameters of ``group`` to ``values``; write into a tensor learning rate in place, because schedulers hold it."""
    for key, value in values.items():
        present = group.get(key)
        if not isinstance(present, torch.Tensor):
            group[key] = float(value) if isinstance(value, torch.Tensor) and isinstance(present, float) else value
        elif present.numel() == 1:
            present.fill_(float(value))
        elif isinstance(value, torch.Tensor) and value.shape == present.shape:
            present.copy_(value)
        else:
            group[key] = value


def differences(first: Any, second: Any) -> str:
    """Return the hyper-parameters in which two param groups differ, for messages."""
    keys = sorted(key for key in {*first, *second} if first.get(key) != second.get(key))
    return ", ".join(f"{key} {first.get(key)!r} and {second.get(key)!r}" for key in keys)
