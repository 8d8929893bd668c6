"""Buffers of a model that is divided over stages: each stage changes those of its own modules."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hf_zero.pipeline.apply import DividesItself, pipeline_of
from hf_zero.pipeline.forward import pipelined
from hf_zero.pipeline.trial import persistent_names


def share_buffers(model: nn.Module, averages: Mapping[str, torch.Tensor] | None = None) -> None:
    """Copy persistent buffers (running statistics) to every stage from the first stage that runs their module; collective.

    A buffer of the glue between items stays as it is: every stage computes it. Nothing is done for a model that is not divided, or that
    divides itself.

    Args:
        model: A model; on other stages than its own, a buffer has the shape that it has on its stage.
        averages: Averages of buffers, by name, which are shared in place of the buffers.
    """
    pipeline, forward = pipeline_of(model), pipelined(model)
    if pipeline is None or forward is None or isinstance(model, DividesItself):
        return
    stages: dict[str, int] = {}
    for call in pipeline.plan.calls:
        stages.setdefault(call.path, call.stage)
    for name, buffer in (_persistent(model) if averages is None else averages).items():
        path = max((path for path in stages if name.startswith(f"{path}.")), key=len, default=None)
        if path is not None:
            forward.send_to_all(buffer, pipeline.placement.rank_of(stages[path]), name)


def _persistent(model: nn.Module) -> dict[str, torch.Tensor]:
    kept = {f"{path}.{name}".lstrip(".") for path, module in model.named_modules() for name in persistent_names(module)}
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}
