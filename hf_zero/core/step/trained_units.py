"""Bring the units and segments of a step into line with the parameters that the script trains: parameters rest, train again and join."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from weakref import WeakMethod

from hf_zero.comm.collectives import Collectives
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.schedule.gradients import UnitGradients
from hf_zero.core.schedule.reducer import Reducer
from hf_zero.core.step.agreement import Alike
from hf_zero.core.step.trained_set import Joining, TrainedSet, names_of
from hf_zero.core.units.unit import Unit
from hf_zero.errors import StateError


class TrainedUnits:
    """Let parameters rest and join between the backward and the update of a step. See [Note: what is trained].

    Attributes:
        on_joined: Called with the gradients of new units.

    Args:
        trained: The set of parameters that the script trains.
        reducer: Gradients on their way.
        optimizer: The engine's optimizer.
        join: Makes units of parameters that join, and returns their gradients; collective.
        data: The data-parallel ranks.
        everyone: The ranks that have to agree before a step.
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
        self._resting: Mapping[int, frozenset[int]] = {}  # positions of parameters that rest, by id of their unit

    def alike(self) -> Alike:
        """Look at the parameters that the script trains, take new ones out of the param groups, and return the digest for the vote of a
        step.
        """
        return self._trained.alike()

    def waiting(self) -> frozenset[int]:
        """Return the ids of the parameters whose gradients wait in ``param.grad`` for the coming step; local."""
        self._trained.look()
        return frozenset(id(entry.param) for entry in self._trained.waiting())

    def forget_waiting(self) -> None:
        """Discard the gradients that wait in ``param.grad`` for the coming step; local."""
        self._trained.look()
        for entry in self._trained.waiting():
            entry.param.grad = None

    def waits(self) -> bool:
        """Return whether a parameter that rests, or is in no trained unit, has a gradient on this rank; local."""
        rested = (self._has_gradient(entry, index) for entry in self._reducer.gradients for index in self._resting.get(id(entry.unit), ()))
        return any(rested) or bool(self._trained.waiting())

    def _has_gradient(self, entry: UnitGradients, index: int) -> bool:
        """Return whether a parameter has a gradient on this rank, of a backward or written by the script; local."""
        param = entry.unit.params[index]
        return entry.collected.used[index] or (param is not None and self._reducer.shown.is_written(param))

    def follow(self, waits: bool) -> bool:
        """Lay out units and segments for the parameters that are trained now; collective.

        Args:
            waits: A parameter that rests, or is in no trained unit, has a gradient on any rank.

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
        """Make units of ``joining``, and reduce the gradients that wait for them and for units that have ``rested``
        until now; collective.
        """
        waiting = {id(new.param): grad for new in joining if (grad := new.param.grad) is not None}
        for new in joining:
            new.param.grad = None
        joined = self._join(joining) if joining else []
        told = self.on_joined() if joined and self.on_joined is not None else None
        if told is not None:
            told(joined)
        self._reducer.train(self._reducer.gradients)
        self._reducer.take_waiting([*(entry for entry in rested if not entry.unit.rests), *joined], waiting)

    def _require_divisible(self, unit: Unit, resting: Collection[int]) -> None:
        whole = len(resting) in (0, sum(bool(slot.numel) for slot in unit.layout.slots))
        if not (whole or self._optimizer.can_rest(unit)):
            raise StateError(
                f"{', '.join(names_of(unit, sorted(resting))[:5])}: frozen after initialize(), while other parameters of "
                f"{unit.name} still train; their optimizer states share one file (offload_optimizer.device: nvme). Freeze all of "
                f"{unit.name}, freeze before initialize(), or offload to cpu"
            )
