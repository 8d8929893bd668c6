"""A whole plan: of one rank where ranks are alike, of one rank of each sort of stage where there is a pipeline."""

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
from hf_zero.plan.few_blocks import sign_of
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
    """What a configuration will take.

    [Note: stages of a plan] The stages of a pipeline hold different layers, so one rank of each is planned, in a world of its own, the
    last one first: what it tells the others (the shape of the model's result) is what they hear. What they send each other are
    tensors, of which a plan needs shapes alone. Stages between the first and the last that run alike calls of alike blocks do alike
    things: of those one is planned.

    Args:
        model: On the meta device.
        config: The DeepSpeed configuration.
        cluster: The ranks.
        load: What they train on.
        hardware: What there is.
        attention: As ``observe_step`` has it.
        last: Of a pipeline its last stage alone, which takes no more than the largest and no longer than the slowest.

    Raises:
        ConfigError: The engine refuses the configuration.
        UnsupportedError: The model does what needs values.
    """
    stages = requested_stages(config)
    if stages == 1:
        return predict([observe_step(model, config, cluster, load, attention)], cluster, hardware)
    if cluster.ranks % stages:
        raise ConfigError(f"pipeline.stages is {stages}, which does not divide the {cluster.ranks} ranks of --ranks")
    told: Told = {}
    seen: list[Observation] = []
    known: dict[str, Observation] = {}
    for stage in reversed(range(stages)):
        pipeline = seen[0].pipeline if seen else None
        sign = _sign(model, pipeline, stage) if pipeline is not None else ""
        if sign not in known:
            own = replace(model, module=copy.deepcopy(model.module))  # an engine changes the module it is made of
            known[sign] = observe_step(own, config, cluster, load, attention, stage * (cluster.ranks // stages), told)
        seen.append(known[sign])
        if last:
            break
    return predict(seen[::-1], cluster, hardware)


def _sign(model: PlannedModel, pipeline: Pipeline, rank: int) -> str:
    """All that says what a rank of a pipeline computes, holds, sends and receives, but its number."""
    return repr([_sign_of_stage(model, pipeline, stage) for stage in pipeline.placement.stages_of(rank)])


def _sign_of_stage(model: PlannedModel, pipeline: Pipeline, stage: int) -> list[Any]:
    plan, span = pipeline.plan, pipeline.plan.span(stage)
    calls = [plan.calls[place] for place in span]
    numbers = [next((int(part) for part in reversed(call.path.split(".")) if part.isdigit()), -1) for call in calls]
    run = [sign_of(model.module.get_submodule(call.path), number) for call, number in zip(calls, numbers, strict=True)]
    params = dict(model.module.named_parameters(remove_duplicate=False))
    held = [(tuple(params[name].shape), params[name].requires_grad) for name, stages in plan.holders.items() if stage in stages]
    tied = [stages for stages in plan.holders.values() if stage in stages and len(stages) > 1]
    borders = [_from(plan.crossings[border], span.start) for border in (stage - 1, stage) if 0 <= border < plan.stages - 1]
    ends = stage == 0, stage == plan.stages - 1
    return [run, held, tied, borders, _from(plan.changed, span.start), ends]


def _from(crossings: tuple[Crossing, ...], start: int) -> list[tuple[int, int]]:
    return [(crossing.call - start, crossing.leaf) for crossing in crossings]
