"""What the inner optimizer updates in place of the model's parameters: parts of this rank's masters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.core.units.layout import Range
from hf_zero.core.units.unit import Unit
from hf_zero.errors import StateError


@dataclass(frozen=True)
class OwnedSegment:
    """One param group's part of one unit's shard: what the inner optimizer sees as a parameter.

    Attributes:
        unit: The unit.
        group: Index of the param group.
        range: Elements, counted from the start of this rank's shard.
        tensor: View of the master, (range.numel,).
        inner: The optimizer that updates it.
    """

    unit: Unit
    group: int
    range: Range
    tensor: torch.Tensor
    inner: torch.optim.Optimizer

    @property
    def state(self) -> Mapping[str, Any]:
        """What the inner optimizer keeps for it, live; empty before the first step. Waits for nothing."""
        state: Mapping[str, Any] = self.inner.state.get(self.tensor, {})
        return state

    def install(self, state: dict[str, Any]) -> None:
        """Replaces its state; an empty one removes it."""
        if state:
            self.inner.state[self.tensor] = state
        else:
            self.inner.state.pop(self.tensor, None)

    def elementwise(self) -> list[tuple[str, torch.Tensor]]:
        """The states that have one number per element, by name."""
        shape = self.tensor.shape
        return [
            (name, value) for name, value in self.state.items() if isinstance(value, torch.Tensor) and value.ndim and value.shape == shape
        ]

    def within(self, flat: torch.Tensor) -> torch.Tensor:
        """Its part of ``flat``, (shard_numel,); a view."""
        return flat[self.range.start : self.range.stop]

    def gradient(self, shard: torch.Tensor) -> torch.Tensor:
        """Its part of its unit's gradient, (shard_numel,), in its own type."""
        grad = self.within(shard)
        return grad if grad.dtype == self.tensor.dtype else grad.to(self.tensor.dtype)

    @property
    def low(self) -> torch.Tensor | None:
        """The part of the shard that its new value is cast to; None where the master is the shard."""
        return None if self.unit.master is self.unit.shard else self.within(self.unit.shard)


class Segments(list[OwnedSegment]):
    """All segments of an optimizer on this rank, in order."""

    def __init__(self, segments: Iterable[OwnedSegment] = ()) -> None:
        super().__init__(segments)
        self._of: dict[int, list[OwnedSegment]] = {}
        for segment in self:
            self._of.setdefault(id(segment.unit), []).append(segment)

    def of(self, unit: Unit) -> list[OwnedSegment]:
        """Those inside ``unit``."""
        return self._of.get(id(unit), [])


def lay_out(inner: torch.optim.Optimizer, units: Sequence[Unit], cuts: Callable[[Unit], Sequence[Range]]) -> Segments:
    """The segments of this rank's shards.

    Args:
        inner: Updates them.
        units: Trained units.
        cuts: The ranges of a unit's shard that are updated at a time; no segment reaches across their bounds.

    Raises:
        StateError: A unit has no master.
    """
    return Segments(
        # A Parameter without requires_grad: some optimizers look at the type; the view shares the master's memory.
        OwnedSegment(unit, segment.group, part, nn.Parameter(master_of(unit)[part.start : part.stop], requires_grad=False), inner)
        for unit in units
        for segment in unit.layout.segments(unit.rank)
        for cut in cuts(unit)
        if (part := segment.range.shift(-unit.owned.start).intersect(cut)).numel
    )


def master_of(unit: Unit) -> torch.Tensor:
    """The unit's master, (shard_numel,).

    Raises:
        StateError: It has none: nothing of it is trained.
    """
    if unit.master is None:
        raise StateError(f"unit {unit.name} is not trained: it has no master")
    return unit.master
