"""Make units for parameters that are trained for the first time after ``initialize``: unfrozen ones, and those of modules added later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import ref

from hf_zero.assembly.units import UnitBuilder, persist_and_reshard
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.schedule.block import Block
from hf_zero.core.schedule.gradients import UnitGradients
from hf_zero.core.schedule.reducer import Reducer
from hf_zero.core.schedule.runtime import Runtime
from hf_zero.core.step.trained_set import Joining
from hf_zero.core.units.grouping import BlockSpec, NamedParam, enclosing, lowest_modules
from hf_zero.core.units.unit import Unit, find_unit
from hf_zero.errors import UnsupportedError


@dataclass
class Joiner:
    """Builder of units for parameters that join later: each gets a new unit in its block. See [Note: what is trained].

    Attributes:
        builder: Builder of units.
        runtime: Runtime with the hooks on the module.
        reducer: Reducer of gradients.
        optimizer: The engine's optimizer.
        units: All units of the engine; the engine holds the same list object.
        gradients_of: Function that makes the gradients of a unit.
        largest: Largest number of elements of a unit that stays unsharded at stage 3.
        undivided: Ids of the parameters that existed when several ranks divided the model among them; None if each rank has all of it.
    """

    builder: UnitBuilder
    runtime: Runtime
    reducer: Reducer
    optimizer: ShardedOptimizer
    units: list[Unit]
    gradients_of: Callable[[Unit], UnitGradients]
    largest: int
    undivided: frozenset[int] | None
    _joins: int = 0  # number of calls of join; makes names of units unique

    def join(self, joining: Sequence[Joining]) -> list[UnitGradients]:
        """Make units of ``joining``, in the model's order, and train them; collective.

        Returns:
            The gradients of the new units.

        Raises:
            UnsupportedError: Several ranks hold the model together, and a parameter did not exist when it was divided.
        """
        self._require_known(joining)
        self._joins += 1
        former = {id(owner[0]): owner[0] for entry in joining if (owner := find_unit(entry.param)) is not None}
        added: list[Unit] = []
        for block, members in self._by_block(joining):
            spec = BlockSpec(f"{block.name} (added {self._joins})", block.module, members)
            added += self._extend(block, self.builder.block(spec, self.builder.kept()).units)
        self._drop_empty(former.values())
        self.units += added
        persist_and_reshard(added, set(), self.largest, sum(unit.layout.numel for unit in added))
        self.optimizer.extend(added)
        entries = self._train(added)
        for entry in entries:
            self.runtime.backward.attach_to(entry)
        return entries

    def _require_known(self, joining: Sequence[Joining]) -> None:
        unknown = [entry.name for entry in joining if self.undivided is not None and id(entry.param) not in self.undivided]
        if unknown:
            raise UnsupportedError(
                f"{', '.join(unknown[:5])}: trained for the first time after initialize(), in a model that several ranks "
                "hold together (tensor parallelism, pipelines), which is not supported. Add and unfreeze parameters before initialize()"
            )

    def _by_block(self, joining: Sequence[Joining]) -> list[tuple[Block, list[NamedParam]]]:
        """Return the blocks that the parameters of ``joining`` belong to, in the model's order, each with these parameters."""
        blocks = {block.name: block for block in self.runtime.blocks}
        holders = lowest_modules(self.runtime.module)
        found: dict[int, tuple[Block, list[NamedParam]]] = {}
        for entry in joining:
            name = enclosing(holders[id(entry.param)], blocks)
            block = blocks[name] if name is not None else self.runtime.root
            found.setdefault(id(block), (block, []))[1].append(NamedParam(entry.name, entry.param, entry.group))
        order = [self.runtime.root, *self.runtime.blocks]
        return [found[id(block)] for block in order if id(block) in found]

    def _extend(self, block: Block, units: Sequence[Unit]) -> Sequence[Unit]:
        block.units += units
        block.forget_size()
        return units

    def _drop_empty(self, former: Iterable[Unit]) -> None:
        """Remove frozen units without parameters from their blocks."""
        empty = {id(unit) for unit in former if all(param is None for param in unit.params)}
        self.units[:] = [unit for unit in self.units if id(unit) not in empty]
        for block in (self.runtime.root, *self.runtime.blocks):
            if any(id(unit) in empty for unit in block.units):
                block.units[:] = [unit for unit in block.units if id(unit) not in empty]
                block.forget_size()

    def _train(self, units: Sequence[Unit]) -> list[UnitGradients]:
        """Make the gradients of ``units``, and sort the gradients of all units in the model's order."""
        entries = {id(unit): self.gradients_of(unit) for unit in units}
        for unit in units:
            unit.belongs_to = ref(self.runtime)
        known = {id(entry.unit): entry for entry in self.reducer.gradients} | entries
        ordered: list[UnitGradients] = []
        for block in (self.runtime.root, *self.runtime.blocks):
            block.gradients = [known[id(unit)] for unit in block.units if id(unit) in known]
            ordered += block.gradients
        self.reducer.train(ordered)
        return list(entries.values())
