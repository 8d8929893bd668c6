"""The schedules of ``torch.distributed.pipelining`` over the stages of this rank: in which order forwards and backwards run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from hf_zero.comm.collectives import Collectives
from hf_zero.errors import CollectiveError, ConfigError
from hf_zero.pipeline.plan import Placement
from hf_zero.pipeline.scheduled import ScheduledStage, StageWork

SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
FOLDED = ("ZBVZeroBubble", "DualPipeV")
SINGLE = ("1F1B", "GPipe")
_WITH_FEW = "GPipe"  # which takes fewer parts than there are stages


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
class _Order:
    """A schedule of torch for some number of parts, with the stages that it runs."""

    schedule: Any
    stages: list[ScheduledStage]


class Scheduler:
    """Runs the parts of a batch through the stages in the order of a schedule; collective over the pipeline.

    With 1F1B (arXiv 2104.04473) a stage keeps activations of no more parts than there are stages behind it; with fewer parts than stages,
    which it does not take, GPipe runs. Gradients are added up in the order of the parts in both.

    Args:
        placement: Who runs which stage.
        pipe: The ranks.
        name: One of ``SCHEDULES``.
    """

    def __init__(self, placement: Placement, pipe: Collectives, name: str) -> None:
        self._placement = placement
        self._pipe = pipe
        self._name = name
        self._orders: dict[tuple[str, int], _Order] = {}  # one is found once: that of many parts takes time

    def train(self, works: Mapping[int, StageWork], parts: int, scale: float = 1.0) -> None:
        """Forward and backward of all ``parts``; gradients come into ``param.grad``, or where hooks of parameters take them.

        Args:
            works: What each stage of this rank does.
            parts: How many.
            scale: Factor of the gradient of each part's loss.

        Raises:
            ConfigError: The schedule wants more parts.
        """
        few = self._name == "1F1B" and parts < self._placement.stages
        self._run(_WITH_FEW if few else self._name, works, parts, True, scale)

    def look(self, works: Mapping[int, StageWork], parts: int) -> None:
        """Forward of all ``parts`` alone, one stage on each rank."""
        self._run(_WITH_FEW, works, parts, False, 1.0)

    def _run(self, name: str, works: Mapping[int, StageWork], parts: int, trains: bool, scale: float) -> None:
        order = self._orders.pop((name, parts), None) or self._order(name, parts)  # one that an error has interrupted is not used again
        for stage in order.stages:
            stage.work, stage.scale = works[stage.stage_index], scale
        numbers = torch.arange(parts)
        run = order.schedule.step if trains else order.schedule.eval
        try:
            self._pipe.launch(f"schedule {name}", lambda: run(target=numbers))
        except CollectiveError:
            failed = next((stage.failed for stage in order.stages if stage.failed is not None), None)
            if failed is not None:
                raise failed from None
            raise
        for stage in order.stages:
            stage.clear_runtime_states()
            stage.work = None
        self._orders[name, parts] = order

    def _order(self, name: str, parts: int) -> _Order:
        stages = [ScheduledStage(index, self._placement, self._pipe.topology) for index in self._placement.stages_of(self._pipe.rank)]
        kind: Any = get_schedule_class(name)
        # The loss is the work's own; torch computes one of the output where it is given a function, and wants a target for it.
        loss = {"loss_fn": lambda output, target: output, "scale_grads": False}
        try:
            return _Order(kind(stages if issubclass(kind, PipelineScheduleMulti) else stages[0], parts, **loss), stages)
        except ValueError as error:  # too few parts for the order
            raise ConfigError(f"pipeline.schedule {name} of {parts} part(s), which are gradient_accumulation_steps: {error}") from None
