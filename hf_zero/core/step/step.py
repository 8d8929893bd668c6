"""Take one optimizer step, written as a list of phases in their order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakMethod, ref

import torch

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.schedule.gradient_sums import GradientExchange, GradientPolicy
from hf_zero.core.schedule.reducer import Reducer
from hf_zero.core.schedule.runtime import Runtime
from hf_zero.core.stages import StagePolicy
from hf_zero.core.step.agreement import RESTED, Agreed, agree, same_call, same_clipping, same_groups, same_micro_steps
from hf_zero.core.step.buffers import WrittenBuffers
from hf_zero.core.step.equal_copies import equal_copies
from hf_zero.core.step.grad_norm import clip_factor, first_non_finite, global_norm, model_axis
from hf_zero.core.step.precision import LossScaler
from hf_zero.core.step.spikes import StepWatch
from hf_zero.core.step.trained_units import TrainedUnits
from hf_zero.core.step.unused import require_all, warn_of_decay
from hf_zero.core.step.written import WrittenValues, have_written, note_added, refuse_added, saved_empty, take_written
from hf_zero.core.units.unit import Unit, trained_of
from hf_zero.core.units.values import adopt_writes, agree_on_scales, all_gather_updated, publish
from hf_zero.errors import StateError, UnsupportedError
from hf_zero.memory.copies import Arriving
from hf_zero.observe import log_rank0, span
from hf_zero.system import signals

# Values in the vote of a step; the largest of all ranks counts:
_CHANGED = 1  # the norm of the gradients as they are now is not known
_WRITTEN = 2  # a script has written gradients
_ADDED = 3  # a backward has added to a gradient that a script had written
_REFUSED = 4  # a script has written values to a parameter that cannot accept them
_STEPS = same_call("step()")
_ANSWERS = 4  # numbers in the message of a vote; one more where a device may skip, and where ranks hold different parameters
_READ_AT_ONCE = ("cpu",)  # types of devices whose values the host reads without a wait


@dataclass(frozen=True)
class StepSettings:
    """Settings of a step.

    Attributes:
        max_norm: Largest global norm; larger gradients are clipped to it. 0 is off.
        stage: The ZeRO stage.
        skips_overflow: Whether the update is skipped when a gradient is not finite.
        wants_all: Whether every trainable parameter must have had a gradient on every rank.
        shows_gradients: Whether scripts can read ``param.grad`` where gradients are sharded.
    """

    max_norm: float
    stage: StagePolicy
    skips_overflow: bool
    wants_all: bool = False
    shows_gradients: bool = False


@dataclass(frozen=True)
class StepResult:
    """Result of a step.

    Attributes:
        norm: Gradient norm before clipping; 0-dim tensor, unscaled; inf if a gradient was not finite and the step was skipped.
        skipped: Whether the update was skipped.
        culprit: Name of the parameter whose gradient is not finite; "" if there is none.
        signal: Number of a signal that asks some rank to end, the same on all ranks; 0 for none.
        groups: Number of replica groups that have taken the step; 0 if this group was not among them and has received their state instead.
    """

    norm: torch.Tensor
    skipped: bool
    culprit: str = ""
    signal: int = 0
    groups: int = 1


class Measured:
    """A gradient norm that was taken before the step, and the state of the gradients then.

    Args:
        norm: The norm, with loss scale.
        shards: This rank's gradients, one 1D tensor per unit.
        micro_steps: Number of micro-steps that this rank has begun.
    """

    def __init__(self, norm: torch.Tensor, shards: Sequence[torch.Tensor], micro_steps: int) -> None:
        self.norm = norm
        self._shards = [(ref(shard), shard._version) for shard in shards]  # the count of writes in place
        self._micro_steps = micro_steps

    def is_of(self, shards: Sequence[torch.Tensor], micro_steps: int) -> bool:
        """Return whether the gradients are still the same; local."""
        same = [shard is then() and shard._version == version for shard, (then, version) in zip(shards, self._shards, strict=False)]
        return all(same) and len(shards) == len(self._shards) and micro_steps == self._micro_steps


class OtherGroups(Protocol):
    """Interface to replica groups that step together with the ranks of this process group."""

    def average(self, shards: Sequence[torch.Tensor], max_norm: float) -> int:
        """Replace the reduced gradients by their mean over the groups; collective over the groups.

        Args:
            shards: This rank's gradients, one 1D tensor per unit.
            max_norm: Norm that gradients are clipped to.

        Returns:
            The number of groups that take the step; 0 if this group has received the state after the step instead, and has discarded its
            gradients.
        """


class Stepper:
    """Driver of optimizer steps: finish reductions, norm, check, clip, update, all-gather of updated parameters."""

    def __init__(
        self,
        runtime: Runtime,
        reducer: Reducer,
        optimizer: ShardedOptimizer,
        scaler: LossScaler,
        collectives: Collectives,
        settings: StepSettings,
        trained: TrainedUnits,
        everyone: Collectives,
        model_collectives: Collectives | None = None,
        expert_collectives: Collectives | None = None,
    ) -> None:
        self.runtime = runtime
        self.reducer = reducer
        self.optimizer = optimizer
        self.scaler = runtime.scaler = scaler
        self.collectives = collectives
        self.settings = settings
        self.trained = trained
        self.buffers = WrittenBuffers(runtime.module, collectives.data)
        self._networks = model_collectives, expert_collectives
        self.equal = equal_copies(collectives.topology, model_collectives, expert_collectives, self.optimizer.units)
        self.everyone = everyone  # network of the ranks that have to agree before a step
        self.groups: OtherGroups | None = None  # set by layers above
        self._averaged: int | None = None  # result of ``OtherGroups.average`` for the coming step
        self._measured: Measured | None = None  # norm of the coming step
        self._is_first = True  # no step has been taken
        self.keeps = False  # whether readers find the gradients after the step, until ``zero_grad``
        self._clips_by: torch.Tensor | None = None  # norm by which the script has clipped the waiting gradients
        self._clipped: torch.Tensor | None = None  # the same once they are clipped: the step clips no more
        optimizer.own.change = self.change_masters
        trained.skips_unused &= not settings.wants_all  # otherwise such a step raises
        if settings.shows_gradients:
            reducer.shown.reads.wait_for_ranks = WeakMethod(self.wait_for_ranks)
        self._record_norm_facts()

    def _record_norm_facts(self) -> None:
        """Record the facts that the norm needs about the trained units; local."""
        units, (model, experts) = trained_of(self.optimizer.units), self._networks
        self._model = model_axis(units, model) if model is not None else None
        apart = experts or model  # network of the ranks with parts of the model that this rank does not have
        self._parts = model_axis(units, apart, model.world if model is not None else 1, self.equal) if apart is not None else None
        # Both lists are in the model's order; the reducer's own order is the model's too.
        self._gradients = {id(entry.unit): entry for entry in self.reducer.gradients}
        schedule = self.runtime.schedule
        rests = schedule is not None and not schedule.limits.updates_overlap  # otherwise shards may still be updated after the step
        self._coded = [unit for unit in self.runtime.units() if unit.codes.kept] if rests else []

    def begin_micro_step(self, boundary: bool, in_no_sync: bool, factor: float) -> None:
        """Begin a micro-step, before each backward; decide whether the backward reduces its gradients.

        Args:
            boundary: The gradients complete an optimizer step.
            in_no_sync: The backward runs inside ``no_sync()``.
            factor: Factor of the gradients.
        """
        self.prepare(boundary)
        note_added(self.reducer, factor)
        self.reducer.begin(self.settings.stage.reduces(boundary, in_no_sync), factor, completes=boundary)

    def prepare(self, boundary: bool) -> None:
        """Prepare optimizer and units for a backward."""
        self._averaged = self._clips_by = self._clipped = None  # of a step that was measured and not taken
        self.optimizer.state_store.expect(self.scaler.scale if boundary else None)

    def norm_of(self, shards: Sequence[torch.Tensor], beside: torch.Tensor | None = None) -> torch.Tensor:
        """Return the norm of all gradients, with loss scale; 0-dim, the same on every rank. Collective.

        ``beside``, (n,) float64, is replaced by its sum over the ranks of the step's vote.
        """
        stage, store = self.settings.stage, self.optimizer.state_store
        if beside is not None and self.everyone is not self.collectives:
            self.everyone.all_reduce(beside, "loss").wait()
            beside = None
        return global_norm(shards, self.collectives, stage.optimizer_sharded, self._parts, store.threads, beside)

    def norm_of_pieces(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the norm, with loss scale, of parts of this rank's gradients; 0-dim, the same on every rank. Collective.

        Raises:
            UnsupportedError: Ranks that hold other parts of the model have parts of these gradients too.
        """
        if self._parts is not None or type(self) is not Stepper:
            raise UnsupportedError(
                "the norm of only some gradients is not supported with tensor, expert or pipeline parallelism or OneBitAdam: pass all "
                "parameters of the model"
            )
        return global_norm(pieces, self.collectives, self.settings.stage.optimizer_sharded, None, self.optimizer.state_store.threads)

    def name_of_non_finite(self, shards: Sequence[torch.Tensor]) -> str:
        """Return the name of the first parameter with a gradient that is not finite; collective."""
        return first_non_finite(trained_of(self.optimizer.units), shards, self.collectives, self._model)

    def agree(self, refused: str = "") -> Agreed:
        """Hold the vote before a step and return its result; collective, on the host. ``refused`` is an error that all ranks raise.

        Raises:
            StateError: On every rank, if ranks have begun different numbers of micro-steps or have different hyper-parameters.
        """
        own, units, store = self.optimizer.own, self.runtime.units(), self.optimizer.state_store
        own.parts.take(forward=False)
        refused = refused or store.broken or self.equal.refusal() or own.parts.refusal() or own.foreign_states() or saved_empty(units)
        look = WrittenValues(units, self.collectives.data, self.everyone, self.runtime.idle, refused)
        alike = [_STEPS, same_micro_steps(self.runtime.micro_steps), *look.alike(), self.trained.alike()]
        written = _WRITTEN if have_written(self.reducer) else _CHANGED if self._has_changed() else 0
        written = _REFUSED if look.refused else _ADDED if self.reducer.added_to else written
        late, draws = [int(not self._can_skip_late())] * self._may_skip_late, self.runtime.draws
        drew = [int(draws.drew)] if draws is not None else []
        answers = [written, signals.heard(), self.trained.news(), self.buffers.news(), *late, *drew, *look.noted]
        if self.everyone.world > 1:
            answers = agree(self.everyone, [*alike, same_groups(self.optimizer.inner), same_clipping(self.settings.max_norm)], answers)
        first, last = _ANSWERS + len(late), _ANSWERS + len(late) + len(drew)
        look.settle([answers[0] == _REFUSED, *answers[last:]], self.everyone)
        if draws is not None:
            draws.require_same(any(answers[first:last]), self.everyone)
        if answers[0] == _ADDED:
            refuse_added(self.reducer, self.everyone)
        (written, signal, news, buffers), reads = answers[:_ANSWERS], answers[_ANSWERS:first] != [0]
        return Agreed(written >= _WRITTEN, signal, news, buffers, written >= _CHANGED, reads)

    def wait_for_ranks(self, what: str) -> None:
        """Wait for all ranks before a collective operation that the script begins, between backward and step; collective, on the host.

        Raises:
            StateError: On every rank, if some ranks do something else.
        """
        if self.everyone.world > 1:
            more = (self._may_skip_late, self.runtime.draws is not None)
            agree(self.everyone, [same_call(what)], [0] * (_ANSWERS + sum(more) + 1))

    def _has_changed(self) -> bool:
        """Return whether the gradients have changed since ``measure`` took their norm, or may have; local."""
        exposed = self.reducer.shown.reads.exposed  # may be written in ways that no counter shows
        return exposed or self._measured is None or not self._measured.is_of(self.reduced(), self.runtime.micro_steps)

    def signal_of_any(self) -> int:
        """Return the number of a signal that some rank has received, outside of a step; 0 for none. Collective; waits for all ranks."""
        return int(self.everyone.largest_of([signals.heard()], "signals")[0])

    def measure(self) -> torch.Tensor:
        """Return the norm of the gradients that the coming step uses, before clipping and without loss scale; 0-dim, collective.

        Called after the backward that completes the step. It already takes gradients of new parameters, and gradients that the script has
        written. Otherwise it holds no vote: whether some rank has such gradients travels with the norm, and ``take`` uses the same norm if
        its vote finds that no gradient has changed since. At stage 0 scripts write to gradients in ways that no counter shows.

        Raises:
            StateError: As for ``take``.
        """
        self._measured = None
        if type(self) is Stepper and self.groups is None and self.settings.stage.optimizer_sharded:
            shards = self.reduced()
            touched = bool(self.reducer.added_to) or have_written(self.reducer) or self.trained.news() >= RESTED
            anywhere: torch.Tensor | None = None
            if self.everyone.world > 1:  # one rank need not wait for the device
                anywhere = torch.tensor([float(touched)], dtype=torch.float64, device=self.collectives.topology.device)
            norm = self.norm_of(shards, anywhere)
            if not (touched if anywhere is None else anywhere.item()):
                self._measured = Measured(norm, shards, self.runtime.micro_steps)
                return norm / self.scaler.scale
        self._settle()
        self.reducer.shown.begin()  # parameters whose gradients were just taken show the reduced gradient, like all others
        shards = self.reduced()
        self._average(shards)
        return self.norm_of(shards) / self.scaler.scale

    def note_clipping(self, norm: torch.Tensor) -> None:
        """Note that a script clips the waiting gradients, whose norm is ``norm`` (0-dim, without loss scale); local.

        [Note: clipped for readers] The step clips in the same pass in which it updates, and code that runs between the two would see
        gradients that are not clipped. So they are clipped when such code reads or replaces one, and then the step clips no more.
        """
        if self.settings.max_norm > 0 and type(self) is Stepper and self.groups is None:
            self._clips_by = norm
            self.reducer.shown.reads.prepare = WeakMethod(self._clip_for_readers)
            self.reducer.shown.reads.mark_all()

    @torch.no_grad()
    def _clip_for_readers(self) -> None:
        norm, self._clips_by = self._clips_by, None
        if norm is not None:
            factor = clip_factor(norm, self.settings.max_norm)
            self.reducer.shown.reads.forget_read()
            for shard in self.reduced():
                shard.mul_(factor.to(shard.device, shard.dtype))
            self._clipped = norm

    def _average(self, shards: Sequence[torch.Tensor]) -> int:
        """Average the reduced gradients over replica groups, once per step; return the number of groups, see ``StepResult.groups``."""
        if self._averaged is None:
            self._averaged = 1 if self.groups is None else self.groups.average(shards, self.settings.max_norm)
        return self._averaged

    def _settle(self) -> Agreed:
        """Agree on the coming step, and collect all gradients that it uses; collective. A second call finds nothing to do."""
        self.reducer.shown.drop_removed()
        agreed = self.agree()
        if self.trained.follow(agreed.news):
            self._record_norm_facts()
        if agreed.written:
            take_written(self.reducer, self.collectives.data, self.everyone)
        return agreed

    def reduced(self) -> list[torch.Tensor]:
        """Return the reduced gradients of the trained units, in their order, ready to be read."""
        self.reducer.shown.reads.fold()
        with span("finish_reduce"):
            shards = [self._gradients[id(unit)].reduced() for unit in trained_of(self.optimizer.units)]
        self.optimizer.state_store.halt()
        return shards

    def take(self, watch: StepWatch | None = None) -> StepResult:
        """Take one step with the gradients accumulated so far and the gradients that the script has written; collective.

        Args:
            watch: Decides whether the update is skipped, because the step is a spike.

        Raises:
            StateError: On every rank, if ranks have begun different numbers of micro-steps or have different hyper-parameters, if a
                parameter without a gradient must have one, or if gradients were written that cannot be used; nothing has changed then.
        """
        before, agreed = trained_of(self.optimizer.units), self._settle()
        if self.settings.wants_all:
            require_all(self.reducer.gradients, self.collectives.data, self._model.collectives if self._model is not None else None)
        shards = self.reduced()
        if self._is_first:
            self._is_first = False
            gradients = [self._gradients[id(unit)] for unit in trained_of(self.optimizer.units)]
            warn_of_decay(gradients, shards, self.optimizer.param_groups, self.trained.resting)
        groups, self._averaged = self._average(shards), None
        if not groups:
            return StepResult(torch.tensor(math.nan), False, signal=agreed.signal, groups=0)
        with span("norm"):
            loss = watch.loss_message(self.collectives.topology.device) if watch is not None else None
            if self._measured is None or loss is not None or agreed.changed or trained_of(self.optimizer.units) != before:
                scaled_norm = self.norm_of(shards, loss)
            else:
                scaled_norm = self._measured.norm
            self._measured = None
        self.equal.end()
        clipped, self._clips_by, self._clipped = self._clipped, None, None
        finite = torch.isfinite(scaled_norm) if self.settings.skips_overflow else None
        late = watch is None and not agreed.reads and all(shard.dtype == torch.float32 for shard in shards)
        flag = finite if late else None
        overflow = finite is not None and flag is None and not bool(finite)
        norm = torch.full_like(scaled_norm, math.inf) if overflow else scaled_norm / self.scaler.scale
        keeps = self.keeps and self.reducer.exchange.reduces and self.everyone is self.collectives.data
        skipped, counts = overflow, [shard._version for shard in shards] if keeps else []
        factor: torch.Tensor | None = None
        if watch is not None and not overflow and watch.skips(norm, loss, self.everyone.world):
            skipped = True
        elif not overflow:
            factor, taken = self._update(shards, norm, 0.0 if clipped is not None else self.settings.max_norm, flag)
            overflow = skipped = not taken
            norm = torch.full_like(norm, math.inf) if overflow else norm if clipped is None else clipped
        culprit = self.name_of_non_finite(shards) if overflow else ""
        self.optimizer.overflow, self.optimizer.norm = skipped, norm
        if not skipped:
            self.optimizer.end_step()
        self.reducer.clear(shows=keeps)
        self.buffers.send(agreed.buffers)
        if keeps:
            pending = torch.tensor(1.0 / self.scaler.scale, dtype=torch.float32) if factor is None else factor
            unscaled = [None if shard._version != count else pending for shard, count in zip(shards, counts, strict=True)]
            self.reducer.shown.reads.keep(zip(trained_of(self.optimizer.units), shards, unscaled, strict=True))
        if overflow:
            log_rank0("step skipped: the gradient of %s is not finite at loss scale %g", culprit, self.scaler.scale)
        scale = self.scaler.scale
        self.scaler.update(overflow)
        self.reducer.exchange.stepped(skipped, self.scaler.scale / scale)
        return StepResult(norm, skipped, culprit, agreed.signal, groups)

    @property
    def _may_skip_late(self) -> bool:
        """Return whether steps can be skipped on the device at all; the same on every rank."""
        return self.settings.skips_overflow and self.collectives.topology.device.type not in _READ_AT_ONCE

    def _can_skip_late(self) -> bool:
        """Return whether an update can find out on the device that the gradients are not finite; local.

        [Note: skipping on the device] Such a step is skipped. If the host had to know this before it launches the update, the device would
        be idle from the norm to the launch. torch's fused Adam takes a flag by which its kernel changes nothing, so the host launches the
        update and then reads whether the norm was finite. Hooks on a step run only if it is taken: with hooks the host waits. All ranks
        decide alike, because they drop the same copies of weights.
        """
        if not self._may_skip_late or type(self) is not Stepper or self.optimizer._optimizer_step_pre_hooks:
            return False
        return self.optimizer.own.steps_itself() and self.optimizer.state_store.can_skip()

    def _update(
        self, shards: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float, flag: torch.Tensor | None
    ) -> tuple[torch.Tensor, bool]:
        """Clip, update and spread; collective.

        Args:
            shards: The reduced gradients.
            norm: Their norm without loss scale.
            max_norm: Norm to clip to; 0 does not clip.
            flag: Whether the norm is finite, 0-dim, if the device decides on it, see [Note: skipping on the device]; None always updates.

        Returns:
            The factor of the gradients, 0-dim, and whether the update was taken, the same on every rank.
        """
        with span("clip"):
            factor = clip_factor(norm, max_norm) / self.scaler.scale
            if flag is not None and factor.device == flag.device:  # gradients of a step that is skipped are not clipped
                factor = torch.where(flag, factor, 1.0 / self.scaler.scale)
        spreads: list[Pending | None] = []
        with span("update"):
            self._prepare_update()
            if flag is None:
                self.optimizer.update(shards, factor, lambda unit: spreads.append(all_gather_updated(unit)))
            else:
                finite, updated = Arriving(flag), list[Unit]()
                with self.optimizer.state_store.updates_only_if(flag):
                    self.optimizer.update(shards, factor, updated.append)
                if not finite.read():  # the device is busy with the update while the host waits
                    return factor, False
                publish(updated)
                spreads += [all_gather_updated(unit) for unit in updated]
        self._spread(spreads)
        return factor, True

    def _prepare_update(self) -> None:
        """Reshard unsharded units, because masters are about to change."""
        self.runtime.reshard_for_update()
        for unit in trained_of(self.optimizer.units):
            unit.derived.forget()  # an update that continues after the step does not notify it

    def _spread(self, spreads: Sequence[Pending | None]) -> None:
        """Wait for the all-gathers of updated shards."""
        with span("spread"):
            for spread in spreads:
                if spread is not None:
                    spread.wait()
            agree_on_scales(self._coded)

    @torch.no_grad()
    def change_masters(self, change: Callable[[], object]) -> None:
        """Call ``change``, a method of the optimizer that writes to masters (``eval`` of schedule-free ones), and show the new values.

        Collective.

        Raises:
            StateError: Masters are in files.
        """
        if self.optimizer.state_store.in_files:
            raise StateError(
                "the optimizer changes weights outside of step(), but they are in files: set offload_optimizer.device to 'cpu' or 'none'"
            )
        for unit in self.runtime.units():
            adopt_writes(unit, self.runtime.idle)
        self.optimizer.state_store.settle()
        spreads: list[Pending | None] = []
        self._prepare_update()
        self.optimizer.own.write(change, lambda unit: spreads.append(all_gather_updated(unit)))
        self._spread(spreads)


@dataclass(frozen=True)
class StepKind:
    """Parts of a step that an optimizer may replace by its own.

    Attributes:
        stepper: Class of the step.
        exchange: Constructs the exchange of gradients.
        max_norm: Returns the norm to clip to, from ``gradient_clipping``.
        sends: Name of the optimizer if it sends gradients in its own form; "" otherwise.
    """

    stepper: type[Stepper] = Stepper
    exchange: Callable[[Collectives, GradientPolicy], GradientExchange] = GradientExchange
    max_norm: Callable[[float], float] = float
    sends: str = ""
