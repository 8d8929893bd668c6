"""Models that define their own stages (a PipelineModule), of which each rank has built only its own layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.config.schema.parallel import Pipeline
from hf_zero.core.units.tp_shard import is_elsewhere, whole_shape
from hf_zero.errors import ConfigError
from hf_zero.pipeline.plan import PipelinePlan
from hf_zero.pipeline.schedules import SINGLE


@runtime_checkable
class DividesItself(Protocol):
    """A model that knows its stages, one on each rank, and runs them itself."""

    def pipeline_plan(self) -> PipelinePlan:
        """Return the plan that assigns calls and parameters to stages."""


def schedule_of(settings: Pipeline) -> str:
    """Return the schedule that the configuration's ``pipeline`` names.

    Raises:
        ConfigError: The schedule, or ``stages_per_rank``, needs several stages on each rank.
    """
    name, each = settings.schedule, settings.stages_per_rank
    if name not in SINGLE or each != 1:
        raise ConfigError(
            f"pipeline.schedule {name} with pipeline.stages_per_rank {each}: a PipelineModule has one stage on each rank; "
            f"{' and '.join(SINGLE)} with 1 are allowed"
        )
    return name


def equal_where_shared(model: nn.Module, held_by: Mapping[str, tuple[int, ...]], pipe: Collectives) -> None:
    """Give parameters that several ranks of a pipeline hold the values of the first of these ranks; collective over the pipeline.

    Args:
        model: A model whose parameters are whole on the ranks that hold them.
        held_by: Name of each parameter -> the ranks that hold it, ascending.
        pipe: The ranks of the pipeline.
    """
    for name, param in model.named_parameters():
        holders = held_by[name]
        if len(holders) == 1:
            continue
        whole = (whole_shape(param) if is_elsewhere(param) else None) or param.shape
        values = param.data if pipe.rank in holders else torch.empty(whole, dtype=param.dtype)
        values = values.to(pipe.topology.device).contiguous()
        pipe.broadcast(values, holders[0], name)
        if pipe.rank in holders:
            param.data.copy_(values)
