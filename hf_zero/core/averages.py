"""Averages of an engine's weights, kept as each rank's shards: updated, put in the place of the weights, and put back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_avg_fn, get_swa_multi_avg_fn

from hf_zero.comm.collectives import Collectives
from hf_zero.core.engine import Engine
from hf_zero.core.units.alone import whole_from_owners
from hf_zero.core.units.layout import UnitLayout
from hf_zero.core.units.unit import Unit
from hf_zero.core.units.values import all_gather_updated, publish, write_back_assigned
from hf_zero.errors import StateError
from hf_zero.memory import host_memory

_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
Decay = float | Callable[[int], float] | None


@dataclass(eq=False)
class Row:
    """The average of one unit's shard.

    Attributes:
        layout: Of the unit, which may have gone.
        collectives: Network of the ranks that share the unit.
        rank: This rank's place among the owners.
        flat: (shard_numel,), fp32 or wider; gaps hold zeros.
        names: Parameters that are averaged; of all others ``flat`` means nothing.
    """

    layout: UnitLayout
    collectives: Collectives
    rank: int
    flat: torch.Tensor
    names: set[str] = field(default_factory=set)

    def shard_part(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """As ``Unit.shard_part``."""
        own = self.layout.shard_range(self.rank)
        part = self.layout.slots[index].range.intersect(own).shift(-own.start)
        return flat[part.start : part.stop] if part.numel else flat[:0]

    def pairs(self, values: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(average, value) of what is averaged; ``values`` is (shard_numel,)."""
        if len(self.names) == len(self.layout.slots):
            return [(self.flat, values)]
        found = [index for index, slot in enumerate(self.layout.slots) if slot.name in self.names]
        return [(self.shard_part(index, self.flat), self.shard_part(index, values)) for index in found]


class AveragedWeights:
    """An average of the weights that an engine trains: exponential, or of equal parts.

    Each rank averages its own shards of the fp32 masters: nothing is gathered or sent, whatever the stage and wherever the masters rest.
    An update gives the bits of ``torch.optim.swa_utils.AveragedModel`` over fp32 weights: the first copies the weights, later ones
    average. Checkpoints of the engine hold the average, and any number of ranks and any stage can read it. It follows parameters by their
    names: one that is trained later starts from the value that it has then, one that is frozen later stays in the average.

    Args:
        engine: What ``initialize`` returned.
        decay: Of an exponential average: average = decay * average + (1 - decay) * weight. A number from 0 to 1; or a function that gives
            it for the number of updates so far; or None for the mean of the weights at all updates (SWA).
        warm_up: Use the least of ``decay`` and (1 + updates) / (10 + updates), so that the average leaves the first weights early.
        update_every: Of so many calls of ``update`` one counts, the last.
        use_buffers: Average the buffers of the model too. Without, the average has the buffers of the last update.
        device: Where the average is kept; None is beside the masters ("cpu" spares the memory of a GPU). Masters on NVMe have theirs in
            host memory.
        name: Tells several averages of one engine apart: letters, digits and underscores.

    Attributes:
        name: As above.
        updates: Updates that counted.
        calls: All calls of ``update`` at the end of an optimizer step.

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
        self._rows: dict[int, Row] = {}  # by id of the layout
        self._loose: dict[str, torch.Tensor] = {}  # of parameters that no unit holds any more
        self._buffers: dict[str, torch.Tensor] = {}
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # weights that an average of another type stands for now
        self.start_over()
        engine.averages.kept[name] = self
        if engine.averages.loaded_from and engine.averages.loaded_steps == engine.progress.global_steps:
            engine.checkpoints.load_averages(engine, engine.averages.loaded_from, self)

    @property
    def usable(self) -> bool:
        """Whether the engine is there, and has its weights in their place."""
        engine = self._engine()
        return engine is not None and not engine.destroyed and not engine.averages.applied

    def __repr__(self) -> str:
        kind = "equal mean" if self._decay is None else f"decay={self._decay}"
        return f"AveragedWeights({self.name!r}, {kind}, {self.updates} updates)"

    # -- updates ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self) -> bool:
        """Takes the present weights into the average; call it on all ranks after each ``engine.step()``. Local.

        In the middle of an accumulation, where ``step`` has changed nothing, it does nothing.

        Returns:
            Whether the call counted.

        Raises:
            StateError: The engine is gone, destroyed, or has averages in the place of its weights.
        """
        engine = self._require("update()")
        engine.averages.require_weights("update()")
        if engine.accumulation.in_window:
            return False
        self.calls += 1
        if self.calls % self._every:
            return False
        for unit in engine.units:
            write_back_assigned(unit)
        self._lay_out(engine)
        self._average(self._param_pairs(engine))
        self._update_buffers(engine)
        self.updates += 1
        return True

    def _average(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Averages each second tensor into the first, all of one type and device in one call."""
        alike: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for average, value in pairs:
            if average.numel() and average.dtype == value.dtype and average.device == value.device:
                alike.setdefault((average.device, average.dtype), []).append((average, value))
            elif average.numel():  # one at a time: each needs a copy of its own
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
        else:  # what AveragedModel does where torch has no fused kernels
            for average, value in zip(averages, values, strict=True):
                average.copy_(get_swa_avg_fn()(average, value, number))

    def _decay_at(self, number: int) -> float:
        decay = self._decay(number) if callable(self._decay) else float(self._decay or 0)
        return min(decay, (1 + number) / (10 + number)) if self._warm_up else decay

    def _update_buffers(self, engine: Engine) -> None:
        # All of them, as torch does: batch norm's kernels change statistics without a new version of the tensor.
        buffers = {name: buffer.detach() for name, buffer in engine.module.named_buffers()}
        pairs = [(self._room_of_buffer(name, buffer), buffer) for name, buffer in buffers.items()]
        if self._use_buffers:
            self._average(pairs)
        else:
            for average, buffer in pairs:
                average.copy_(buffer)

    # -- in the place of the weights ----------------------------------------------------------------------------------

    @contextmanager
    def applied(self) -> Iterator[AveragedWeights]:
        """The engine has the averages in the place of its weights inside the ``with``, for evaluation and export; collective.

        An error inside leaves them there, because other ranks may not have it: call ``restore`` on all ranks to go on training.
        """
        self.apply()
        yield self
        self.restore()

    @torch.no_grad()
    def apply(self) -> None:
        """Puts the averages in the place of the weights until ``restore``; collective. The weights take their memory meanwhile.

        Raises:
            StateError: A backward is still to come, averages are in the place of the weights already, or the engine is destroyed.
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
        """Puts the weights back, bit for bit; collective.

        Raises:
            StateError: These averages are not in their place.
        """
        engine = self._require("restore()")
        if engine.averages.applied != self.name:
            raise StateError(f"restore() of averages {self.name!r}, which are not in the place of the weights: call apply() first")
        engine.runtime.reshard_for_update()
        for value, kept in self._kept:
            value.copy_(kept)
        self._kept = []
        self._exchange(engine)
        engine.averages.applied = ""

    @torch.no_grad()
    def copy_to_weights(self) -> None:
        """Makes the averages the weights for good, as at the end of a training; collective. The optimizer's state stays as it is.

        Raises:
            StateError: As of ``apply``.
        """
        engine = self._begin_exchange("copy_to_weights()")
        for average, value in self._pairs(engine):
            value.copy_(average)
        _spread(engine)

    def _begin_exchange(self, what: str) -> Engine:
        """Checks that no forward or backward needs the weights as they are, and brings them up to date."""
        engine = self._require(what)
        engine.averages.require_weights(what)
        if not engine.runtime.idle:
            raise StateError(f"AveragedWeights.{what} between a forward and its backward, which needs the weights: call it after step()")
        engine.runtime.reshard_for_update()
        for unit in engine.units:
            write_back_assigned(unit)
        self._lay_out(engine)
        return engine

    def _exchange(self, engine: Engine) -> None:
        for average, value in self._pairs(engine):
            if average.dtype == value.dtype:
                before = value.clone()
                value.copy_(average)
                average.copy_(before)
        _spread(engine)

    def _pairs(self, engine: Engine) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(average, value) of all that is averaged."""
        buffers = dict(engine.module.named_buffers())
        found = [(average, buffers[name].detach()) for name, average in self._buffers.items() if name in buffers]
        return self._param_pairs(engine) + found

    def _param_pairs(self, engine: Engine) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = [pair for unit, row in self.rows() for pair in row.pairs(values_of(unit))]
        params = dict(engine.module.named_parameters()) if self._loose else {}
        return pairs + [(average, params[name].detach()) for name, average in self._loose.items() if name in params]

    # -- what is averaged ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start_over(self) -> None:
        """Begins anew from the present weights, with no update; local."""
        engine = self._require("start_over()")
        self.updates = self.calls = 0
        self._rows, self._loose = {}, {}
        for unit in engine.units:
            if unit.master is not None:
                self._rows[id(unit.layout)] = self._new_row(unit)
        self._buffers = {}
        for name, buffer in engine.module.named_buffers():
            self._room_of_buffer(name, buffer)

    def rows(self) -> Iterator[tuple[Unit, Row]]:
        """The units of which parameters are averaged, in order; local."""
        for unit in self._require("rows()").units:
            if id(unit.layout) in self._rows:
                yield unit, self._rows[id(unit.layout)]

    @property
    def loose(self) -> Mapping[str, torch.Tensor]:
        """Averages of whole parameters that belong to no unit: they were frozen after they had been trained."""
        return self._loose

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Buffers of the average, by name."""
        return self._buffers

    def room(self, name: str) -> torch.Tensor:
        """Where the average of a frozen parameter without unit, or of a buffer, is read to; it has the present value. Local."""
        engine = self._require("room()")
        params, buffers = dict(engine.module.named_parameters()), dict(engine.module.named_buffers())
        if name in buffers:
            return self._room_of_buffer(name, buffers[name])
        param = params[name].detach()
        return self._loose.setdefault(name, param.to(self._place(param), _wide(param.dtype), copy=True))

    def _room_of_buffer(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        if name not in self._buffers:
            wide = self._use_buffers and buffer.is_floating_point()
            self._buffers[name] = buffer.detach().to(_wide(buffer.dtype) if wide else buffer.dtype, copy=True)
        return self._buffers[name]

    def row_of(self, unit: Unit) -> Row:
        """The row of a unit; one of a frozen unit averages nothing yet."""
        return self._rows.setdefault(id(unit.layout), self._new_row(unit, averages=False))

    @torch.no_grad()
    def whole(self, name: str) -> torch.Tensor:
        """The average of one parameter, whole, (shape), on the engine's device; collective.

        Raises:
            StateError: No parameter of this name is averaged.
        """
        engine = self._require("whole()")
        self._lay_out(engine)
        for _, row in self.rows():
            for index, slot in enumerate(row.layout.slots):
                if slot.name == name and name in row.names:
                    return self._gathered(row, index)
        if name in self._loose:
            return self._loose[name].clone()
        raise StateError(f"no parameter {name!r} is averaged: it is frozen, or the model has none of this name")

    def _gathered(self, row: Row, index: int) -> torch.Tensor:
        divided: Any = row  # as much of a unit as is asked
        slot = row.layout.slots[index]
        return whole_from_owners(divided, index, row.flat, f"{row.layout.name}: average").view(slot.shape)

    def _new_row(self, unit: Unit, averages: bool = True) -> Row:
        values = values_of(unit)
        flat = host_memory.empty(values.numel(), _wide(values.dtype), self._place(values)).copy_(values)
        names = {slot.name for slot in unit.layout.slots} if averages else set()
        return Row(unit.layout, unit.collectives, unit.rank, flat, names)

    def _place(self, values: torch.Tensor) -> torch.device:
        return values.device if self._device is None else self._device

    @torch.no_grad()
    def follow(self) -> None:
        """Goes with parameters that have come to other units; collective. A parameter that is trained now starts from its present value.

        Called where units are laid out anew, before an update; ``update`` and ``apply`` do it too.
        """
        self._lay_out(self._require("follow()"))

    def _lay_out(self, engine: Engine) -> None:
        """Lays the rows out as the units are now; collective where parameters have come to other units, else it looks at each unit once."""
        present = {id(unit.layout) for unit in engine.units if unit.master is not None}
        old = [row for key, row in self._rows.items() if key not in {id(unit.layout) for unit in engine.units}]
        if not old and present <= self._rows.keys():
            return
        self._rows = {key: row for key, row in self._rows.items() if row not in old}
        for unit in engine.units:
            if unit.master is not None and id(unit.layout) not in self._rows:
                self._rows[id(unit.layout)] = self._new_row(unit)
        places = {slot.name: (unit, index) for unit in engine.units for index, slot in enumerate(unit.layout.slots)}
        for row in old:
            for index, slot in enumerate(row.layout.slots):
                if slot.name in row.names:
                    self._move(slot.name, self._gathered(row, index), places.get(slot.name))
        for name in [name for name in self._loose if name in places]:
            self._move(name, self._loose.pop(name), places[name])

    def _move(self, name: str, whole: torch.Tensor, place: tuple[Unit, int] | None) -> None:
        """Puts the average of a parameter where the parameter is now; local."""
        if place is None:
            self._loose[name] = whole.to(self._place(whole))
            return
        unit, index = place
        row, slot = self.row_of(unit), unit.layout.slots[index]
        row.names.add(name)
        own = slot.range.intersect(unit.owned).shift(-slot.offset)
        if own.numel:
            row.shard_part(index, row.flat).copy_(whole.reshape(-1)[own.start : own.stop])

    def _require(self, what: str) -> Engine:
        engine = self._engine()
        if engine is None or engine.destroyed:
            raise StateError(f"AveragedWeights.{what}: the engine is {'gone' if engine is None else 'destroyed'}")
        engine.offloaded_states.require_none(f"AveragedWeights.{what}")
        return engine


def values_of(unit: Unit) -> torch.Tensor:
    """What is averaged of a unit, (shard_numel,): the master, or the shard of a frozen one; waits for an update that is under way."""
    return unit.master if unit.master is not None else unit.shard


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _spread(engine: Engine) -> None:
    """Brings masters that were written to into the weights of forward; collective."""
    for unit in engine.units:
        publish([unit])
        pending = all_gather_updated(unit)
        if pending is not None:
            pending.wait()
