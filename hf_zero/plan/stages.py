"""A whole plan: of one rank where ranks are alike, of one rank of each stage where there is a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_zero.config.mesh import requested_stages
from hf_zero.errors import ConfigError
from hf_zero.plan.cluster import Cluster, Load
from hf_zero.plan.models import PlannedModel
from hf_zero.plan.prediction import Hardware, Prediction, predict
from hf_zero.plan.run import observe_step
from hf_zero.system.planning import Told


def plan_step(
    model: PlannedModel, config: Mapping[str, Any], cluster: Cluster, load: Load, hardware: Hardware, attention: str = "sdpa"
) -> Prediction:
    """What a configuration will take.

    [Note: stages of a plan] The stages of a pipeline hold different layers, so one rank of each is planned, in a world of its own, the
    last one first: what it tells the others (the shape of the model's result) is what they hear. What they send each other are
    tensors, of which a plan needs shapes alone.

    Args:
        model: On the meta device.
        config: The DeepSpeed configuration.
        cluster: The ranks.
        load: What they train on.
        hardware: What there is.
        attention: As ``observe_step`` has it.

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
    seen = []
    for stage in reversed(range(stages)):
        own = replace(model, module=copy.deepcopy(model.module))  # an engine changes the module it is made of
        seen.append(observe_step(own, config, cluster, load, attention, stage * (cluster.ranks // stages), told))
    return predict(seen[::-1], cluster, hardware)
