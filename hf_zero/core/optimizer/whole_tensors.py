"""Define the optimizer that users hold when the inner one needs complete tensors: one rank updates each parameter, in its full shape."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.core.optimizer.clones import is_mark, plain_attributes, state_at_start
from hf_zero.core.optimizer.common_states import common_states, set_common_states, states_by_param
from hf_zero.core.optimizer.held_params import replace_parameters
from hf_zero.core.optimizer.master_parts import memory_of, set_memory
from hf_zero.core.optimizer.nested import set_state
from hf_zero.core.optimizer.owners import Spread, TensorMoves, assign_owners, spread_of, spread_of_experts
from hf_zero.core.optimizer.param_states import OwnerStates, WholeParam
from hf_zero.core.optimizer.segments import OwnedSegment, master_of, part_states
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.optimizer.state_store import StateStore, scale_
from hf_zero.core.units.layout import ParamSlot
from hf_zero.core.units.marks import TpShard, tp_shard_of
from hf_zero.core.units.unit import Unit
from hf_zero.core.units.values import publish
from hf_zero.observe import span

_IN_FLIGHT = 3  # number of exchanges in flight; limits the memory of messages


class WholeTensorOptimizer(ShardedOptimizer):
    """``ShardedOptimizer`` for an optimizer whose updates depend on complete tensors (their norm, rows, shape).

    [Note: whole tensors] Masters stay sharded as always, so all code that reads or writes them is the same. Every trained parameter has one
    owner (``owners.py``), which keeps its optimizer state. In a step, master and reduced gradient of each parameter are sent from the
    shards to the owner, the inner optimizer makes one step over the parameters that this rank owns, and the new values are sent back. So a
    rank keeps about 1/N of the state; during the step it also holds master and gradient of the parameters that it owns and that are not
    completely in its own shards.

    Attributes:
        whole: The parameters that this rank updates, by unit and offset.

    Args:
        inner: Any torch optimizer whose update of a parameter depends on that parameter alone.
        units: Trainable units.
        collectives: Network of the ranks that share the units.
        state_store: Store of the masters.
        experts: Network of the ranks that together hold all experts; None if each rank has all experts.
        replaced: Called with the tensors that this rank updates in the place of parameters, by id of the parameter, when they are made.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        units: Sequence[Unit],
        collectives: Collectives,
        state_store: StateStore | None = None,
        experts: Collectives | None = None,
        replaced: Callable[[Mapping[int, Sequence[torch.Tensor]]], object] | None = None,
    ) -> None:
        self._collectives, self._experts, self._replaced = collectives, experts, replaced
        self._owners: dict[str, int] = {}
        # Positions in the user's groups, by id of the model's parameter and by its name: a step may depend on them.
        self._order = {id(param): index for group in inner.param_groups for index, param in enumerate(group["params"])}
        self._positions: dict[str, int] = {}
        self._exchanges: list[TensorMoves] = []
        self.whole: list[WholeParam] = []
        self._by_name: dict[str, WholeParam] = {}
        self._given: dict[str, torch.Tensor] = {}  # values of parameters when a step begins
        self._resting: set[str] = set()  # names of parameters that are frozen at present
        self._take_over(inner, units)
        marks = states_by_param(inner)
        if marks and all(map(is_mark, marks.values())):
            common = common_states(inner)
            set_state(inner, _marks(marks, self.whole))
            set_common_states(inner, common)
        super().__init__(inner, units, state_store)
        self._replace_attributes(units)
        self.own.fetch, self.own.send = self._fetch, self._scatter

    def _take_over(self, inner: torch.optim.Optimizer, units: Sequence[Unit]) -> list[WholeParam]:
        """Assign owners to the parameters of ``units``; return the parameters that this rank updates. Collective if experts are divided
        over ranks.
        """
        net = self._collectives
        owned = assign_owners(_spread(units, net, self._experts), net.world)
        self._owners |= {entry.slot.name: entry.rank for entry in owned}
        named = [(slot.name, id(param)) for unit in units for slot, param in zip(unit.layout.slots, unit.params, strict=True)]
        self._positions |= {name: self._order.get(own, len(self._order)) for name, own in named}
        moves = [TensorMoves(unit, [entry for entry in owned if entry.unit == index], net) for index, unit in enumerate(units)]
        added = [
            WholeParam(move.unit, entry.slot, _whole_param(move.unit, entry.slot), entry.rank == net.rank, inner)
            for move in moves
            for entry in move.own
        ]
        self._exchanges += moves
        self.whole += added
        self._by_name |= {entry.slot.name: entry for entry in added}
        return added

    def _lay_out(self) -> list[list[torch.Tensor]]:
        ordered = sorted(self.whole, key=lambda entry: self._positions[entry.slot.name])
        return [[entry.param for entry in ordered if entry.slot.group == index] for index in range(len(self.inner.param_groups))]

    def _replace_attributes(self, units: Sequence[Unit]) -> None:
        """Replace parameters that the inner optimizer keeps outside of its groups, see [Note: parameters in attributes], and let none of
        them be read between updates.
        """
        self.own.parts.rest(entry.param for entry in self.whole)
        named = [(slot.name, param) for unit in units for slot, param in zip(unit.layout.slots, unit.params, strict=True)]
        own = {name: [self._by_name[name].param] if name in self._by_name else [] for name, _ in named}
        others = {id(param): own[name] for name, param in named if param is not None}
        replace_parameters(self.inner, others)
        if self._replaced is not None:
            self._replaced(others)

    def group_of_tensors(self) -> dict[int, int]:
        """Return the param group of each parameter that this rank updates, by id."""
        return {id(entry.param): entry.slot.group for entry in self.whole}

    def can_rest(self, unit: Unit) -> bool:
        """Return True, because each parameter is updated by itself."""
        return True

    def rest(self, resting: Mapping[int, Collection[int]], unreduced: Collection[int]) -> None:
        """Exclude parameters from updates; see ``ShardedOptimizer.rest``."""
        super().rest(resting, unreduced)
        self._resting = {unit.layout.slots[index].name for unit in self.units for index in resting.get(id(unit), ())}

    def cut(self, starts: Mapping[int, Iterable[int]]) -> None:
        """Do nothing, because each parameter counts its own steps."""

    def extend(self, units: Sequence[Unit]) -> None:
        """Train further units; see ``ShardedOptimizer.extend``."""
        self.state_store.settle()
        self.units += units
        has_state = bool(self.inner.state)
        added = self._take_over(self.inner, units)
        self._replace(())
        self._replace_attributes(units)
        for entry in added if has_state else ():
            entry.install(state_at_start(self.inner, entry.slot.group, entry.param))

    def _replace(self, segments: Iterable[OwnedSegment]) -> None:
        for group, params in zip(self.inner.param_groups, self._lay_out(), strict=True):
            group["params"] = params
        self.state_store.bind(self.inner, self.units, self.segments)

    def update(self, shards: Sequence[torch.Tensor], factor: torch.Tensor, updated: Callable[[Unit], None]) -> None:
        """Update masters and shards once; collective at stages 1 to 3.

        Args:
            shards: This rank's reduced gradients, (shard_numel,) per unit that is trained now; overwritten.
            factor: 0-dim factor by which the gradients are multiplied first.
            updated: Called with each unit, in order, when its shard has its new value.
        """
        if any(shard.device != factor.device for shard in shards):  # gradients that offload keeps on the host
            factor = factor.cpu()
        with torch.no_grad():
            scale_(shards, factor)
            self._collect(shards)
        before_step = self.own.before_step(whole=True)
        with span("whole tensors"), self.own.updating():
            if before_step is not None:
                before_step()
            self.inner.step()
        with torch.no_grad():
            self._scatter(updated)
        self._opt_called = True

    def _fetch(self) -> None:
        """Give the parameters that this rank owns their values; collective."""
        self._collect([torch.zeros_like(master_of(move.unit)) for move in self._moves()])

    def _moves(self) -> list[TensorMoves]:
        return [move for move in self._exchanges if not move.unit.rests]

    def _collect(self, grads: Sequence[torch.Tensor]) -> None:
        """Fill the parameters that this rank owns with their values and gradients."""
        under_way: deque[Pending] = deque()
        arriving: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
        for move, grad in zip(self._moves(), grads, strict=True):
            masters, first = move.collect(master_of(move.unit), "masters to owners")
            gradients, second = move.collect(grad, "gradients to owners")
            arriving.append((masters, gradients))
            under_way.extend((first, second))
            while len(under_way) > _IN_FLIGHT:
                under_way.popleft().wait()
        while under_way:
            under_way.popleft().wait()
        for masters, gradients in arriving:
            for name in masters:
                param = self._by_name[name].param
                set_memory(param, masters[name])
                self._given[name] = masters[name]
                param.grad = gradients[name].to(masters[name].device, masters[name].dtype) if name not in self._resting else None

    def _scatter(self, updated: Callable[[Unit], None]) -> None:
        """Send the new values back to the shards and call ``updated``."""
        under_way: deque[tuple[Unit, Pending]] = deque()

        def take() -> None:
            unit, pending = under_way.popleft()
            pending.wait()
            publish([unit])
            updated(unit)

        for move in self._moves():
            tensors = {}
            for entry in move.own:
                param = self._by_name[entry.slot.name].param
                tensors[entry.slot.name], given = memory_of(param), self._given.pop(entry.slot.name)
                if given.data_ptr() != tensors[entry.slot.name].data_ptr():
                    part_states(self._by_name[entry.slot.name].state, given)
                set_memory(param, _rest(move.unit, entry.slot))
                param.grad = None
            under_way.append((move.unit, move.scatter(tensors, master_of(move.unit), "masters from owners")))
            if len(under_way) > _IN_FLIGHT:
                take()
        while under_way:
            take()

    @property
    def param_states(self) -> OwnerStates:
        """Return the access to the states of single parameters."""
        return OwnerStates(self._by_name, self._owners, self._collectives)

    def offloaded(self) -> Mapping[str, int]:
        """Return the bytes of offloaded masters, and of the states that this rank keeps for the parameters it owns in offloaded units."""
        return self.state_store.tiers(
            lambda unit: [
                value
                for entry in self.whole
                if entry.unit is unit
                for value in tree_leaves(dict(entry.state))
                if isinstance(value, torch.Tensor)
            ]
        )

    def free_states(self) -> None:
        """Free states and parameters."""
        super().free_states()
        self.whole, self._exchanges, self._by_name = [], [], {}

    def __repr__(self) -> str:
        return f"WholeTensorOptimizer({len(self.whole)} parameters of {len(self._owners)}, inner={self.inner!r})"


def _spread(units: Sequence[Unit], collectives: Collectives, experts: Collectives | None) -> list[Spread]:
    """Return the trained parameters, by unit; of units of experts the parameters of all ranks. Collective over ``experts``."""
    dense = {entry.slot.name: entry for entry in spread_of([unit.layout for unit in units], collectives.world)}
    shared = [index for index, unit in enumerate(units) if unit.collectives.topology.of_experts]
    own = [(units[index].layout, _parts(units[index])) for index in shared]
    everyones = experts.gather_objects(own, "layouts of experts") if experts is not None and shared else []
    found = []
    for index, unit in enumerate(units):
        if index in shared:
            layouts, parts = zip(*(theirs[shared.index(index)] for theirs in everyones), strict=True)
            found += spread_of_experts(index, layouts, parts, collectives.world)
        else:
            found += [dense[slot.name] for slot in unit.layout.slots if slot.name in dense]
    return found


def _marks(state: Mapping[torch.Tensor, Mapping[str, Any]], whole: Iterable[WholeParam]) -> defaultdict[torch.Tensor, Any]:
    """Return the marks of the parameters that this rank updates, see ``is_mark``."""
    marks = {id(param): mark for param, mark in state.items()}
    own = ((entry.param, marks.get(id(entry.unit.params[entry.unit.layout.slots.index(entry.slot)]))) for entry in whole)
    return defaultdict(dict, {param: deepcopy(dict(mark)) for param, mark in own if mark})


def _parts(unit: Unit) -> dict[str, TpShard]:
    named = ((slot.name, tp_shard_of(param)) for slot, param in zip(unit.layout.slots, unit.params, strict=True) if param is not None)
    return {name: part for name, part in named if part is not None}


def _whole_param(unit: Unit, slot: ParamSlot) -> nn.Parameter:
    """Return the tensor that replaces a parameter in the groups, with the parameter's attributes that an optimizer may read."""
    made = nn.Parameter(_rest(unit, slot))
    own = unit.params[unit.layout.slots.index(slot)] if slot in unit.layout.slots else None
    if own is not None:  # the parameters of other ranks' experts are not here
        vars(made).update(plain_attributes(own))
    return made


def _rest(unit: Unit, slot: ParamSlot) -> torch.Tensor:
    """Return the placeholder of a parameter between steps: one zero expanded to its full shape, which takes no memory and cannot be
    written to.
    """
    master = master_of(unit)
    return torch.zeros((), dtype=master.dtype, device=master.device).expand(slot.shape)
