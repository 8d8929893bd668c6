"""Divide shards into segments, one per param group, and step a torch optimizer over some of them at a time."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_zero.core.optimizer.clones import attributes_of, clone, is_mark, take_attributes
from hf_zero.core.optimizer.common_states import common_states, set_common_states, states_by_param
from hf_zero.core.optimizer.held_params import nested_of
from hf_zero.core.optimizer.master_parts import new_part
from hf_zero.core.optimizer.nested import require_state
from hf_zero.core.optimizer.step_values import ChangedInPlace
from hf_zero.core.units.layout import ParamSlot, Range
from hf_zero.core.units.unit import Unit
from hf_zero.errors import ConfigError, StateError
from hf_zero.native.passes import LOW_TYPES
from hf_zero.ops.host_optimizers import HostOptimizer


def learning_rates(groups: Iterable[dict[str, Any]]) -> list[float]:
    """Return the learning rate of each param group; nan if the optimizer sets it itself (Adafactor with ``relative_step``), or names it
    otherwise.
    """
    return [math.nan if group.get("lr") is None else float(group["lr"]) for group in groups]


def group_of_params(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[int, int]:
    """Return the index of the param group of each parameter of the optimizer, by id, frozen ones included.

    Raises:
        ConfigError: The optimizer holds a tensor that is not a parameter of the model, or tensors of all parameters outside of its
            state, or has been stepped before.
    """
    require_state(optimizer)
    if not is_fresh(optimizer):
        raise ConfigError(
            f"the {type(optimizer).__name__} given to initialize() already has state for {len(optimizer.state)} parameters; "
            "pass a new optimizer, and resume with load_checkpoint()"
        )
    groups: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in names:
                raise ConfigError(
                    f"parameter {position} of param group {index} (shape {tuple(param.shape)}) of the optimizer is not a parameter of the "
                    "model; build the optimizer from the parameters of the model that is passed to initialize(), anew if an earlier "
                    "initialize() with it broke off. Parameters of a loss function: make the loss a submodule of the model, or freeze them "
                    "with requires_grad_(False) if they are not trained"
                )
            groups[id(param)] = index
    return groups


def is_fresh(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer was never stepped. Adagrad fills its state at construction, with step 0, and others mark parameters
    there; entries without content, which a look at ``state`` has left (``train()`` of schedule-free optimizers), are removed.
    """
    for param in [param for param, state in states_by_param(optimizer).items() if not state]:
        del optimizer.state[param]
    states = states_by_param(optimizer).values()
    return all(is_mark(state) or ("step" in state and float(state["step"]) == 0) for state in states)


@dataclass(frozen=True)
class OwnedSegment:
    """One param group's part of one unit's shard; the inner optimizer treats it as a parameter.

    Attributes:
        unit: Unit of the segment.
        group: Index of the param group.
        range: Elements, counted from the start of this rank's shard.
        tensor: View of the master, (range.numel,).
        inner: The optimizer that updates the segment.
        rests: Whether updates skip the segment, see [Note: trained parameters].
    """

    unit: Unit
    group: int
    range: Range
    tensor: nn.Parameter
    inner: torch.optim.Optimizer
    rests: bool = False

    @property
    def state(self) -> Mapping[str, Any]:
        """Return the state that the inner optimizer keeps for the segment, live; empty before the first step. Does not wait for updates."""
        state: Mapping[str, Any] = dict.get(self.inner.state, self.tensor, {})  # a script's own look waits for updates
        return state

    def install(self, state: dict[str, Any]) -> None:
        """Replace the segment's state; an empty ``state`` removes it."""
        if state:
            dict.__setitem__(self.inner.state, self.tensor, state)
        else:
            dict.pop(self.inner.state, self.tensor, None)

    def elementwise(self) -> list[tuple[str, torch.Tensor]]:
        """Return the states that have one number per element, by name."""
        shape = self.tensor.shape
        return [
            (name, value) for name, value in self.state.items() if isinstance(value, torch.Tensor) and value.ndim and value.shape == shape
        ]

    def divide(self, resting: Collection[int]) -> list[OwnedSegment]:
        """Return the segments that replace this one if the parameters at the positions ``resting`` of the unit are frozen; local.

        Each run of adjacent parameters that are all frozen or all trained becomes a segment with its part of the states; numbers (``step``)
        are copied.
        """
        inside, slots = self.range.shift(self.unit.owned.start), self.unit.layout.slots
        start = inside.start
        runs: list[tuple[int, bool]] = []  # the first element inside the segment, and whether the run rests
        for index in range(bisect_right(slots, start, key=_stop_of), bisect_left(slots, inside.stop, key=_start_of)):
            slot = slots[index]
            part = slot.range.intersect(inside)
            if slot.group == self.group and part.numel and (not runs or runs[-1][1] is not (index in resting)):
                runs.append((part.start - start if runs else 0, index in resting))
        if len(runs) == 1:
            return [self if self.rests is runs[0][1] else replace(self, rests=runs[0][1])]
        return self._cut(runs)

    def cut_at(self, starts: Iterable[int]) -> list[OwnedSegment]:
        """Return segments that begin at this one's start and at ``starts``, element positions inside it; all have its value of
        ``rests``.
        """
        runs = [(0, self.rests), *((start, self.rests) for start in sorted(starts) if start)]
        return [self] if len(runs) == 1 else self._cut(runs)

    def _cut(self, runs: Sequence[tuple[int, bool]]) -> list[OwnedSegment]:
        state, rows = self.state, {name for name, _ in self.elementwise()}
        stops = [*(first for first, _ in runs[1:]), self.range.numel]
        pieces = []
        for (first, rests), stop in zip(runs, stops, strict=True):
            tensor = new_part(self.tensor.detach()[first:stop])
            pieces.append(replace(self, range=Range(first, stop).shift(self.range.start), tensor=tensor, rests=rests))
            own = {name: value[first:stop] if name in rows else deepcopy(value) for name, value in state.items()}
            pieces[-1].install(own)
        self.install({})
        return pieces

    def within(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the segment's part of ``flat``, (shard_numel,); a view."""
        return flat[self.range.start : self.range.stop]

    def gradient(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the segment's part of its unit's gradient, (shard_numel,), in the gradient's dtype."""
        grad = self.within(shard)
        return grad if grad.dtype == self.tensor.dtype else grad.to(self.tensor.dtype)

    @property
    def low(self) -> torch.Tensor | None:
        """Return the part of the shard to which the new value is cast; None if the master is the shard."""
        return None if self.unit.master is self.unit.shard else self.within(self.unit.shard)


def _start_of(slot: ParamSlot) -> int:
    return slot.range.start


def _stop_of(slot: ParamSlot) -> int:
    return slot.range.stop


class Segments(list[OwnedSegment]):
    """All segments of an optimizer on this rank, in order."""

    def __init__(self, segments: Iterable[OwnedSegment] = ()) -> None:
        super().__init__(segments)
        self._of: dict[int, list[OwnedSegment]] = {}
        for segment in self:
            self._of.setdefault(id(segment.unit), []).append(segment)

    def of(self, unit: Unit) -> list[OwnedSegment]:
        """Return the segments inside ``unit``."""
        return self._of.get(id(unit), [])

    def trained_of(self, unit: Unit) -> list[OwnedSegment]:
        """Return the segments inside ``unit`` that are updated now."""
        return [segment for segment in self.of(unit) if not segment.rests]

    @property
    def starts(self) -> list[tuple[str, int, int]]:
        """Return unit, param group and first element of each segment, in order."""
        return [(segment.unit.name, segment.group, segment.range.start) for segment in self]

    @property
    def trained(self) -> list[OwnedSegment]:
        """Return the segments that are updated now."""
        return [segment for segment in self if not segment.rests]


def lay_out(inner: torch.optim.Optimizer, units: Sequence[Unit], cuts: Callable[[Unit], Sequence[Range]]) -> Segments:
    """Return the segments of this rank's shards.

    Args:
        inner: The optimizer that updates the segments.
        units: Trained units.
        cuts: Returns the ranges of a unit's shard that are updated at a time; no segment crosses their bounds.

    Raises:
        StateError: A unit has no master.
    """
    return Segments(
        # nn.Parameter, because some optimizers check the class; without requires_grad. The view shares the master's memory.
        OwnedSegment(unit, segment.group, part, new_part(master_of(unit)[part.start : part.stop]), inner)
        for unit in units
        for segment in unit.layout.segments(unit.rank)
        for cut in cuts(unit)
        if (part := segment.range.shift(-unit.owned.start).intersect(cut)).numel
    )


def master_of(unit: Unit) -> torch.Tensor:
    """Return the unit's master, (shard_numel,).

    Raises:
        StateError: The unit has no master, because none of its parameters is trained.
    """
    if unit.master is None:
        raise StateError(f"unit {unit.name} is not trained: it has no master")
    return unit.master


def part_states(state: Mapping[str, Any], values: torch.Tensor) -> None:
    """Give states that a step has put into the memory of ``values``, the former memory of their parameter, memory of their own: the
    parameter returns there (``state["x"], param.data = param.data, state["x"]``).
    """
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel() and value.data_ptr() == values.data_ptr():
            state[name] = value.clone()  # type: ignore[index]


@contextmanager
def stepped(segments: Sequence[OwnedSegment]) -> Iterator[None]:
    """Let an optimizer step over ``segments`` inside the ``with``, as over parameters: they require gradients there, and values that it
    gives them in other memory (``param.data = ...``) are copied to the masters.
    """
    with torch._C.DisableTorchFunctionSubclass():
        held = [segment.tensor.data for segment in segments]
        for segment in segments:
            segment.tensor.requires_grad_(True)
    try:
        with torch.no_grad():
            yield
    finally:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for segment, values in zip(segments, held, strict=True):
                tensor = segment.tensor.requires_grad_(False)
                if tensor.data_ptr() != values.data_ptr():
                    part_states(segment.state, values)
                    values.copy_(tensor.data)
                    tensor.data = values


class SubGroupStepper:
    """Driver of one step of ``optimizer``, sub-group by sub-group.

    [Note: stepping by sub-groups] Each sub-group is stepped by a clone: an object of the same class with the same attributes and the same
    state dict, whose groups hold the sub-group's segments and the options that the groups had when the step began. So all sub-groups see
    the same value of a counter that an optimizer keeps in its groups (schedule-free ones do), its attributes or its state (MADGRAD does),
    as in one common step, also where the step changes it in place; a learning rate that changes meanwhile has no effect; and the step of a
    sub-group does not read the segments of others.

    Args:
        optimizer: The inner optimizer.
        accumulation_dtype: Dtype in which gradients are multiplied by the factor.
        threads: Largest number of threads of a native pass; None is torch's number.

    Attributes:
        optimizer: The argument ``optimizer``.
        values: Options of the groups at construction.
        threads: The argument ``threads``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, accumulation_dtype: torch.dtype, threads: int | None = None) -> None:
        self.optimizer = optimizer
        self._accumulation_dtype = accumulation_dtype
        self.threads = threads or torch.get_num_threads()
        self.values = [_values(group) for group in optimizer.param_groups]
        self._attributes = attributes_of(optimizer)
        self._common = deepcopy(common_states(optimizer))
        self._in_place = None if isinstance(optimizer, HostOptimizer) else ChangedInPlace([optimizer, *nested_of(optimizer)])
        self._after: torch.optim.Optimizer | None = None  # the clone that stepped last

    @torch.no_grad()
    def step(
        self,
        segments: Sequence[OwnedSegment],
        grads: Sequence[torch.Tensor],
        factor: float = 1.0,
        lows: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Update ``segments``.

        Args:
            segments: Segments of one sub-group.
            grads: The gradient of each segment, in the dtype in which it arrived; may be overwritten.
            factor: Factor by which gradients are multiplied first.
            lows: For each segment, a tensor of another dtype that also receives the new value, or None.
        """
        groups = [{**values, "params": []} for values in self.values]
        for segment in segments:
            groups[segment.group]["params"].append(segment.tensor)
        other = clone(self.optimizer, groups)
        targets = list(lows or [None] * len(segments))
        if isinstance(other, HostOptimizer):
            update_with_lows(other, [segment.tensor for segment in segments], grads, targets, factor, self.threads)
        else:
            if self._after is not None and common_states(self.optimizer):
                set_common_states(self.optimizer, self._common)
            if self._after is not None and self._in_place is not None:
                self._in_place.restore()
            self._step(other, segments, grads, factor)
            _copy_to([segment.tensor for segment in segments], targets)
        self._after = other

    def _step(self, other: torch.optim.Optimizer, segments: Sequence[OwnedSegment], grads: Sequence[torch.Tensor], factor: float) -> None:
        """Step a torch optimizer: gradients are cast to the accumulation dtype, multiplied, then cast to the master's dtype, as without
        offload.
        """
        for segment, grad in zip(segments, grads, strict=True):
            wide = grad.to(torch.promote_types(self._accumulation_dtype, segment.tensor.dtype))
            segment.tensor.grad = (wide.mul_(factor) if factor != 1.0 else wide).to(segment.tensor.dtype)
        try:
            with stepped(segments):
                other.step()
        finally:
            for segment in segments:
                segment.tensor.grad = None

    def finish(self) -> None:
        """Copy the options and attributes that the clones' steps have changed into the optimizer."""
        if self._after is None:
            return
        for group, before, after in zip(self.optimizer.param_groups, self.values, self._after.param_groups, strict=False):
            group.update({key: value for key, value in _values(after).items() if value is not before.get(key)})
        take_attributes(self.optimizer, self._attributes, self._after)


def update_with_lows(
    optimizer: HostOptimizer,
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    lows: Sequence[torch.Tensor | None],
    factor: float,
    threads: int,
) -> None:
    """Call ``optimizer.update`` and write to ``lows`` of any dtype: 16-bit ones in the same pass, others after it."""
    fused = [low if low is not None and low.dtype in LOW_TYPES else None for low in lows]
    optimizer.update(params, grads, fused, factor, threads)
    _copy_to(params, [None if done is not None else low for done, low in zip(fused, lows, strict=True)])


def _copy_to(params: Sequence[torch.Tensor], lows: Sequence[torch.Tensor | None]) -> None:
    for param, low in zip(params, lows, strict=True):
        if low is not None:
            low.copy_(param)


def _values(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
