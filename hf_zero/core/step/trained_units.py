"""Update the units and segments of a step when the set of trained parameters changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from weakref import WeakMethod, ref

import torch

from hf_zero.comm.collectives import Collectives
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.schedule.gradients import UnitGradients
from hf_zero.core.schedule.reducer import Reducer
from hf_zero.core.step.agreement import JOINS, MISSES, RESTED, SharedFact
from hf_zero.core.step.trained_set import Joining, TrainedSet
from hf_zero.core.step.untrained import UntrainedGradients
from hf_zero.core.units.marks import has_only_zeros, is_elsewhere, is_packed, stages_of
from hf_zero.core.units.sharded_parameter import set_gradient
from hf_zero.core.units.unit import Unit, find_unit
from hf_zero.errors import StateError


def names_of(unit: Unit, indices: Sequence[int]) -> list[str]:
    """Return the dotted names of the parameters of ``unit`` at ``indices``."""
    return [unit.layout.slots[index].name for index in indices]


class TrainedUnits:
    """Update of units and segments between the backward and the update of a step, when the set of trained parameters changes.

    See [Note: trained parameters].

    Attributes:
        on_joined: Called with the gradients of new units.
        untrained: Gradients of parameters in no param group.
        skips_unused: Whether parameters without a gradient on any rank rest in a step; otherwise their gradient is zero.
        resting: Positions of the parameters that rest, by id of their unit.

    Args:
        trained: The set of parameters that the script trains.
        reducer: Collects and reduces the gradients.
        optimizer: The engine's optimizer.
        join: Makes units of new parameters, and returns their gradients; collective.
        data: Network of the data-parallel ranks.
        everyone: Network of the ranks that have to agree before a step.
    """

    def __init__(
        self,
        trained: TrainedSet,
        reducer: Reducer,
        optimizer: ShardedOptimizer,
        join: Callable[[Sequence[Joining]], list[UnitGradients]],
        data: Collectives,
        everyone: Collectives,
    ) -> None:
        self.on_joined: WeakMethod[Callable[[Sequence[UnitGradients]], None]] | None = None
        self._trained, self._reducer, self._optimizer, self._join = trained, reducer, optimizer, join
        self._data, self._everyone = data, everyone
        self.untrained = UntrainedGradients(trained, reducer)
        reducer.outside = ref(self.untrained)
        self.skips_unused = optimizer.adapts
        self.resting: Mapping[int, frozenset[int]] = {}

    @property
    def over_stages(self) -> bool:
        """Return whether other ranks have other layers of the model (a pipeline); the same on every rank."""
        return self._trained.over_stages

    def alike(self) -> SharedFact:
        """Look at the parameters that the script trains, remove new ones from the inner optimizer's groups, and return the digest as a fact
        for the vote of a step.
        """
        return self._trained.alike()

    def waiting(self) -> frozenset[int]:
        """Return the ids of the parameters of no trained unit whose gradients in ``param.grad`` the coming step will use; local."""
        self._trained.look()
        return frozenset(id(entry.param) for entry in self._trained.waiting())

    def joining(self) -> set[int]:
        """Return the ids of the parameters that require a gradient and whose gradient no backward has reduced; local."""
        self._trained.look()
        found = {id(entry.param) for entry in self._trained.outside() if entry.param.requires_grad}
        for entry in self._reducer.gradients:
            rested = entry.unit.params if entry.unit.rests else ()
            found.update(id(param) for param in rested if param is not None and param.requires_grad)
        return found

    def gradient_of(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return the mean over ranks of the gradient with which ``param`` joins at the coming step, with the loss scale; collective.

        Returns:
            None if ``param`` does not join, or no rank has a gradient.
        """
        self._trained.look()
        entry = next((entry for entry in self._trained.outside() if entry.param is param), None)
        if entry is None:
            return None
        owner = find_unit(param)
        shape = owner[0].layout.slots[owner[1]].shape if owner is not None else param.shape
        return self._reducer.mean_of_waiting(entry.name, param.grad, torch.Size(shape))

    def joinable(self) -> list[str]:
        """Return the names of parameters of param groups that this rank has and that are in no trained unit, frozen or not; local.

        Packed values cannot train.
        """
        self._trained.look()
        own = (entry.name for entry in self._trained.outside() if not is_elsewhere(entry.param) and not is_packed(entry.param))
        return list(own) if self._optimizer.adapts else []

    def join(self, names: Container[str]) -> None:
        """Make units of the parameters ``names``, a part of ``joinable`` that is equal on all ranks, before they have a gradient: their
        optimizer states are about to be loaded. The next step stops training the frozen ones; collective.
        """
        self._trained.require_own()
        joining = [entry for entry in self._trained.outside() if entry.name in names]
        together = all(map(self._optimizer.can_rest, self._optimizer.units))  # else units of one parameter each, which rest alone
        for entries in [joining] if together else [[entry] for entry in joining]:
            self._add_units(entries)
        self._trained.laid_out(self.resting, [entry.unit for entry in self._reducer.gradients])
        self._trained.changed = True  # the step looks at the new units, and lets them rest

    def forget_waiting(self) -> None:
        """Discard the gradients in ``param.grad`` of parameters that are in no trained unit; local."""
        self._trained.look()
        for entry in self._trained.waiting():
            set_gradient(entry.param, None)

    def news(self) -> int:
        """Return how gradients on this rank change the set of parameters that are updated: the largest of ``MISSES``, ``RESTED`` and
        ``JOINS`` that applies, or 0; local.
        """
        if self._trained.waiting():
            return JOINS
        rested = (self._has_gradient(entry, index) for entry in self._reducer.gradients for index in self.resting.get(id(entry.unit), ()))
        if any(rested):
            return RESTED
        collected = ((entry, entry.collected) for entry in self._reducer.gradients if self.skips_unused)
        return MISSES if any(self._misses(entry) for entry, found in collected if found.of_experts or not all(found.used)) else 0

    def _misses(self, entry: UnitGradients) -> bool:
        """Return whether a parameter of the unit is updated at present, may rest, and has no gradient on this rank; local."""
        unit = entry.unit
        used = [self._has_gradient(entry, index) for index in range(len(unit.params))]
        if _is_on_several_stages(unit) or (any(used) and not self._optimizer.can_rest(unit)):
            return False
        resting = self.resting.get(id(unit), ())
        return any(
            not (used[index] or index in resting) and slot.numel and param is not None and self._trained.trains(param)
            for index, (param, slot) in enumerate(zip(unit.params, unit.layout.slots, strict=True))
        )

    def _has_gradient(self, entry: UnitGradients, index: int) -> bool:
        """Return whether a parameter has a gradient on this rank, from a backward or written by the script; local."""
        param = entry.unit.params[index]
        if param is None:
            return entry.collected.used[index]
        return (entry.collected.used[index] and not has_only_zeros(param)) or self._reducer.shown.is_written(param)

    def follow(self, news: int) -> bool:
        """Lay out units and segments for the parameters that are trained now; collective.

        Args:
            news: The largest ``news`` of all ranks.

        Returns:
            Whether units or segments may have changed.

        Raises:
            StateError: On all ranks, if a parameter cannot join or rest.
        """
        if not (self._trained.changed or news):
            return False
        self._trained.require_own()
        entries = list(self._reducer.gradients)
        joining = self._trained.agree_on_joining(self._everyone) if news == JOINS else []
        resting = self._without_gradient(entries, news > 0 and self.skips_unused)
        self._optimizer.cut_segments |= news > 0  # also on ranks whose experts, or layers, all have gradients
        differs, unreduced = self._compare(entries, resting)
        if not (differs or joining or self._trained.changed):
            return False  # other ranks have the gradients that some ranks miss
        rested = [entry for entry in entries if entry.unit.rests]
        self._optimizer.rest(resting, unreduced)
        self.resting = resting
        if joining or unreduced != {id(entry.unit) for entry in rested}:
            self._take_in(joining, rested)
        self._trained.laid_out(resting, [entry.unit for entry in self._reducer.gradients])
        return True

    def _without_gradient(self, entries: Sequence[UnitGradients], unused: bool) -> dict[int, frozenset[int]]:
        """Return the positions of the parameters that must rest, because no rank that holds them has a gradient of them, by id of their
        unit; collective.

        Args:
            entries: Gradients of all units.
            unused: Ask for all parameters, not only for frozen ones and those that rest already.
        """
        resting = {}
        for experts in (False, True):  # ranks hold different experts
            asked = [(entry, self._asked(entry.unit, unused)) for entry in entries if entry.collected.of_experts is experts]
            used = [self._has_gradient(entry, index) for entry, indices in asked for index in indices]
            network = asked[0][0].unit.collectives if experts and asked else self._data
            anywhere = iter(network.any_of(used, "parameters without gradient") if used else ())
            for entry, indices in asked:
                found = frozenset(index for index in indices if not next(anywhere))
                if found := self._divisible(entry.unit, found):
                    resting[id(entry.unit)] = found
        return resting

    def _compare(self, entries: Sequence[UnitGradients], resting: Mapping[int, frozenset[int]]) -> tuple[bool, set[int]]:
        """Return whether other parameters rest than in the last step on any rank, and the ids of the units that no step reduces, the same
        on all ranks; collective if ranks have different experts.
        """
        unreduced = {id(entry.unit) for entry in entries if self._stays_unreduced(entry.unit, resting.get(id(entry.unit), ()))}
        experts = [id(entry.unit) for entry in entries if entry.collected.of_experts]
        if not experts:
            return resting != self.resting, unreduced
        votes = self._data.any_of([resting != self.resting, *(unit not in unreduced for unit in experts)], "experts without gradient")
        return votes[0], unreduced.difference(unit for unit, moves in zip(experts, votes[1:], strict=True) if moves)

    def _asked(self, unit: Unit, unused: bool) -> list[int]:
        """Return the positions in ``unit`` of the parameters that may rest in this step; ``unused`` as for ``_without_gradient``."""
        if unused and not _is_on_several_stages(unit):
            return [index for index, slot in enumerate(unit.layout.slots) if slot.numel]
        return self._trained.idle(unit, self.resting.get(id(unit), ()))

    def _stays_unreduced(self, unit: Unit, resting: Collection[int]) -> bool:
        """Return whether no step reduces ``unit`` before a gradient waits: all of its parameters rest, and a script has frozen them."""
        if len(resting) != _count(unit):
            return False
        slots = zip(unit.params, unit.layout.slots, strict=True)
        return unit.rests or not any(param is not None and slot.numel and self._trained.trains(param) for param, slot in slots)

    def _take_in(self, joining: Sequence[Joining], rested: Sequence[UnitGradients]) -> None:
        """Make units of the parameters in ``joining``, and reduce the gradients of these parameters and of units in ``rested``, which were
        frozen until now; collective.
        """
        waiting = {id(new.param): grad for new in joining if (grad := new.param.grad) is not None}
        for new in joining:
            set_gradient(new.param, None)
        joined = self._add_units(joining)
        self._reducer.take_waiting([*(entry for entry in rested if not entry.unit.rests), *joined], waiting)

    def _add_units(self, joining: Sequence[Joining]) -> list[UnitGradients]:
        """Make and train units of ``joining``, and return their gradients; collective."""
        joined = self._join(joining) if joining else []
        notify = self.on_joined() if joined and self.on_joined is not None else None
        if notify is not None:
            notify(joined)
        self._reducer.train(self._reducer.gradients)
        return joined

    def _divisible(self, unit: Unit, resting: frozenset[int]) -> frozenset[int]:
        """Return the positions of ``resting`` that can rest: in a unit that is updated as a whole, all parameters or none.

        Raises:
            StateError: Some parameters of such a unit are frozen.
        """
        if len(resting) in (0, _count(unit)) or self._optimizer.can_rest(unit):
            return resting
        frozen = [index for index in sorted(resting) if (param := unit.params[index]) is None or not self._trained.trains(param)]
        if frozen:
            raise StateError(
                f"{', '.join(names_of(unit, frozen)[:5])}: frozen after initialize(), or removed, while others of "
                f"{unit.name} still train; their optimizer states share one file (offload_optimizer.device: nvme). Freeze all of "
                f"{unit.name}, freeze or replace modules before initialize(), or offload to cpu"
            )
        return frozenset()


def _count(unit: Unit) -> int:
    """Return the number of parameters of ``unit`` that have elements."""
    return sum(bool(slot.numel) for slot in unit.layout.slots)


def _is_on_several_stages(unit: Unit) -> bool:
    """Return whether several stages of a pipeline hold the parameters of ``unit`` (tied weights), and update their copies alike."""
    return any(param is not None and stages_of(param) for param in unit.params)
