"""The data-parallel axis divided by experts: who holds all experts together, and who holds the same ones."""

from __future__ import annotations

from dataclasses import replace

from hf_zero.comm.process_groups import divide_twice
from hf_zero.comm.topology import Topology, axis_over, lines_of, require_divisor


def divide_experts(topology: Topology, size: int, key: str = "expert_parallel.autoep_size") -> Topology:
    """``topology`` with its two axes of experts: ``size`` adjacent ranks hold all of them together; collective.

    Where there are shard groups, all experts are in each of them.

    Args:
        topology: The axis that parameters are sharded over.
        size: Ranks that share the experts; 1 leaves ``topology`` as it is.
        key: What asked for it, for messages.

    Raises:
        ConfigError: ``size`` does not divide the ranks of the axis.
    """
    require_divisor(size, topology.world, key, "ranks that parameters are sharded over")
    if size == 1:
        return topology
    joint = divide_experts(topology.joint, size, key) if topology.joint is not None else None
    lines = lines_of(topology)
    together = [line[start : start + size] for line in lines for start in range(0, len(line), size)]
    alike = [line[place::size] for line in lines for place in range(size)]
    holders, sharers = divide_twice(topology.group, ("expert", size), alike, together, topology.device)
    expert = axis_over(sharers, topology.device)
    replicate = replace(topology.replicate, joint=joint) if topology.replicate is not None else None
    same = replace(
        axis_over(holders, topology.device), expert=expert, replicate=replicate, joint=joint.expert_data if joint is not None else None
    )
    return replace(topology, expert=expert, expert_data=same, replicate=replicate, joint=joint)
