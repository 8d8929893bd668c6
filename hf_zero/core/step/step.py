"""One optimizer step, as a straight list of phases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.schedule.reducer import Reducer
from hf_zero.core.schedule.runtime import Runtime
from hf_zero.core.stages import StagePolicy
from hf_zero.core.step.grad_norm import clip_factor, first_non_finite, global_norm, model_axis
from hf_zero.core.step.loss_scale import LossScaler
from hf_zero.core.step.same_pace import require_same_pace
from hf_zero.core.step.written_gradients import have_written, take_written
from hf_zero.core.units.values import all_gather_updated, write_back_assigned
from hf_zero.errors import StateError
from hf_zero.observe import log_rank0, span


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
    """What a step did: the norm before clipping (0-dim tensor, unscaled), and whether it was skipped (norm inf) and for which parameter."""

    norm: torch.Tensor
    skipped: bool
    culprit: str = ""


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
    ) -> None:
        self.runtime = runtime
        self.reducer = reducer
        self.optimizer = optimizer
        self.scaler = scaler
        self.collectives = collectives
        self.settings = settings
        self._model = model_axis(optimizer.units, model_collectives) if model_collectives is not None else None
        apart = expert_collectives or model_collectives  # who has parts that this rank does not have
        tensor = model_collectives.world if model_collectives is not None else 1
        self._parts = model_axis(optimizer.units, apart, tensor) if apart is not None else None
        # Both in the model's order; the reducer's own order is the model's too.
        self._gradients = {id(entry.unit): entry for entry in reducer.gradients}

    def begin_micro_step(self, boundary: bool, in_no_sync: bool, factor: float) -> None:
        """Called before each backward; decides whether its gradients are reduced in it.

        Args:
            boundary: Its gradients complete an optimizer step.
            in_no_sync: It runs inside ``no_sync()``.
            factor: What its gradients are multiplied with.
        """
        self.prepare(boundary)
        self.reducer.begin(self.settings.stage.reduces(boundary, in_no_sync), factor, completes=boundary)

    def prepare(self, boundary: bool) -> None:
        """Makes optimizer and units ready for a backward."""
        for unit in self.optimizer.units:
            write_back_assigned(unit)
        self.optimizer.state_store.expect(self.scaler.scale if boundary else None)

    def norm_of(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Norm of all gradients together, with loss scale; 0-dim, the same on every rank. Collective."""
        stage, store = self.settings.stage, self.optimizer.state_store
        return global_norm(shards, self.collectives, stage.optimizer_sharded, self._parts, store.threads)

    def culprit_of(self, shards: Sequence[torch.Tensor]) -> str:
        """Name of the first parameter with a gradient that is not finite; collective."""
        return first_non_finite(self.optimizer.units, shards, self.collectives, self._model)

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

    def agree(self) -> bool:
        """Whether the script has written gradients to ``param.grad`` itself, on any rank; collective, on the host.

        Raises:
            StateError: On every rank, if ranks have begun different numbers of micro-steps.
        """
        return require_same_pace(self.collectives.data, self.runtime.micro_steps, have_written(self.reducer))

    def take(self) -> StepResult:
        """One step over the gradients accumulated so far, and over those that the script has written; collective.

        Raises:
            StateError: On every rank, if ranks have begun different numbers of micro-steps, a parameter had no gradient and each must
                have one, or gradients were written that cannot be taken; nothing has changed then.
        """
        self.reducer.shown.drop_removed()
        if self.agree():
            take_written(self.reducer, self.collectives.data, self.settings.stage.parameters_sharded)
        if self.settings.wants_all:
            self._require_all()
        with span("finish_reduce"):
            shards = [self._gradients[id(unit)].reduced() for unit in self.optimizer.units]
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
                for unit in self.optimizer.units:
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
        return StepResult(norm, overflow, culprit)
