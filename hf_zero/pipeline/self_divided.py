"""Models that say themselves who runs what, and of which each rank has built its own part."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.config.schema.parallel import Pipeline
from hf_zero.core.units.tp_shard import whole_shape
from hf_zero.errors import ConfigError
from hf_zero.pipeline.plan import PipelinePlan
from hf_zero.pipeline.schedules import SINGLE


@runtime_checkable
class DividesItself(Protocol):
    """A model that knows its stages, one on each rank, and runs them itself."""

    def pipeline_plan(self) -> PipelinePlan:
        """Who holds what."""


def schedule_of(settings: Pipeline) -> str:
    """The schedule that the configuration's ``pipeline`` names.

    Raises:
        ConfigError: It is one for several stages on each rank, or such are asked for.
    """
    name, each = settings.schedule, settings.stages_per_rank
    if name not in SINGLE or each != 1:
        raise ConfigError(
            f"pipeline.schedule {name} with pipeline.stages_per_rank {each}: a PipelineModule has one stage on each rank; "
            f"{' and '.join(SINGLE)} with 1 are allowed"
        )
    return name


def equal_where_shared(model: nn.Module, plan: PipelinePlan, pipe: Collectives) -> None:
    """Parameters that several stages hold get the values of the first of them; collective over the stages."""
    for name, param in model.named_parameters():
        holders = plan.holders[name]
        if len(holders) == 1:
            continue
        whole = whole_shape(param) or param.shape
        values = param.data if pipe.rank in holders else torch.empty(whole, dtype=param.dtype)
        values = values.to(pipe.topology.device).contiguous()
        pipe.broadcast(values, holders[0], name)
        if pipe.rank in holders:
            param.data.copy_(values)
