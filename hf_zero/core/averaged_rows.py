"""Store averages of parameters: flat rows for the shards of units, and complete tensors for parameters that belong to no unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_zero.comm.collectives import Collectives
from hf_zero.core.units.alone import whole_from_owners
from hf_zero.core.units.layout import UnitLayout
from hf_zero.core.units.unit import Unit
from hf_zero.memory import host_memory

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Pairs (average, value), each of the same shape."""


@dataclass(eq=False)
class Row:
    """The average of one unit's shard.

    Attributes:
        layout: Layout of the unit; the unit itself may no longer exist.
        collectives: Network of the ranks that share the unit.
        rank: This rank's position among the owners.
        flat: (shard_numel,), fp32 or wider; gaps hold zeros.
        names: Names of the parameters that are averaged; elements of ``flat`` that belong to other parameters are meaningless.
    """

    layout: UnitLayout
    collectives: Collectives
    rank: int
    flat: torch.Tensor
    names: set[str] = field(default_factory=set)

    def shard_part(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """Return the part of ``flat`` that belongs to parameter ``index``, like ``Unit.shard_part``."""
        own = self.layout.shard_range(self.rank)
        part = self.layout.slots[index].range.intersect(own).shift(-own.start)
        return flat[part.start : part.stop] if part.numel else flat[:0]

    def pairs(self, values: torch.Tensor) -> Pairs:
        """Return the (average, value) pairs of the parameters that are averaged; ``values`` is (shard_numel,)."""
        if len(self.names) == len(self.layout.slots):
            return [(self.flat, values)]
        found = [index for index, slot in enumerate(self.layout.slots) if slot.name in self.names]
        return [(self.shard_part(index, self.flat), self.shard_part(index, values)) for index in found]


class AveragedRows:
    """The averages of one model on this rank, by parameter.

    Attributes:
        loose: Averages, of the full shape, of parameters that belong to no unit because they were frozen after they had been trained.

    Args:
        units: Units of the engine; the averages of trained units start from the parameters' present values.
        device: Device of the averages; None keeps each average on the device of its values.
    """

    def __init__(self, units: Sequence[Unit], device: torch.device | None) -> None:
        self.loose: dict[str, torch.Tensor] = {}
        self._device = device
        self._rows = {id(unit.layout): self._new(unit) for unit in units if unit.master is not None}

    def of(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, Row]]:
        """Yield each unit of ``units`` that has averaged parameters, in order, with its row."""
        return ((unit, self._rows[id(unit.layout)]) for unit in units if id(unit.layout) in self._rows)

    def of_unit(self, unit: Unit) -> Row:
        """Return the row of a unit. A new row of a unit that is not trained averages no parameter yet."""
        key = id(unit.layout)
        if key not in self._rows:
            self._rows[key] = self._new(unit, averages=False)
        return self._rows[key]

    def of_param(self, name: str, param: torch.Tensor) -> torch.Tensor:
        """Return the average of a parameter that belongs to no unit, in its full shape; a new average starts from the present value."""
        if name not in self.loose:
            self.loose[name] = param.detach().to(self._place(param), wide(param.dtype), copy=True)
        return self.loose[name]

    def tensors(self) -> list[torch.Tensor]:
        """Return all rows, and the averages of parameters that belong to no unit."""
        return [*(row.flat for row in self._rows.values()), *self.loose.values()]

    def pairs(self, units: Sequence[Unit], params: Mapping[str, torch.Tensor]) -> Pairs:
        """Return the (average, value) pairs of all averaged parameters; ``params`` contains the model's parameters by name."""
        found = [pair for unit, row in self.of(units) for pair in row.pairs(values_of(unit))]
        return found + [(average, params[name].detach()) for name, average in self.loose.items() if name in params]

    def whole(self, name: str, units: Sequence[Unit]) -> torch.Tensor | None:
        """Return the average of one parameter, in the parameter's full shape; None if the parameter is not averaged. Collective."""
        for _, row in self.of(units):
            for index, slot in enumerate(row.layout.slots):
                if slot.name == name and name in row.names:
                    return _gathered(row, index)
        return self.loose[name].clone() if name in self.loose else None

    def lay_out(self, units: Sequence[Unit]) -> None:
        """Rebuild the rows for the present units. Collective if parameters have moved to other units; otherwise it only checks each
        unit.
        """
        present = {id(unit.layout) for unit in units}
        gone = [row for key, row in self._rows.items() if key not in present]
        trained = [unit for unit in units if unit.master is not None]
        if not gone and all(id(unit.layout) in self._rows for unit in trained):
            return
        self._rows = {key: row for key, row in self._rows.items() if key in present}
        for unit in trained:
            if id(unit.layout) not in self._rows:
                self._rows[id(unit.layout)] = self._new(unit)
        places = {slot.name: (unit, index) for unit in units for index, slot in enumerate(unit.layout.slots)}
        for row in gone:
            for index, slot in enumerate(row.layout.slots):
                if slot.name in row.names:
                    self._move(slot.name, _gathered(row, index), places.get(slot.name))
        for name in [name for name in self.loose if name in places]:
            self._move(name, self.loose.pop(name), places[name])

    def _move(self, name: str, whole: torch.Tensor, place: tuple[Unit, int] | None) -> None:
        """Store the average of a parameter in the row of the unit that has the parameter now; local."""
        if place is None:
            self.loose[name] = whole.to(self._place(whole))
        else:
            self.put(*place, whole)

    def put(self, unit: Unit, index: int, whole: torch.Tensor) -> None:
        """Set the average of parameter ``index`` of ``unit`` from ``whole``, a tensor of all its elements; local."""
        row, slot = self.of_unit(unit), unit.layout.slots[index]
        row.names.add(slot.name)
        own = slot.range.intersect(unit.owned).shift(-slot.offset)
        if own.numel:
            row.shard_part(index, row.flat).copy_(whole.reshape(-1)[own.start : own.stop])

    def _new(self, unit: Unit, averages: bool = True) -> Row:
        values = values_of(unit)
        flat = host_memory.empty(values.numel(), wide(values.dtype), self._place(values)).copy_(values)
        names = {slot.name for slot in unit.layout.slots} if averages else set[str]()
        return Row(unit.layout, unit.collectives, unit.rank, flat, names)

    def _place(self, values: torch.Tensor) -> torch.device:
        return values.device if self._device is None else self._device


def values_of(unit: Unit) -> torch.Tensor:
    """Return the values of a unit that are averaged, (shard_numel,): the master, or the shard of a frozen unit. Waits for a running
    update.
    """
    return unit.master if unit.master is not None else unit.shard


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an average of values of ``dtype``: fp32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def _gathered(row: Row, index: int) -> torch.Tensor:
    divided: Any = row  # has the attributes of a unit that this function uses
    return whole_from_owners(divided, index, row.flat, f"{row.layout.name}: average").view(row.layout.slots[index].shape)
