"""Models that say themselves who runs what, and of which each rank has built its own part."""

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
        """Return the plan that assigns layers to stages."""


def schedule_of(settings: Pipeline) -> str:
    """Return the schedule that the configuration's ``pipeline`` names.

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


def equal_where_shared(model: nn.Module, held_by: Mapping[str, tuple[int, ...]], pipe: Collectives) -> None:
    """Give parameters that several ranks of a pipeline hold the values of the first of these ranks; collective over the pipeline.

    Args:
        model: Its parameters are whole on the ranks that hold them.
        held_by: Name -> these ranks, rising.
        pipe: The ranks.
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
