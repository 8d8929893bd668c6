"""Forwards and backwards of several parts of a batch in the order of one of torch's schedules.

The schedules, and what is sent when, are ``torch.distributed.pipelining``'s; each of its stages is a module whose forward is the model's
own, as ``own_stages`` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from hf_zero.comm.collectives import Collectives
from hf_zero.errors import ConfigError, StateError, UnsupportedError
from hf_zero.pipeline.micro_batches import loss_of
from hf_zero.pipeline.own_stages import OwnStages
from hf_zero.pipeline.plan import PipelinePlan
from hf_zero.pipeline.trees import without_values

SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble")
FOLDED = ("ZBVZeroBubble",)
SINGLE = ("1F1B", "GPipe")


def check_schedule(name: str, stages_each: int) -> None:
    """Refuses a schedule that is none, or that wants another number of stages on each rank.

    Raises:
        ConfigError: With those that would fit.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"pipeline.schedule is {name!r}; {', '.join(SCHEDULES)} are allowed")
    if name in SINGLE and stages_each != 1:
        raise ConfigError(
            f"pipeline.schedule {name} has one stage on each rank, and pipeline.stages_per_rank is {stages_each}: set that to 1, or take "
            f"{', '.join(other for other in SCHEDULES if other not in SINGLE)}"
        )
    if name in FOLDED and stages_each != 2:
        raise ConfigError(f"pipeline.schedule {name} has two stages on each rank; set pipeline.stages_per_rank to 2, it is {stages_each}")


@dataclass(frozen=True)
class Work:
    """What one step of a schedule computes.

    Attributes:
        plan: For calls of this kind.
        forward: The model's own.
        parts: Arguments of each part.
        scale: Of each part's loss before backward.
    """

    plan: PipelinePlan
    forward: Callable[..., Any]
    parts: Sequence[Mapping[str, Any]]
    scale: float


@dataclass
class _Now:
    """What the modules of a kept schedule run in this step."""

    work: Work
    losses: list[torch.Tensor]


class _StageModule(nn.Module):
    """One stage as torch's schedules call it: with what came over the border, and the number of the part."""

    def __init__(self, own: OwnStages, index: int, now: _Now) -> None:
        super().__init__()
        self._own_stages = [own]  # in a list: no submodule
        self._index = index
        self._now = now

    def forward(self, *received: torch.Tensor, part: torch.Tensor) -> Any:
        work, waiting = self._now.work, iter(received)
        kwargs = work.parts[int(part)]
        run = self._own_stages[0].run(work.plan, self._index, lambda metas: [next(waiting) for _ in metas], work.forward, kwargs)
        if self._index < work.plan.stages - 1:
            return tuple(run.sent)
        loss = loss_of(run.result)
        if loss is None:
            raise UnsupportedError("pipeline: train_batch needs a model that returns its loss: give it labels, or a loss_fn")
        self._now.losses.append(loss.detach())
        return loss.float() * work.scale

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Of the whole model; other ranks' are empty, and no graph of this one has them."""
        return self._own_stages[0].model.parameters(recurse)


@dataclass(frozen=True)
class _Kept:
    """A schedule of torch, and what it is for.

    [Note: kept schedules] A new schedule votes over the pipeline, allocates what it receives into, and needs the shapes at the borders, for
    which the model's code runs. So the last one is kept, while batches are of its kind.
    """

    plan: PipelinePlan
    key: str
    now: _Now
    stages: list[PipelineStage]
    schedule: Any


class ScheduledSteps:
    """Runs the parts of a batch forward and backward in the order of a schedule.

    Args:
        own: This rank's stages.
        pipe: The ranks of the pipeline.
        name: One of ``SCHEDULES``.
    """

    def __init__(self, own: OwnStages, pipe: Collectives, name: str) -> None:
        self._own = own
        self._pipe = pipe
        self._name = name
        self._kept: _Kept | None = None

    def step(self, work: Work) -> list[torch.Tensor]:
        """Computes all gradients into ``param.grad``, or where hooks of parameters take them; collective over the pipeline.

        Returns:
            The loss of each part, without the scale, where the last stage is; [] elsewhere.
        """
        own, count = self._own, len(work.parts)
        kept, self._kept = self._kept_for(work), None  # one that an error has interrupted is not used again
        losses = kept.now.losses = []
        kept.now.work = work
        numbers = torch.arange(count)
        first = own.placement.rank_of(0) == own.rank
        ends_here = own.placement.rank_of(work.plan.stages - 1) == own.rank
        target = numbers if ends_here else None
        self._pipe.launch(
            f"schedule {self._name}",
            lambda: kept.schedule.step(*((numbers,) if first else ()), target=target, part=numbers, return_outputs=False),
        )
        for stage in kept.stages:
            stage.clear_runtime_states()  # gradients of what was received: not beside the optimizer's step
        kept.now.work, kept.now.losses = replace(work, parts=()), []
        self._kept = kept
        return losses

    def _kept_for(self, work: Work) -> _Kept:
        """The schedule of the step before, if this work is of its kind, else a new one: the same decision on every rank."""
        key = _key(work)
        kept = self._kept
        if kept is not None and kept.plan is work.plan and kept.key == key:
            return kept
        own, now = self._own, _Now(work, [])
        shapes = _Shapes(own, work)
        stages = [
            PipelineStage(
                _StageModule(own, index, now),
                index,
                work.plan.stages,
                own.device,
                input_args=shapes.given(index),
                output_args=shapes.made(index),
                group=self._pipe.topology.group,
            )
            for index in own.placement.stages_of(own.rank)
        ]
        kind = get_schedule_class(self._name)
        several = issubclass(kind, PipelineScheduleMulti)
        schedule = kind(stages if several else stages[0], n_microbatches=len(work.parts), loss_fn=_own_loss, scale_grads=False)
        return _Kept(work.plan, key, now, stages, schedule)


def _key(work: Work) -> str:
    """What shapes and types at the borders depend on, beside the plan: those of the arguments, and autocast."""
    device = next((value.device.type for value in work.parts[0].values() if isinstance(value, torch.Tensor)), "cpu")
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    tensors = sorted(
        (name, tuple(value.shape), str(value.dtype)) for name, value in work.parts[0].items() if isinstance(value, torch.Tensor)
    )
    return repr((len(work.parts), tensors, autocast))


def _own_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output


class _Shapes:
    """What goes over each border next to this rank's stages, without values: found by forwards that run no item of this rank."""

    def __init__(self, own: OwnStages, work: Work) -> None:
        self._own = own
        self._work = work
        self._over: dict[int, tuple[torch.Tensor, ...]] = {}

    def given(self, index: int) -> tuple[torch.Tensor, ...]:
        """Arguments of a stage as torch counts them: the number of the part for the first, else what comes over the border."""
        return (torch.empty(1, dtype=torch.long, device="meta"),) if index == 0 else self._border(index - 1)

    def made(self, index: int) -> tuple[torch.Tensor, ...]:
        """Results of a stage: what goes over the border, or the loss."""
        if index == self._work.plan.stages - 1:
            return (torch.empty((), device="meta", requires_grad=True),)
        return self._border(index)

    def _border(self, border: int) -> tuple[torch.Tensor, ...]:
        if border not in self._over:
            found: list[torch.Tensor] = []

            def note(metas: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                found.extend(without_values(meta).requires_grad_(meta.is_floating_point()) for meta in metas)
                return [torch.zeros(meta.shape, dtype=meta.dtype, device=self._own.device) for meta in metas]

            with torch.no_grad():
                self._own.look(self._work.plan, border + 1, note, self._work.forward, self._work.parts[0])
            if len(found) != len(self._work.plan.crossings[border]):
                raise StateError(f"pipeline: {len(found)} of the {len(self._work.plan.crossings[border])} tensors of a border were seen")
            self._over[border] = tuple(found)
        return self._over[border]
