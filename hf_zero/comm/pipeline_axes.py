"""The ranks of a pipeline: who runs which stage, who holds one layer together, who holds the same layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from hf_zero.comm.bootstrap import init_distributed
from hf_zero.comm.device import default_device
from hf_zero.comm.process_groups import divide_twice, lines_of_all
from hf_zero.comm.topology import Topology, all_ranks, axis_over, join_topologies, newest_is, require_divisor


def divide_stages(stages: int, tensor: int = 1) -> Topology:
    """The axes of all ranks where ``stages`` x ``tensor`` of them hold one model together; collective.

    The stage is the outermost axis, the tensor-parallel one the innermost, as in DeepSpeed's ``PipeModelDataParallelTopology`` and
    transformers' ``DistributedConfig``: rank = (stage x data + place on the data-parallel axis) x tensor + place among those that hold a
    layer.

    Args:
        stages: Of the pipeline, at least 2.
        tensor: Ranks that hold one layer together.

    Raises:
        ConfigError: They do not divide the number of ranks.
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
    return newest_is("model", replace(found, pipe=axis_over(pipe, device), tensor=axis_over(tensors, device) if tensor > 1 else None))


def stages_together(topology: Topology, stages: Sequence[int]) -> Topology:
    """The ranks of some ``stages`` on the pipe axis through this rank, each with the replicas of its shards; collective over all ranks.

    Args:
        topology: Axes with that of a pipeline.
        stages: Rising; this rank is in one of them, or alone with its replicas.
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
