"""Keep optimizer states of parameters: read and write states of single parameters, and hold those that one rank updates in full shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.core.optimizer.segments import OwnedSegment, Segments, master_of
from hf_zero.core.units.alone import whole_from_owners
from hf_zero.core.units.layout import ParamSlot, Range
from hf_zero.core.units.marks import is_wrapped
from hf_zero.core.units.parts import part_of, voters_of, whole_of
from hf_zero.core.units.unit import Unit
from hf_zero.errors import StateError


class ParamStates(Protocol):
    """Access to a state by unit, position of the parameter in the unit, and name of the state (``exp_avg``, ...)."""

    def read(self, unit: Unit, index: int, key: str) -> torch.Tensor | None:
        """Return the complete state, a new tensor; None if there is none, for example before the first step. Collective."""

    def write(self, unit: Unit, index: int, key: str, value: torch.Tensor) -> None:
        """Set the complete state; collective.

        Raises:
            StateError: On all ranks, if the state does not exist yet, or has another shape.
        """

    def read_own(self, unit: Unit, index: int, key: str) -> torch.Tensor | None:
        """Return this rank's part, 1D; None if this rank has none. Local."""

    def write_own(self, unit: Unit, index: int, key: str, value: torch.Tensor) -> None:
        """Set this rank's part. Local.

        Raises:
            StateError: The state does not exist yet, or has another shape.
        """

    def parts(self) -> str:
        """Return a short text that tells apart the parts of parameters whose states this rank keeps."""


def _short(parts: object) -> str:
    return sha256(repr(parts).encode()).hexdigest()[:16]


class SegmentStates:
    """States that are sharded like the masters.

    The states of a parameter belong to the segments with its elements; other segments of its unit may be frozen, and have no states. A rank
    without elements of the parameter cannot determine whether a state exists, so the ranks vote.

    Args:
        segments: Segments of all units on this rank.
        settle: Waits for running updates.
    """

    def __init__(self, segments: Segments, settle: Callable[[], None]) -> None:
        self._segments = segments
        self._settle = settle

    def read(self, unit: Unit, index: int, key: str) -> torch.Tensor | None:
        """Return the complete state in the parameter's shape; see ``ParamStates.read``."""
        parts = self._parts(unit, index, key)
        if not self._is_anywhere(unit, index, key, parts):
            return None
        own = gather_param(unit, index, _flat(unit, parts or []), key)
        param = unit.params[index]
        return whole_of(param, own) if param is not None else own

    def write(self, unit: Unit, index: int, key: str, value: torch.Tensor) -> None:
        """Set the complete state; see ``ParamStates.write``."""
        parts = self._parts(unit, index, key)
        if not self._is_anywhere(unit, index, key, parts):
            raise no_state(key)
        flat, param = _flat(unit, parts or []), unit.params[index]
        write_param(unit, index, flat, part_of(param, value) if param is not None else value)
        for segment, state in parts or []:
            state.copy_(segment.within(flat))

    def read_own(self, unit: Unit, index: int, key: str) -> torch.Tensor | None:
        """Return this rank's part; see ``ParamStates.read_own``."""
        parts = self._parts(unit, index, key)
        return unit.shard_part(index, _flat(unit, parts)) if parts is not None else None

    def write_own(self, unit: Unit, index: int, key: str, value: torch.Tensor) -> None:
        """Set this rank's part; see ``ParamStates.write_own``."""
        parts = self._parts(unit, index, key)
        if parts is None:
            raise no_state(key)
        flat = _flat(unit, parts)
        unit.shard_part(index, flat).copy_(value)
        for segment, state in parts:
            state.copy_(segment.within(flat))

    def parts(self) -> str:
        """Return a short text, see ``ParamStates``."""
        extents: dict[tuple[str, int, int], Range] = {}  # without cuts, which differ from step to step
        for segment in self._segments:
            key = (segment.unit.name, segment.group, segment.unit.owned.start)
            extents[key] = Range(extents.get(key, segment.range).start, segment.range.stop)
        return _short([(*key, str(extent)) for key, extent in extents.items()])

    def _parts(self, unit: Unit, index: int, key: str) -> list[tuple[OwnedSegment, torch.Tensor]] | None:
        """Return the segments with elements of the parameter, each with its state; None if any has no state, for example before the first
        step.
        """
        self._settle()
        found = [(segment, segment.state.get(key)) for segment in self._segments.of(unit)]
        having = [(segment, value) for segment, value in found if isinstance(value, torch.Tensor) and value.shape == segment.tensor.shape]
        where = unit.layout.slots[index].range.intersect(unit.owned).shift(-unit.owned.start)
        parts = [(segment, value) for segment, value in having if segment.range.intersect(where).numel]
        covered = sum(segment.range.intersect(where).numel for segment, _ in parts)
        stepped = bool(having) or all(segment.rests for segment, _ in found)  # received from other ranks if this rank has no elements of it
        return parts if covered == where.numel and stepped else None

    def _is_anywhere(self, unit: Unit, index: int, key: str, parts: Sequence[tuple[OwnedSegment, torch.Tensor]] | None) -> bool:
        """Return whether the state exists on any rank; ``parts`` is this rank's result of ``_parts``. Collective if parameters are sharded,
        or if ranks may hold no element of this one. The label of that vote names no parameter: each rank may read an expert of its own.
        """
        voters = voters_of(unit.params[index])
        known = parts is not None and bool(parts or (voters is None and not unit.layout.slots[index].numel))
        if unit.layout.world > 1:
            known = unit.collectives.any_rank(known, f"{unit.name}: {key}")
        return known if voters is None else voters.any_rank(known, "states that are read")


def _flat(unit: Unit, parts: Iterable[tuple[OwnedSegment, torch.Tensor]]) -> torch.Tensor:
    """Return ``parts`` at their positions in this rank's shard, (shard_numel,), with zeros elsewhere.

    The dtype is at least fp32, because states may be wider than the master, and a rank without parts does not know their dtype.
    """
    master = master_of(unit)
    flat = torch.zeros_like(master, dtype=torch.promote_types(master.dtype, torch.float32))
    for segment, value in parts:
        segment.within(flat).copy_(value)
    return flat


def no_state(key: str) -> StateError:
    """Return the error for a state named ``key`` that does not exist."""
    return StateError(f"there is no optimizer state {key!r}; states exist after the first step")


def write_param(unit: Unit, index: int, flat: torch.Tensor, value: torch.Tensor) -> None:
    """Write this rank's part of the complete ``value`` of parameter ``index`` into the sharded ``flat``, (shard_numel,).

    Raises:
        StateError: ``value`` has another number of elements than the parameter.
    """
    slot = unit.layout.slots[index]
    if value.numel() != slot.numel:
        raise StateError(f"parameter {slot.name} has shape {tuple(slot.shape)}, the value has {tuple(value.shape)}")
    part = slot.range.intersect(unit.owned)
    if part.numel:
        source = value.detach().reshape(-1)[part.start - slot.offset : part.stop - slot.offset]
        flat[part.start - unit.owned.start : part.stop - unit.owned.start].copy_(source)


def gather_param(unit: Unit, index: int, flat: torch.Tensor, what: str) -> torch.Tensor:
    """Return the full value of parameter ``index`` in a sharded (shard_numel,) tensor, for example a moment, as a new tensor. Collective.

    ``what`` names the tensor in the label of the collective.
    """
    return whole_from_owners(unit, index, flat, f"{unit.name}: {what}").view(unit.layout.slots[index].shape)


@dataclass(frozen=True)
class WholeParam:
    """A parameter that this rank updates in its full shape.

    Attributes:
        unit: Unit of the parameter.
        slot: Place of the parameter in the unit.
        param: The tensor of full shape that the inner optimizer updates; it has values during a step only.
        writes: Whether this rank writes the parameter's state into checkpoints: at stage 0 all ranks hold it, and one of them does.
        inner: The optimizer that updates the parameter.
    """

    unit: Unit
    slot: ParamSlot
    param: nn.Parameter
    writes: bool
    inner: torch.optim.Optimizer

    @property
    def state(self) -> Mapping[str, Any]:
        """Return the state that the inner optimizer keeps for the parameter, live; empty before the first step."""
        state: Mapping[str, Any] = self.inner.state.get(self.param, {})
        return state

    def install(self, state: dict[str, Any]) -> None:
        """Replace the parameter's state; an empty ``state`` removes it."""
        if state:
            self.inner.state[self.param] = state
        else:
            self.inner.state.pop(self.param, None)


class OwnerStates:
    """``ParamStates`` of parameters that have an owner. A state has the shape that the owner's optimizer gives it: for example moments of
    rows, or moments of all experts.

    Args:
        whole: Parameters that this rank updates, by name.
        owners: The rank that updates each parameter, by name (at stage 0, where all ranks do, the rank that saves its state).
        collectives: Network of these ranks.
    """

    def __init__(self, whole: Mapping[str, WholeParam], owners: Mapping[str, int], collectives: Collectives) -> None:
        self._whole, self._owners, self._net = whole, owners, collectives

    def read(self, unit: Unit, index: int, key: str) -> torch.Tensor | None:
        """Return the complete state, which the owner sends to all ranks; see ``ParamStates.read``."""
        name = unit.layout.slots[index].name
        value = self._numbers(name, key)
        if not _travels(unit):
            return value
        net, owner = self._net, self._owners.get(name)
        if owner is None:  # a parameter without elements
            return None
        kind = net.broadcast_object((tuple(value.shape), value.dtype) if value is not None else None, owner, f"{unit.name}: {key}")
        if kind is None:
            return None
        device = net.topology.device
        flat = value.to(device).reshape(-1) if value is not None else torch.empty(kind[0], dtype=kind[1], device=device).view(-1)
        net.broadcast(flat, owner, f"{unit.name}: {key}")
        return flat.view(kind[0])

    def write(self, unit: Unit, index: int, key: str, value: torch.Tensor) -> None:
        """Set the complete state on the owner; all ranks raise if it cannot be set. Collective at stages 1 to 3. See
        ``ParamStates.write``.
        """
        name = unit.layout.slots[index].name
        present, owner = self._present(name, key), self._owners.get(name)
        shape = tuple(present.shape) if present is not None else None
        if _travels(unit) and owner is not None:
            shape = self._net.broadcast_object(shape, owner, f"{unit.name}: {key}")
        if shape is None:
            raise no_state(key)
        if shape != tuple(value.shape):
            raise _other_shape(key, name, shape, value)
        if present is not None:
            present.copy_(value.detach())

    def read_own(self, unit: Unit, index: int, key: str) -> torch.Tensor | None:
        """Return the complete state on the owner, None on other ranks; see ``ParamStates.read_own``."""
        name = unit.layout.slots[index].name
        value = self._present(name, key)
        if value is not None and is_wrapped(value):
            value = self._numbers(name, key)
        return value.reshape(-1) if value is not None else None

    def write_own(self, unit: Unit, index: int, key: str, value: torch.Tensor) -> None:
        """Set the state on the owner; do nothing on other ranks. See ``ParamStates.write_own``."""
        name = unit.layout.slots[index].name
        present = self._present(name, key)
        if present is None:
            if _travels(unit) and self._owners.get(name) != self._net.rank:
                return
            raise no_state(key)
        if present.numel() != value.numel():
            raise _other_shape(key, name, tuple(present.shape), value)
        present.copy_(value.detach().reshape(present.shape))

    def parts(self) -> str:
        """Return a short text, see ``ParamStates``."""
        return _short([(name, entry.slot.group) for name, entry in self._whole.items()])

    def _numbers(self, name: str, key: str) -> torch.Tensor | None:
        """Return a copy of the state tensor ``key`` of parameter ``name``; the numbers that codes of a library's own class stand for."""
        value = self._present(name, key)
        if value is None or not is_wrapped(value):
            return value.detach().clone() if value is not None else None
        return torch.empty(value.shape, dtype=value.dtype, device=value.device).copy_(value)

    def _present(self, name: str, key: str) -> torch.Tensor | None:
        """Return the state tensor ``key`` of parameter ``name`` on this rank; None if this rank keeps none."""
        entry = self._whole.get(name)
        value = entry.state.get(key) if entry is not None else None
        return value if isinstance(value, torch.Tensor) else None


def _travels(unit: Unit) -> bool:
    """Return whether some ranks do not have all parameters of the unit, so that owners must send updates to them."""
    return unit.layout.world > 1 or unit.collectives.topology.of_experts


def _other_shape(key: str, name: str, shape: tuple[int, ...], value: torch.Tensor) -> StateError:
    return StateError(f"the state {key!r} of parameter {name} has shape {shape}, the value has {tuple(value.shape)}")
