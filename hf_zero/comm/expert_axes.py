"""The data-parallel axis divided by experts: who holds all experts together, and who holds the same ones."""

from __future__ import annotations

from dataclasses import replace

from hf_zero.comm.process_groups import Lines, divide_twice, lines_of_all
from hf_zero.comm.topology import Topology, axis_over, lines_of, require_divisor


def divide_experts(topology: Topology, size: int, key: str = "expert_parallel.autoep_size") -> Topology:
    """``topology`` with its two axes of experts: ``size`` adjacent ranks hold all of them together; collective.

    Where several ranks hold each layer together, all of these are among the ``size``: they hold different experts, so that the ranks with
    the same experts are on one data-parallel axis. Where there are shard groups, all experts are in each of them; in a pipeline, all
    experts of a stage's layers are among its ranks.

    Args:
        topology: The axis that parameters are sharded over.
        size: Ranks that share the experts; 1 leaves ``topology`` as it is.
        key: What asked for it, for messages.

    Raises:
        ConfigError: ``size`` does not divide the ranks of the axis, with those that hold layers together with them.
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
    """The ranks that hold one model with all of its experts, stage by stage; collective."""
    stages = {line[0]: line for line in lines_of_all(pipe.ranks)}
    lines = [[stages[rank][stage] for stage in range(pipe.world) for rank in line] for line in together if line[0] in stages]
    return axis_over(divide_twice(topology.group, ("experts of all stages", size), lines, lines, topology.device)[0], topology.device)


def _together(layers: Topology | None, lines: Lines, places: int) -> list[tuple[int, ...]]:
    """The ranks that hold all experts: ``places`` neighbours of an axis, each with those that hold layers together with it; collective."""
    beside = {rank: line for line in lines_of_all(layers.ranks) for rank in line} if layers is not None else {}
    runs = [line[start : start + places] for line in lines for start in range(0, len(line), places)]
    return list(dict.fromkeys(tuple(found for rank in run for found in beside.get(rank, [rank])) for run in runs))
