"""Update the units and segments of a step when the set of trained parameters changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from weakref import WeakMethod, ref

import torch

from hf_zero.comm.collectives import Collectives
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.schedule.gradients import UnitGradients
from hf_zero.core.schedule.reducer import Reducer
from hf_zero.core.step.agreement import SharedFact
from hf_zero.core.step.trained_set import Joining, TrainedSet
from hf_zero.core.step.untrained import UntrainedGradients
from hf_zero.core.units.marks import is_elsewhere, is_packed
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
        self._resting: Mapping[int, frozenset[int]] = {}  # positions of parameters that rest, by id of their unit

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
        """Return the ids of the parameters that require a gradient and that no update has trained, or that rested; local."""
        self._trained.look()
        found = {id(entry.param) for entry in self._trained.outside() if entry.param.requires_grad}
        for entry in self._reducer.gradients:
            rested = (entry.unit.params[index] for index in self._resting.get(id(entry.unit), ()))
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
        return list(own) if self._optimizer.takes_more else []

    def join(self, names: Container[str]) -> None:
        """Make units of the parameters ``names``, a part of ``joinable`` that is equal on all ranks, before they have a gradient: their
        optimizer states are about to be loaded. The next step stops training the frozen ones; collective.
        """
        self._trained.require_own()
        joining = [entry for entry in self._trained.outside() if entry.name in names]
        together = all(map(self._optimizer.can_rest, self._optimizer.units))  # else units of one parameter each, which rest alone
        for entries in [joining] if together else [[entry] for entry in joining]:
            self._add_units(entries)
        self._trained.laid_out(self._resting, [entry.unit for entry in self._reducer.gradients])
        self._trained.changed = True  # the step looks at the new units, and lets them rest

    def forget_waiting(self) -> None:
        """Discard the gradients in ``param.grad`` of parameters that are in no trained unit; local."""
        self._trained.look()
        for entry in self._trained.waiting():
            set_gradient(entry.param, None)

    def waits(self) -> bool:
        """Return whether a parameter that rests, or is in no trained unit, has a gradient on this rank; local."""
        rested = (self._has_gradient(entry, index) for entry in self._reducer.gradients for index in self._resting.get(id(entry.unit), ()))
        return any(rested) or bool(self._trained.waiting())

    def _has_gradient(self, entry: UnitGradients, index: int) -> bool:
        """Return whether a parameter has a gradient on this rank, from a backward or written by the script; local."""
        param = entry.unit.params[index]
        return entry.collected.used[index] or (param is not None and self._reducer.shown.is_written(param))

    def follow(self, waits: bool) -> bool:
        """Lay out units and segments for the parameters that are trained now; collective.

        Args:
            waits: Whether a parameter that is not trained at present, or is in no trained unit, has a gradient on any rank.

        Returns:
            Whether units or segments may have changed.

        Raises:
            StateError: On all ranks, if a parameter cannot join or rest.
        """
        if not (self._trained.changed or waits):
            return False
        self._trained.require_own()
        entries = list(self._reducer.gradients)
        joining = self._trained.agree_on_joining(self._everyone) if waits else []
        idle = [(entry, self._trained.idle(entry.unit, self._resting.get(id(entry.unit), ()))) for entry in entries]
        used = [self._has_gradient(entry, index) for entry, indices in idle for index in indices]
        anywhere = iter(self._data.any_of(used, "frozen parameters") if used else ())
        resting = {id(entry.unit): frozenset(index for index in indices if not next(anywhere)) for entry, indices in idle}
        for entry in entries:
            self._require_divisible(entry.unit, resting[id(entry.unit)])
        rested = [entry for entry in entries if entry.unit.rests]
        self._optimizer.rest(resting)
        self._resting = resting
        self._take_in(joining, rested)
        self._trained.laid_out(resting, [entry.unit for entry in self._reducer.gradients])
        return True

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

    def _require_divisible(self, unit: Unit, resting: Collection[int]) -> None:
        whole = len(resting) in (0, sum(bool(slot.numel) for slot in unit.layout.slots))
        if not (whole or self._optimizer.can_rest(unit)):
            raise StateError(
                f"{', '.join(names_of(unit, sorted(resting))[:5])}: frozen after initialize(), or removed, while others of "
                f"{unit.name} still train; their optimizer states share one file (offload_optimizer.device: nvme). Freeze all of "
                f"{unit.name}, freeze or replace modules before initialize(), or offload to cpu"
            )
