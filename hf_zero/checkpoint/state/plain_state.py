"""Load the state of a plain torch optimizer, of whole parameters, into an engine's: its ``state_dict``, or what it has at the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import torch

from hf_zero.checkpoint.state.optimizer_state import cut_by_history, placed, slots_in
from hf_zero.checkpoint.state.param_groups import EXECUTION_KEYS, update_group
from hf_zero.core.optimizer.clones import options_of, row_names, state_at_start, state_names
from hf_zero.core.optimizer.held_params import nested_of
from hf_zero.core.optimizer.segments import OwnedSegment, is_fresh
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.optimizer.whole_tensors import WholeTensorOptimizer
from hf_zero.core.units.layout import FROZEN, ParamSlot
from hf_zero.core.units.parts import part_of
from hf_zero.core.units.unit import find_unit
from hf_zero.errors import ConfigError


def load_plain_state(optimizer: ShardedOptimizer, saved: Mapping[str, Any]) -> str:
    """Load the settings of the param groups and the states of all parameters, as torch's ``load_state_dict`` does; local.

    Args:
        optimizer: The engine's optimizer; every rank loads the same ``saved``.
        saved: Result of ``state_dict`` of a torch optimizer; parameters are numbers, or names as FSDP writes them.

    Returns:
        "", or the reason why nothing was loaded.
    """
    groups = optimizer.given
    own, theirs = [len(group) for group in groups], [len(group["params"]) for group in saved["param_groups"]]
    by_name = any(isinstance(key, str) for group in saved["param_groups"] for key in group["params"])
    if len(own) != len(theirs) or (own != theirs and not by_name):
        return f"its optimizer has param groups of {theirs} parameters, and this one has groups of {own}"
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    if others := [str(key) for key in saved["state"] if key not in set(keys)]:
        return f"it keeps states of no parameter ({', '.join(others[:5])})"
    if nested_of(optimizer.inner):
        return f"{type(optimizer.inner).__name__} holds other optimizers, whose states it may keep elsewhere"
    ordered: list[Any] = [param for group in groups for param in group]
    if by_name:
        named = {owner[0].layout.slots[owner[1]].name: param for param in ordered if (owner := find_unit(param)) is not None}
        ordered = [named.get(str(key)) for key in keys]
    states = {}
    for key, param in zip(keys, ordered, strict=True):
        owner, state = find_unit(param) if param is not None else None, saved["state"].get(key)
        if param is not None and owner is not None and state:
            slot = owner[0].layout.slots[owner[1]]
            states[slot.name] = {name: _own_part(param, slot, value) for name, value in state.items()}
    settings = [{key: value for key, value in group.items() if key not in EXECUTION_KEYS} for group in saved["param_groups"]]
    before = [deepcopy(options_of(group)) for group in optimizer.param_groups]
    _set_options(optimizer, settings)  # which states the optimizer keeps depends on them (amsgrad, momentum)
    plan = _WholeParams(optimizer, states) if isinstance(optimizer, WholeTensorOptimizer) else _Segments(optimizer, states)
    if reason := plan.reason():
        _set_options(optimizer, before)
        return reason
    plan.apply()
    return ""


def take_plain_state(inner: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Remove the state of an optimizer that a script has loaded or stepped before, and return its ``state_dict``; None if it has none."""
    if is_fresh(inner) or nested_of(inner):
        return None
    found = inner.state_dict()
    if not found.keys() >= {"state", "param_groups"}:
        return None
    inner.state.clear()
    return found


def resume_from(optimizer: ShardedOptimizer, started: Mapping[str, Any]) -> None:
    """Give a new optimizer the state that `take_plain_state` has taken of its inner one; local.

    Raises:
        ConfigError: The state does not fit.
    """
    if reason := load_plain_state(optimizer, started):
        raise ConfigError(
            f"the {type(optimizer.inner).__name__} given to initialize() already has state, which cannot be continued: {reason}. Pass a "
            "new optimizer, and resume with load_checkpoint()"
        )


def _set_options(optimizer: ShardedOptimizer, options: Sequence[Mapping[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, options, strict=True):
        update_group(group, deepcopy({key: value for key, value in values.items() if key in group or key == "initial_lr"}))


def _own_part(param: torch.Tensor, slot: ParamSlot, value: Any) -> Any:
    """Return this rank's part of a state with one element per element of the divided ``param``; other values unchanged."""
    divided = isinstance(value, torch.Tensor) and value.ndim and value.shape != slot.shape and value.numel() > 1
    return part_of(param, value) if divided else value


def _as_in(tensor: torch.Tensor, value: torch.Tensor) -> torch.dtype:
    """Return the dtype that torch's ``load_state_dict`` gives to the state ``value`` of ``tensor``."""
    return tensor.dtype if value.is_floating_point() and tensor.is_floating_point() else value.dtype


class _WholeParams:
    """States that the owners of parameters keep whole."""

    def __init__(self, optimizer: WholeTensorOptimizer, states: Mapping[str, Mapping[str, Any]]) -> None:
        self._optimizer, self._states = optimizer, states

    def reason(self) -> str:
        """Return why the optimizer cannot load the states; "" if it can. The same on all ranks: it depends on names and shapes only."""
        return _reason(self._optimizer, self._states, None)

    def apply(self) -> None:
        """Replace all states; local."""
        self._optimizer.state_store.settle()
        for entry in self._optimizer.whole:
            state = self._states.get(entry.slot.name)
            if state is None:
                entry.install(state_at_start(self._optimizer.inner, entry.slot.group, entry.param))
                continue
            group = self._optimizer.param_groups[entry.slot.group]
            on_device = bool(group.get("capturable") or group.get("fused"))
            entry.install({name: self._placed(name, value, entry.param, on_device) for name, value in state.items()})

    @staticmethod
    def _placed(name: str, value: Any, like: torch.Tensor, on_device: bool) -> Any:
        if not isinstance(value, torch.Tensor) or name == "step":
            return placed(deepcopy(value), like, on_device)
        return value.to(like.device, _as_in(like, value), copy=True)


class _Segments:
    """States that are sharded like the masters: rows with one element per parameter element, and single numbers."""

    def __init__(self, optimizer: ShardedOptimizer, states: Mapping[str, Mapping[str, Any]]) -> None:
        self._optimizer, self._states = optimizer, states
        self._known = {index: row_names(optimizer.inner, index) for index in range(len(optimizer.param_groups))}

    def reason(self) -> str:
        """Return why the optimizer cannot load the states; "" if it can. The same on all ranks: it depends on names and shapes only."""
        return _reason(self._optimizer, self._states, self._rows)

    def _rows(self, slot: ParamSlot) -> dict[str, torch.Tensor]:
        """Return the states of a parameter with one element per element, in its shape."""
        known, rows = self._known[slot.group], {}
        for name, value in self._states.get(slot.name, {}).items():
            alike = isinstance(value, torch.Tensor) and value.shape == slot.shape and name != "step"
            if alike and (slot.numel > 1 or known is None or name in known):
                rows[name] = value
        return rows

    def _numbers(self, slot: ParamSlot) -> dict[str, Any]:
        rows = self._rows(slot)
        return {name: value for name, value in self._states.get(slot.name, {}).items() if name not in rows}

    def _history(self, slot: ParamSlot) -> Any:
        """Return a value that differs between parameters that were updated a different number of times."""
        return self._rows(slot).keys(), {name: _plain(value) for name, value in self._numbers(slot).items()}

    def apply(self) -> None:
        """Replace all states; local."""
        optimizer = self._optimizer
        optimizer.state_store.settle()
        cut_by_history(optimizer, self._history)
        for segment in optimizer.segments:
            group = optimizer.param_groups[segment.group]
            slots, on_device = slots_in(segment), bool(group.get("capturable") or group.get("fused"))
            flat = self._flat(segment, slots)
            numbers = self._numbers(slots[0]) if slots else {}
            state = {name: placed(deepcopy(value), segment.tensor, on_device) for name, value in numbers.items()} | flat
            segment.install(state or state_at_start(segment.inner, segment.group, segment.tensor))
        optimizer.state_store.adopt_states()

    def _flat(self, segment: OwnedSegment, slots: Sequence[ParamSlot]) -> dict[str, torch.Tensor]:
        flat: dict[str, torch.Tensor] = {}
        start = segment.unit.owned.start + segment.range.start  # first element of the segment inside the unit
        for slot in slots:
            part = slot.range.intersect(segment.range.shift(segment.unit.owned.start))
            for name, value in self._rows(slot).items():
                if name not in flat:
                    flat[name] = self._optimizer.state_store.new_state(segment, name, _as_in(segment.tensor, value))
                source = value.detach().reshape(-1)[part.start - slot.offset : part.stop - slot.offset]
                flat[name][part.start - start : part.stop - start].copy_(source)
        return flat


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _reason(
    optimizer: ShardedOptimizer, states: Mapping[str, Mapping[str, Any]], rows: Callable[[ParamSlot], Mapping[str, torch.Tensor]] | None
) -> str:
    """Return why ``states`` do not fit the parameters of ``optimizer``; ``rows`` returns those with the parameter's shape, if all must."""
    names = cache(lambda group, ndim: state_names(optimizer.inner, group, ndim))
    for slot in (slot for unit in optimizer.units for slot in unit.layout.slots if slot.group != FROZEN and slot.numel):
        state = states.get(slot.name)
        if state is None:
            continue
        kept = names(slot.group, len(slot.shape) if rows is None else 1)
        if kept is not None and kept - {"step"} != state.keys() - {"step"}:
            return (
                f"its optimizer keeps {', '.join(sorted(state))} of {slot.name}, and {type(optimizer.inner).__name__}, which trains now, "
                f"keeps {', '.join(sorted(kept)) or 'nothing'}"
            )
        others = {} if rows is None else {name: value for name, value in state.items() if name not in rows(slot)}
        for name, value in others.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                return f"the state {name} of {slot.name} has shape {tuple(value.shape)}, and the parameter has {tuple(slot.shape)}"
    return ""
