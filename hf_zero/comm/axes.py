"""Create the axes of ranks beside data parallelism: pipeline stages, experts, and the groups of a script's ``mpu`` object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from hf_zero.comm.bootstrap import init_distributed
from hf_zero.comm.process_groups import Lines, default_device, divide_twice, lines_of_all
from hf_zero.comm.topology import Topology, all_ranks, axis_over, join_topologies, lines_of, record_newest, require_divisor


def divide_stages(stages: int, tensor: int = 1) -> Topology:
    """Return the axes of all ranks where ``stages`` x ``tensor`` of them hold one model together; collective.

    The stage is the outermost axis, the tensor-parallel axis the innermost, as in DeepSpeed's ``PipeModelDataParallelTopology`` and
    transformers' ``DistributedConfig``: rank = (stage x data + position on the data-parallel axis) x tensor + position among the ranks that
    hold a layer.

    Args:
        stages: Number of stages of the pipeline, at least 2.
        tensor: Ranks that hold one layer together.

    Raises:
        ConfigError: ``stages * tensor`` does not divide the number of ranks.
    """
    init_distributed()
    everyone, ranks, device = all_ranks(), dist.get_world_size(), default_device()
    require_divisor(stages * tensor, ranks, "pipeline.stages" + (" x tensor_parallel.autotp_size" if tensor > 1 else ""))
    data = ranks // (stages * tensor)
    rank_of = [[[(stage * data + place) * tensor + part for part in range(tensor)] for place in range(data)] for stage in range(stages)]
    alike = [[line[part] for line in rank_of[stage]] for stage in range(stages) for part in range(tensor)]
    together = [[rank for stage in range(stages) for rank in rank_of[stage][place]] for place in range(data)]
    through = [[rank_of[stage][place][part] for stage in range(stages)] for place in range(data) for part in range(tensor)]
    layers = [rank_of[stage][place] for stage in range(stages) for place in range(data)]
    found = join_topologies(*divide_twice(everyone, ("pipeline", stages, tensor), alike, together, device), device)
    pipe, tensors = divide_twice(everyone, ("stages", stages, tensor), through, layers, device)
    return record_newest("model", replace(found, pipe=axis_over(pipe, device), tensor=axis_over(tensors, device) if tensor > 1 else None))


def stages_together(topology: Topology, stages: Sequence[int]) -> Topology:
    """Return the ranks of some ``stages`` on the pipe axis through this rank, each with the replicas of its shards; collective over all
    ranks.

    Args:
        topology: Axes, including the axis of a pipeline.
        stages: Sorted stages, this rank's stage among them; or else the result is this rank with its replicas alone.
    """
    pipe, replicas = topology.pipe, topology.replicate
    assert pipe is not None
    size = dist.get_world_size() // pipe.world
    places = [[place] for place in range(size)] if replicas is None else [line for line in lines_of_all(replicas.ranks) if line[0] < size]
    lines = [[stage * size + place for stage in stages for place in line] for line in places]
    alone = [[stage * size + place for place in line] for stage in range(pipe.world) if stage not in stages for line in places]
    key = "together", tuple(stages), len(places)
    group, _ = divide_twice(all_ranks(), key, [*lines, *alone], [*lines, *alone], topology.device)
    return axis_over(group, topology.device)


def divide_experts(topology: Topology, size: int, key: str = "expert_parallel.autoep_size") -> Topology:
    """Return ``topology`` with its two axes of experts: ``size`` adjacent ranks hold all experts together; collective.

    Where several ranks hold each layer together, all of them are among the ``size`` ranks: they hold different experts, so that the ranks
    with the same experts are on one data-parallel axis. With shard groups, each group has all experts; in a pipeline, the ranks of each
    stage have all experts of its layers.

    Args:
        topology: The axis that parameters are sharded over.
        size: Ranks that share the experts; 1 leaves ``topology`` as it is.
        key: Name of the setting that requests it, for messages.

    Raises:
        ConfigError: ``size`` does not divide the ranks of the axis and the ranks that hold layers together with them.
    """
    layers = topology.layers.model
    tensor = layers.world if layers is not None else 1
    require_divisor(size, topology.world * tensor, key, "ranks that parameters are sharded over")
    if size == 1:
        return topology
    require_divisor(tensor, size, "tensor_parallel.autotp_size", f"ranks of {key}")
    joint = divide_experts(topology.joint, size, key) if topology.joint is not None else None
    lines, places = lines_of(topology), size // tensor
    alike = [line[place::places] for line in lines for place in range(places)]
    together = _together(layers, lines, places)
    holders, sharers = divide_twice(topology.group, ("expert", size), alike, together, topology.device)
    expert = axis_over(sharers, topology.device)
    replicate = replace(topology.replicate, joint=joint) if topology.replicate is not None else None
    same = replace(
        axis_over(holders, topology.device),
        model=topology.model,
        pipe=topology.pipe,
        tensor=topology.tensor,
        expert=expert,
        replicate=replicate,
        joint=joint.expert_data if joint is not None else None,
    )
    parts = _in_all_stages(topology, topology.pipe, size, together) if topology.pipe is not None else None
    return replace(topology, expert=expert, expert_data=same, replicate=replicate, joint=joint, parts=parts)


def _in_all_stages(topology: Topology, pipe: Topology, size: int, together: Lines) -> Topology:
    """Return the ranks that hold one model with all of its experts, stage by stage; collective."""
    stages = {line[0]: line for line in lines_of_all(pipe.ranks)}
    lines = [[stages[rank][stage] for stage in range(pipe.world) for rank in line] for line in together if line[0] in stages]
    return axis_over(divide_twice(topology.group, ("experts of all stages", size), lines, lines, topology.device)[0], topology.device)


def _together(layers: Topology | None, lines: Lines, places: int) -> list[tuple[int, ...]]:
    """Return the ranks that hold all experts: ``places`` neighbours of an axis, each with the ranks that hold layers
    with it; collective.
    """
    beside = {rank: line for line in lines_of_all(layers.ranks) for rank in line} if layers is not None else {}
    runs = [line[start : start + places] for line in lines for start in range(0, len(line), places)]
    return list(dict.fromkeys(tuple(found for rank in run for found in beside.get(rank, [rank])) for run in runs))


MODEL_GROUPS = ("get_tensor_model_parallel_group", "get_model_parallel_group")


def model_parallel_group(mpu: Any) -> dist.ProcessGroup | None:
    """Return the group of the ranks that hold one model together with this one; None if ``mpu`` is None, names no such group, or a group
    of one rank.
    """
    for name in MODEL_GROUPS:
        if hasattr(mpu, name):
            count = getattr(mpu, name.replace("group", "world_size"), None)
            return None if count is not None and count() == 1 else getattr(mpu, name)()
    return None
