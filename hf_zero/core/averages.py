"""Average an engine's weights, sharded over the ranks: update the averages, swap them with the weights, and swap them back.

Units have flat rows of averages, one for each shard; parameters that belong to no unit have complete tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_avg_fn, get_swa_multi_avg_fn

from hf_zero.comm.collectives import Collectives
from hf_zero.core.engine import Engine
from hf_zero.core.units.alone import whole_from_owners
from hf_zero.core.units.layout import UnitLayout
from hf_zero.core.units.names import follow_names, named_buffers, named_params
from hf_zero.core.units.parts import whole_of
from hf_zero.core.units.unit import Unit
from hf_zero.core.units.values import adopt_writes, all_gather_updated, publish
from hf_zero.errors import StateError
from hf_zero.memory import host_memory

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Pairs (average, value), each of the same shape."""
_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
Decay = float | Callable[[int], float] | None


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

    def rename(self, changed: Sequence[tuple[UnitLayout, Unit]]) -> None:
        """Update the rows of units after parameters were renamed, given each unit with its former layout; local."""
        for former, unit in changed:
            row = self._rows.pop(id(former), None)
            if row is not None:
                pairs = zip(former.slots, unit.layout.slots, strict=True)
                names = {slot.name for before, slot in pairs if before.name in row.names}
                self._rows[id(unit.layout)] = replace(row, layout=unit.layout, names=names)

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


class AveragedWeights:
    """Averages of the weights that an engine trains: exponential, or an equal mean.

    Each rank averages its own shards of the fp32 masters: nothing is gathered or sent, whatever the stage and wherever the masters are
    kept. An update gives the same bits as ``torch.optim.swa_utils.AveragedModel`` over fp32 weights: the first update copies the weights,
    later ones average. Checkpoints of the engine contain the averages, and any number of ranks and any stage can read them. Averages are
    stored by parameter name: a parameter that is trained later starts from its value at that time, and one that is frozen later keeps its
    average.

    Args:
        engine: The engine that ``initialize`` returned.
        decay: Factor of an exponential average: average = decay * average + (1 - decay) * weight. A number from 0 to 1; or a function that
            returns it for the number of updates so far; or None for the mean of the weights at all updates (SWA).
        warm_up: Use the smaller of ``decay`` and (1 + updates) / (10 + updates), so that the first weights soon lose their influence.
        update_every: Only every ``update_every``-th call of ``update`` changes the average.
        use_buffers: Average the buffers of the model too. If False, the average has the buffers of the last update.
        device: Device of the average; None is the device of the masters ("cpu" saves GPU memory). Averages of masters on NVMe are in host
            memory.
        name: Distinguishes several averages of one engine: letters, digits and underscores.

    Attributes:
        name: The argument ``name``.
        rows: The averages.
        updates: Number of updates that changed the average.
        calls: Number of calls of ``update`` at the end of an optimizer step.

    Raises:
        StateError: The engine trains nothing, or has an average of this name.
        ValueError: An argument has a value outside its range.
    """

    def __init__(
        self,
        engine: Any,
        decay: Decay = 0.999,
        *,
        warm_up: bool = False,
        update_every: int = 1,
        use_buffers: bool = False,
        device: torch.device | str | None = None,
        name: str = "average",
    ) -> None:
        if isinstance(decay, (int, float)) and not 0 <= decay <= 1:
            raise ValueError(
                f"decay is {decay}, allowed are numbers from 0 to 1, a function of the number of updates, and None (equal mean)"
            )
        if update_every < 1:
            raise ValueError(f"update_every is {update_every}, allowed are 1 and more")
        if not _NAME.fullmatch(name):
            raise ValueError(f"name is {name!r}, allowed are 1 to 64 letters, digits and underscores")
        if not isinstance(engine, Engine):
            raise StateError(f"AveragedWeights takes the engine that initialize() has returned, not {type(engine).__name__}")
        if engine.optimizer is None:
            raise StateError("AveragedWeights of an engine without optimizer: nothing is trained, so there is nothing to average")
        if name in engine.averages.kept:
            raise StateError(f"the engine has averages {name!r} already: give another name=")
        self.name = name
        self.updates = self.calls = 0
        self._engine = ref(engine)  # the engine holds its averages
        self._decay, self._warm_up, self._every, self._use_buffers = decay, warm_up, update_every, use_buffers
        self._device = None if device is None else torch.device(device)
        self._buffers: dict[str, torch.Tensor] = {}
        self._kept: Pairs = []  # (weight, copy of its values) where the average has another dtype, while averages are applied
        self.start_over()
        engine.averages.kept[name] = self
        if engine.averages.loaded_from and engine.averages.loaded_steps == engine.progress.global_steps:
            engine.checkpoints.load_averages(engine, engine.averages.loaded_from, self)

    @property
    def usable(self) -> bool:
        """Return whether the engine exists, is not destroyed, and has its own weights in place."""
        engine = self._engine()
        return engine is not None and not engine.destroyed and not engine.averages.applied

    def __repr__(self) -> str:
        kind = "equal mean" if self._decay is None else f"decay={self._decay}"
        return f"AveragedWeights({self.name!r}, {kind}, {self.updates} updates)"

    # -- updates ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self) -> bool:
        """Update the averages with the present weights; call it on all ranks after each ``engine.step()``. Local.

        In the middle of an accumulation, where ``step`` has changed nothing, it does nothing.

        Returns:
            Whether this call changed the averages.

        Raises:
            StateError: The engine no longer exists or is destroyed, or averages replace its weights.
        """
        engine = self._require("update()")
        engine.averages.require_weights("update()")
        if engine.accumulation.in_window:
            return False
        self.calls += 1
        if self.calls % self._every:
            return False
        for unit in engine.units:
            adopt_writes(unit, engine.runtime.idle)
        self.rows.lay_out(engine.units)
        self._average(self.rows.pairs(engine.units, _named(engine)))
        self._update_buffers(engine)
        self.updates += 1
        return True

    def _average(self, pairs: Pairs) -> None:
        """Average each pair's second tensor into its first; all pairs of one dtype and device take one call."""
        alike: dict[tuple[torch.device, torch.dtype], Pairs] = {}
        for average, value in pairs:
            if average.numel() and average.dtype == value.dtype and average.device == value.device:
                alike.setdefault((average.device, average.dtype), []).append((average, value))
            elif average.numel():  # one at a time, because each needs a temporary copy
                self._into([average], [value.to(average.device, average.dtype)])
        for group in alike.values():
            self._into([average for average, _ in group], [value for _, value in group])

    def _into(self, averages: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        number = self.updates
        if not number:
            torch._foreach_copy_(averages, values)
        elif self._decay is not None:
            get_ema_multi_avg_fn(self._decay_at(number))(averages, values, number)
        elif averages[0].device.type != "cpu":
            get_swa_multi_avg_fn()(averages, values, number)
        else:  # AveragedModel does the same where torch has no fused kernels
            for average, value in zip(averages, values, strict=True):
                average.copy_(get_swa_avg_fn()(average, value, number))

    def _decay_at(self, number: int) -> float:
        decay = self._decay(number) if callable(self._decay) else float(self._decay or 0)
        return min(decay, (1 + number) / (10 + number)) if self._warm_up else decay

    def _update_buffers(self, engine: Engine) -> None:
        # All buffers are averaged, as torch does: the kernels of batch norm change statistics without raising the tensor's version
        # counter.
        pairs = [(self.buffer(name, buffer), buffer.detach()) for name, buffer in named_buffers(engine.module)]
        if self._use_buffers:
            self._average(pairs)
        else:
            for average, buffer in pairs:
                average.copy_(buffer)

    # -- replacing the weights ----------------------------------------------------------------------------------------

    @contextmanager
    def applied(self) -> Iterator[AveragedWeights]:
        """Replace the engine's weights by the averages inside the ``with``, for evaluation and export; collective.

        An error inside leaves the averages in place, because other ranks may not have raised it: call ``restore`` on all ranks to continue
        training.
        """
        self.apply()
        yield self
        self.restore()

    @torch.no_grad()
    def apply(self) -> None:
        """Replace the weights by the averages until ``restore``; collective. The memory of the averages holds the weights meanwhile.

        Raises:
            StateError: A backward may still follow, averages already replace the weights, or the engine is destroyed.
        """
        engine = self._begin_exchange("apply()")
        self._kept = [(value, value.clone()) for average, value in self._pairs(engine) if average.dtype != value.dtype]
        for average, value in self._pairs(engine) if self._kept else ():
            if average.dtype != value.dtype:
                value.copy_(average)
        self._exchange(engine)
        engine.averages.applied = self.name

    @torch.no_grad()
    def restore(self) -> None:
        """Put the weights back, with the same bits as before ``apply``; collective.

        Raises:
            StateError: These averages do not replace the weights now.
        """
        engine = self._require("restore()")
        if engine.averages.applied != self.name:
            raise StateError(
                f"restore() of averages {self.name!r}, but apply() has not put them in place of the weights: call apply() first"
            )
        engine.runtime.reshard_for_update()
        for value, kept in self._kept:
            value.copy_(kept)
        self._kept = []
        self._exchange(engine)
        engine.averages.applied = ""

    @torch.no_grad()
    def copy_to_weights(self) -> None:
        """Overwrite the weights with the averages, for example at the end of a training; collective. The optimizer's state does not change.

        Raises:
            StateError: In the same cases as in ``apply``.
        """
        engine = self._begin_exchange("copy_to_weights()")
        for average, value in self._pairs(engine):
            value.copy_(average)
        _spread(engine)

    def _begin_exchange(self, what: str) -> Engine:
        """Prepare for replacing the weights, and return the engine: adopt writes, lay out the rows, and raise if a forward or backward
        still needs the present weights.
        """
        engine = self._require(what)
        engine.averages.require_weights(what)
        if not engine.runtime.idle:
            raise StateError(f"AveragedWeights.{what} between a forward and its backward, which needs the weights: call it after step()")
        engine.runtime.reshard_for_update()
        for unit in engine.units:
            adopt_writes(unit)
        self.rows.lay_out(engine.units)
        return engine

    def _exchange(self, engine: Engine) -> None:
        for average, value in self._pairs(engine):
            if average.dtype == value.dtype:
                before = value.clone()
                value.copy_(average)
                average.copy_(before)
        _spread(engine)

    def _pairs(self, engine: Engine) -> Pairs:
        """Return the (average, value) pairs of all averaged parameters and buffers."""
        buffers = dict(named_buffers(engine.module))
        found = [(average, buffers[name].detach()) for name, average in self._buffers.items() if name in buffers]
        return self.rows.pairs(engine.units, _named(engine)) + found

    # -- contents of the averages ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def start_over(self) -> None:
        """Start again from the present weights, with no update; local."""
        engine = self._require("start_over()")
        self.updates = self.calls = 0
        self.rows, self._buffers = AveragedRows(engine.units, self._device), {}
        for name, present in named_buffers(engine.module):
            self.buffer(name, present)

    def buffer(self, name: str, present: torch.Tensor) -> torch.Tensor:
        """Return the buffer ``name`` of the average; a new one starts from the model's ``present`` value. Local."""
        if name not in self._buffers:
            widens = self._use_buffers and present.is_floating_point()
            self._buffers[name] = present.detach().to(wide(present.dtype) if widens else present.dtype, copy=True)
        return self._buffers[name]

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors that this rank keeps for the averages; local."""
        return [*self.rows.tensors(), *self._buffers.values()]

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the buffers of the average by name."""
        return self._buffers

    @torch.no_grad()
    def whole(self, name: str) -> torch.Tensor:
        """Return the average of one parameter, in the parameter's full shape, on the engine's device; collective.

        Raises:
            StateError: No parameter of this name is averaged.
        """
        engine = self._require("whole()")
        follow_present_names(engine)
        self.rows.lay_out(engine.units)
        found = self.rows.whole(name, engine.units)
        if found is None:
            raise StateError(f"no parameter {name!r} is averaged: it is frozen, not trained yet, or not in the model")
        param = _named(engine).get(name)
        return found if param is None else whole_of(param, found)

    @torch.no_grad()
    def follow(self) -> None:
        """Rebuild the rows after parameters have moved to other units; collective. A newly trained parameter starts from its present
        value.

        Called where units are laid out anew, before an update; ``update`` and ``apply`` do it too.
        """
        self.rows.lay_out(self._require("follow()").units)

    def _require(self, what: str) -> Engine:
        engine = self._engine()
        if engine is None or engine.destroyed:
            raise StateError(f"AveragedWeights.{what}: the engine is {'gone' if engine is None else 'destroyed'}")
        engine.offloaded_states.require_none(f"AveragedWeights.{what}")
        return engine


def follow_present_names(engine: Engine) -> None:
    """Give the units of ``engine``, and the rows of its averages, the present names of the model's parameters; local."""
    renamed = follow_names(engine.module, engine.units)
    for kept in engine.averages.kept.values():
        if isinstance(kept, AveragedWeights):
            kept.rows.rename(renamed)


def _named(engine: Engine) -> dict[str, torch.Tensor]:
    return dict(named_params(engine.module))


def _spread(engine: Engine) -> None:
    """Publish masters that were written to the weights that forward uses: cast them into shards, and all-gather; collective."""
    for unit in engine.units:
        publish([unit])
        pending = all_gather_updated(unit)
        if pending is not None:
            pending.wait()
