"""One optimizer step, as a straight list of phases."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakMethod

import torch

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.schedule.gradients import UnitGradients
from hf_zero.core.schedule.reducer import Reducer
from hf_zero.core.schedule.runtime import Runtime
from hf_zero.core.stages import StagePolicy
from hf_zero.core.step.grad_norm import clip_factor, first_non_finite, global_norm, model_axis
from hf_zero.core.step.loss_scale import LossScaler
from hf_zero.core.step.same_groups import same_clipping, same_groups
from hf_zero.core.step.same_pace import Agreed, agree, same_pace
from hf_zero.core.step.trained_set import Joining, TrainedSet, names_of
from hf_zero.core.step.written_gradients import have_written, none_added, note_added, require_none_added, take_written
from hf_zero.core.step.written_values import WrittenValues
from hf_zero.core.units.unit import Unit, trained_of
from hf_zero.core.units.values import all_gather_updated
from hf_zero.errors import StateError
from hf_zero.observe import log_rank0, span
from hf_zero.system import signals


@dataclass(frozen=True)
class StepSettings:
    """What a step needs to know.

    Attributes:
        max_norm: Clip the global norm to this; 0 is off.
        stage: The ZeRO stage.
        skips_overflow: Skip the update when a gradient is not finite.
        wants_all: Every trainable parameter must have had a gradient on every rank.
    """

    max_norm: float
    stage: StagePolicy
    skips_overflow: bool
    wants_all: bool = False


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    Attributes:
        norm: Before clipping; 0-dim tensor, unscaled.
        skipped: It was skipped (norm inf).
        culprit: For which parameter.
        signal: Number of a signal that asks some rank to end, the same on all ranks; 0 for none.
    """

    norm: torch.Tensor
    skipped: bool
    culprit: str = ""
    signal: int = 0


class Stepper:
    """Takes optimizer steps: finish reductions, norm, check, clip, update, all-gather of updated parameters."""

    def __init__(
        self,
        runtime: Runtime,
        reducer: Reducer,
        optimizer: ShardedOptimizer,
        scaler: LossScaler,
        collectives: Collectives,
        settings: StepSettings,
        model_collectives: Collectives | None = None,
        expert_collectives: Collectives | None = None,
        everyone: Collectives | None = None,
        trained: TrainedSet | None = None,
        join: Callable[[Sequence[Joining]], list[UnitGradients]] | None = None,
    ) -> None:
        self.runtime = runtime
        self.reducer = reducer
        self.optimizer = optimizer
        self.scaler = scaler
        self.collectives = collectives
        self.settings = settings
        self.trained = trained
        self._join = join
        self.on_joined: WeakMethod[Callable[[Sequence[UnitGradients]], None]] | None = None  # gets the gradients of new units
        self._resting: Mapping[int, frozenset[int]] = {}  # positions of parameters that rest, by id of their unit
        self._networks = model_collectives, expert_collectives
        self.everyone = everyone or collectives.data  # the ranks that have to agree before a step
        self._look_at_units()

    def _look_at_units(self) -> None:
        """Note what the norm must know of the units that are trained; local."""
        units, (model, experts) = trained_of(self.optimizer.units), self._networks
        self._model = model_axis(units, model) if model is not None else None
        apart = experts or model  # the ranks with parts that this rank does not have
        tensor = model.world if model is not None else 1
        self._parts = model_axis(units, apart, tensor) if apart is not None else None
        # Both in the model's order; the reducer's own order is the model's too.
        self._gradients = {id(entry.unit): entry for entry in self.reducer.gradients}

    def begin_micro_step(self, boundary: bool, in_no_sync: bool, factor: float) -> None:
        """Called before each backward; decides whether its gradients are reduced in it.

        Args:
            boundary: Its gradients complete an optimizer step.
            in_no_sync: It runs inside ``no_sync()``.
            factor: What its gradients are multiplied with.
        """
        self.prepare(boundary)
        note_added(self.reducer, factor)
        self.reducer.begin(self.settings.stage.reduces(boundary, in_no_sync), factor, completes=boundary)

    def prepare(self, boundary: bool) -> None:
        """Makes optimizer and units ready for a backward."""
        self.optimizer.state_store.expect(self.scaler.scale if boundary else None)

    def norm_of(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Norm of all gradients together, with loss scale; 0-dim, the same on every rank. Collective."""
        stage, store = self.settings.stage, self.optimizer.state_store
        return global_norm(shards, self.collectives, stage.optimizer_sharded, self._parts, store.threads)

    def culprit_of(self, shards: Sequence[torch.Tensor]) -> str:
        """Name of the first parameter with a gradient that is not finite; collective."""
        return first_non_finite(trained_of(self.optimizer.units), shards, self.collectives, self._model)

    def _require_all(self) -> None:
        unused = [name for gradients in self.reducer.gradients for name in gradients.unused()]
        by_rank = self.collectives.data.gather_objects(unused, "parameters without gradient")
        if self._model is not None:
            by_rank = [line for part in self._model.collectives.gather_objects(by_rank, "parameters without gradient") for line in part]
        # In the model's order, each once; every rank has the same lists.
        names = list(dict.fromkeys(name for line in by_rank for name in line))
        if names:
            ranks = [rank for rank, line in enumerate(by_rank) if line]
            raise StateError(
                f"{', '.join(names)}: no gradient in this step on rank(s) {', '.join(map(str, ranks))} of {len(by_rank)}, and "
                "zero_optimization.ignore_unused_parameters is false. Let the loss depend on them, freeze them before initialize(), or "
                "set the key to true: they count as zero then"
            )

    def agree(self) -> Agreed:
        """What the ranks tell each other before a step; collective, on the host.

        Raises:
            StateError: On every rank, if ranks have begun different numbers of micro-steps or train with other hyper-parameters.
        """
        look = WrittenValues(self.runtime.units())
        alike = [same_pace(self.runtime.micro_steps)]
        if self.everyone is self.collectives.data:  # stages of a pipeline have units of their own
            alike += [look.alike(), none_added(self.reducer)]
        if self.trained is not None:
            alike.append(self.trained.alike())  # takes what a script has put into the groups out of them
        told = [int(have_written(self.reducer)), signals.heard(), int(self._waits())]
        if self.everyone.world > 1:
            told = agree(self.everyone, [*alike, same_groups(self.optimizer.inner), same_clipping(self.settings.max_norm)], told)
        look.require_none_refused()
        require_none_added(self.reducer)
        return Agreed(bool(told[0]), told[1], bool(told[2]))

    def signal_of_any(self) -> int:
        """Number of a signal that some rank has heard, outside of a step; 0 for none. Collective, on the host, and waits for every rank."""
        return int(self.everyone.largest_of([signals.heard()], "signals")[0])

    def waiting(self) -> frozenset[int]:
        """Return the ids of the parameters whose gradients wait in ``param.grad`` for the coming step; local."""
        if self.trained is None:
            return frozenset()
        self.trained.look()
        return frozenset(id(entry.param) for entry in self.trained.waiting())

    def forget_waiting(self) -> None:
        """Forget the gradients that wait in ``param.grad`` for the coming step; local."""
        if self.trained is not None:
            self.trained.look()
            for entry in self.trained.waiting():
                entry.param.grad = None

    def _waits(self) -> bool:
        """Return whether a parameter that rests, or is in no trained unit, has a gradient on this rank; local."""
        if self.trained is None:
            return False
        rested = (entry.used(index) for entry in self.reducer.gradients for index in self._resting.get(id(entry.unit), ()))
        return any(rested) or bool(self.trained.waiting())

    def _follow(self, trained: TrainedSet, waits: bool) -> None:
        """Train what is to be trained now; collective. See [Note: what is trained].

        Args:
            trained: What the script trains.
            waits: A parameter that rests, or is in no trained unit, has a gradient on any rank.

        Raises:
            StateError: On all ranks, where a parameter cannot join or rest.
        """
        trained.require_own()
        entries = list(self.reducer.gradients)
        joining = trained.agree_on_joining(self.everyone) if waits else []
        idle = [(entry, trained.idle(entry.unit, self._resting.get(id(entry.unit), ()))) for entry in entries]
        used = [entry.used(index) for entry, indices in idle for index in indices]
        anywhere = iter(self.collectives.data.any_of(used, "frozen parameters") if used else ())
        resting = {id(entry.unit): frozenset(index for index in indices if not next(anywhere)) for entry, indices in idle}
        for entry in entries:
            self._require_divisible(entry.unit, resting[id(entry.unit)])
        rested = [entry for entry in entries if entry.unit.rests]
        self.optimizer.rest(resting)
        self._resting = resting
        waiting = {id(new.param): grad for new in joining if (grad := new.param.grad) is not None}
        for new in joining:
            new.param.grad = None
        joined = self._join(joining) if joining and self._join is not None else []
        told = self.on_joined() if joined and self.on_joined is not None else None
        if told is not None:
            told(joined)
        self.reducer.train(self.reducer.gradients)
        self.reducer.take_waiting([*(entry for entry in rested if not entry.unit.rests), *joined], waiting)
        self._look_at_units()
        trained.laid_out(resting, [entry.unit for entry in self.reducer.gradients])

    def _require_divisible(self, unit: Unit, resting: Collection[int]) -> None:
        whole = len(resting) in (0, sum(bool(slot.numel) for slot in unit.layout.slots))
        if not (whole or self.optimizer.can_rest(unit)):
            raise StateError(
                f"{', '.join(names_of(unit, sorted(resting))[:5])}: frozen after initialize(), but not the other parameters of "
                f"{unit.name}, whose optimizer states rest in one file (offload_optimizer.device: nvme). Freeze all of {unit.name}, freeze "
                "before initialize(), or offload to cpu"
            )

    def measure(self) -> torch.Tensor:
        """The norm of the gradients accumulated so far, before clipping and without loss scale, ahead of the step; 0-dim, collective."""
        shards = [self._gradients[id(unit)].reduced() for unit in trained_of(self.optimizer.units)]
        self.optimizer.state_store.halt()
        return self.norm_of(shards) / self.scaler.scale

    def take(self) -> StepResult:
        """One step over the gradients accumulated so far, and over those that the script has written; collective.

        Raises:
            StateError: On every rank, if ranks have begun different numbers of micro-steps or have other hyper-parameters, a parameter had
                no gradient and each must have one, or gradients were written that cannot be taken; nothing has changed then.
        """
        self.reducer.shown.drop_removed()
        agreed = self.agree()
        if self.trained is not None and (self.trained.changed or agreed.waits):
            self._follow(self.trained, agreed.waits)
        if agreed.written:
            take_written(self.reducer, self.collectives.data, self.settings.stage.parameters_sharded)
        if self.settings.wants_all:
            self._require_all()
        with span("finish_reduce"):
            shards = [self._gradients[id(unit)].reduced() for unit in trained_of(self.optimizer.units)]
        self.optimizer.state_store.halt()
        with span("norm"):
            scaled_norm = self.norm_of(shards)
        overflow = self.settings.skips_overflow and not bool(torch.isfinite(scaled_norm))
        norm = torch.full_like(scaled_norm, math.inf) if overflow else scaled_norm / self.scaler.scale
        culprit = ""
        if overflow:
            culprit = self.culprit_of(shards)
        else:
            self.optimizer.begin_step()
            with span("clip"):
                factor = clip_factor(norm, self.settings.max_norm) / self.scaler.scale
            with span("update"):
                self.runtime.reshard_for_update()
                for unit in trained_of(self.optimizer.units):
                    unit.secondary.forget()  # an update that goes on after the step is not told of
                spreads: list[Pending | None] = []
                self.optimizer.update(shards, factor, lambda unit: spreads.append(all_gather_updated(unit)))
            with span("spread"):
                for spread in spreads:
                    if spread is not None:
                        spread.wait()
        self.optimizer.overflow, self.optimizer.norm = overflow, norm
        if not overflow:
            self.optimizer.end_step()
        self.reducer.clear()
        if overflow:
            log_rank0("step skipped: the gradient of %s is not finite at loss scale %g", culprit, self.scaler.scale)
        scale = self.scaler.scale
        self.scaler.update(overflow)
        self.reducer.exchange.stepped(overflow, self.scaler.scale / scale)
        return StepResult(norm, overflow, culprit, agreed.signal)
