"""States that an optimizer keeps for single parameters, read and written whole or as far as this rank has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from hf_zero.core.optimizer.segments import OwnedSegment, Segments, master_of
from hf_zero.core.units.alone import whole_from_owners
from hf_zero.core.units.unit import Unit
from hf_zero.errors import StateError

Parts = list[tuple[OwnedSegment, torch.Tensor]]  # segments, each with its state


class ParamStates(Protocol):
    """Access by unit, position of the parameter in it, and name of the state (``exp_avg``, ...)."""

    def read(self, unit: Unit, index: int, key: str) -> torch.Tensor | None:
        """The whole state, a new tensor; None where there is none, as before the first step. Collective."""

    def write(self, unit: Unit, index: int, key: str, value: torch.Tensor) -> None:
        """Sets the whole state; every rank calls it.

        Raises:
            StateError: There is no such state yet, or it has another shape.
        """

    def read_own(self, unit: Unit, index: int, key: str) -> torch.Tensor | None:
        """This rank's part, 1D; None where it has none. Local."""

    def write_own(self, unit: Unit, index: int, key: str, value: torch.Tensor) -> None:
        """Sets this rank's part. Local.

        Raises:
            StateError: There is no such state yet, or it has another shape.
        """


class SegmentStates:
    """States that lie like the shards.

    Args:
        segments: Of all units on this rank.
        settle: Waits for updates that are under way.
    """

    def __init__(self, segments: Segments, settle: Callable[[], None]) -> None:
        self._segments = segments
        self._settle = settle

    def read(self, unit: Unit, index: int, key: str) -> torch.Tensor | None:
        """As in ``ParamStates``, of the parameter's shape."""
        parts = self._parts(unit, index, key)
        # A rank that has no part of the parameter has no state and cannot tell whether there is one.
        known = parts is not None if unit.layout.world == 1 else unit.collectives.any_rank(bool(parts), f"{unit.name}: {key}")
        return gather_param(unit, index, _flat(unit, parts or ()), key) if known else None

    def write(self, unit: Unit, index: int, key: str, value: torch.Tensor) -> None:
        """As in ``ParamStates``; local."""
        parts, flat = self._present(unit, index, key)
        write_param(unit, index, flat, value)
        for segment, state in parts:
            state.copy_(segment.within(flat))

    def read_own(self, unit: Unit, index: int, key: str) -> torch.Tensor | None:
        """As in ``ParamStates``."""
        parts = self._parts(unit, index, key)
        return unit.shard_part(index, _flat(unit, parts)) if parts is not None else None

    def write_own(self, unit: Unit, index: int, key: str, value: torch.Tensor) -> None:
        """As in ``ParamStates``."""
        parts, flat = self._present(unit, index, key)
        unit.shard_part(index, flat).copy_(value)
        for segment, state in parts:
            state.copy_(segment.within(flat))

    def _present(self, unit: Unit, index: int, key: str) -> tuple[Parts, torch.Tensor]:
        parts = self._parts(unit, index, key)
        if parts is None:
            raise no_state(key)
        return parts, _flat(unit, parts)

    def _parts(self, unit: Unit, index: int, key: str) -> Parts | None:
        """Return the segments that hold elements of parameter ``index``, each with its state; None where one has none.

        Other segments of the unit may have no state yet: those of parameters that were frozen before their first gradient.
        """
        self._settle()
        own, parts = unit.layout.slots[index].range.intersect(unit.owned).shift(-unit.owned.start), []
        for segment in self._segments.of(unit):
            if not segment.range.intersect(own).numel:
                continue
            value = segment.state.get(key)
            if not isinstance(value, torch.Tensor) or value.shape != segment.tensor.shape:
                return None
            parts.append((segment, value))
        return parts


def _flat(unit: Unit, parts: Iterable[tuple[OwnedSegment, torch.Tensor]]) -> torch.Tensor:
    """Return the states of ``parts`` where they lie in the shard, zeros elsewhere; (shard_numel,).

    It is in fp32 at least: states may be wider than the master, and a rank that has none cannot tell.
    """
    master = master_of(unit)
    flat = torch.zeros_like(master, dtype=torch.promote_types(master.dtype, torch.float32))
    for segment, value in parts:
        segment.within(flat).copy_(value)
    return flat


def no_state(key: str) -> StateError:
    """The error for a state that is not there."""
    return StateError(f"there is no optimizer state {key!r}; states exist after the first step")


def write_param(unit: Unit, index: int, flat: torch.Tensor, value: torch.Tensor) -> None:
    """Writes this rank's part of the whole ``value`` of parameter ``index`` into the sharded ``flat``, (shard_numel,).

    Raises:
        StateError: The parameter has another number of elements.
    """
    slot = unit.layout.slots[index]
    if value.numel() != slot.numel:
        raise StateError(f"parameter {slot.name} has shape {tuple(slot.shape)}, the value has {tuple(value.shape)}")
    part = slot.range.intersect(unit.owned)
    if part.numel:
        source = value.detach().reshape(-1)[part.start - slot.offset : part.stop - slot.offset]
        flat[part.start - unit.owned.start : part.stop - unit.owned.start].copy_(source)


def gather_param(unit: Unit, index: int, flat: torch.Tensor, what: str) -> torch.Tensor:
    """The full value of parameter ``index`` in a sharded (shard_numel,) tensor such as a moment; a new tensor. Collective.

    ``what`` names the tensor in the label of the collective.
    """
    return whole_from_owners(unit, index, flat, f"{unit.name}: {what}").view(unit.layout.slots[index].shape)
