"""Plan one configuration: one rank if all ranks are alike, or one rank for each different stage of a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_zero.config.mesh import requested_stages
from hf_zero.errors import ConfigError
from hf_zero.pipeline.apply import Pipeline
from hf_zero.pipeline.plan import Crossing
from hf_zero.plan.cluster import Cluster, Hardware, Load
from hf_zero.plan.few_blocks import fingerprint_of
from hf_zero.plan.models import PlannedModel
from hf_zero.plan.prediction import Prediction, predict
from hf_zero.plan.run import Observation, observe_step
from hf_zero.system.planning import Told


def plan_step(
    model: PlannedModel,
    config: Mapping[str, Any],
    cluster: Cluster,
    load: Load,
    hardware: Hardware,
    attention: str = "sdpa",
    last: bool = False,
) -> Prediction:
    """Return the prediction for one configuration.

    [Note: stages of a plan] The stages of a pipeline hold different layers, so one rank of each stage is planned, each in its own world.
    The last stage is first: the messages that it sends (the shape of the model's result) are kept for the other stages. Activations
    between stages need only shapes in a plan. Inner stages that run equal calls of equal blocks behave the same; one of them is planned.

    Args:
        model: The model, on the meta device.
        config: The DeepSpeed configuration.
        cluster: Number and place of the ranks.
        load: Shape of the batch of one rank.
        hardware: Limits and rates of the hardware.
        attention: Attention kernel, see ``observe_step``.
        last: Whether to plan only the last stage of a pipeline, whose memory and time are lower bounds.

    Raises:
        ConfigError: The engine refuses the configuration.
        UnsupportedError: The model cannot run on fake tensors.
    """
    stages = requested_stages(config)
    if stages == 1:
        return predict([observe_step(model, config, cluster, load, attention)], cluster, hardware)
    if cluster.ranks % stages:
        raise ConfigError(f"pipeline.stages is {stages}, which does not divide the {cluster.ranks} ranks of --ranks")
    messages: Told = {}
    seen: list[Observation] = []
    known: dict[str, Observation] = {}
    for stage in reversed(range(stages)):
        pipeline = seen[0].pipeline if seen else None
        fingerprint = _fingerprint(model, pipeline, stage) if pipeline is not None else ""
        if fingerprint not in known:
            own = replace(model, module=copy.deepcopy(model.module))  # an engine changes its module
            known[fingerprint] = observe_step(own, config, cluster, load, attention, stage * (cluster.ranks // stages), messages)
        seen.append(known[fingerprint])
        if last:
            break
    return predict(seen[::-1], cluster, hardware)


def _fingerprint(model: PlannedModel, pipeline: Pipeline, rank: int) -> str:
    """Return a text that is equal for ranks of a pipeline with the same computation, memory and traffic."""
    return repr([_fingerprint_of_stage(model, pipeline, stage) for stage in pipeline.placement.stages_of(rank)])


def _fingerprint_of_stage(model: PlannedModel, pipeline: Pipeline, stage: int) -> list[Any]:
    plan, span = pipeline.plan, pipeline.plan.span(stage)
    calls = [plan.calls[place] for place in span]
    numbers = [next((int(part) for part in reversed(call.path.split(".")) if part.isdigit()), -1) for call in calls]
    run = [fingerprint_of(model.module.get_submodule(call.path), number) for call, number in zip(calls, numbers, strict=True)]
    params = dict(model.module.named_parameters(remove_duplicate=False))
    held = [(tuple(params[name].shape), params[name].requires_grad) for name, stages in plan.holders.items() if stage in stages]
    tied = [stages for stages in plan.holders.values() if stage in stages and len(stages) > 1]
    borders = [_relative(plan.crossings[border], span.start) for border in (stage - 1, stage) if 0 <= border < plan.stages - 1]
    ends = stage == 0, stage == plan.stages - 1
    return [run, held, tied, borders, _relative(plan.changed, span.start), ends]


def _relative(crossings: tuple[Crossing, ...], start: int) -> list[tuple[int, int]]:
    return [(crossing.call - start, crossing.leaf) for crossing in crossings]
