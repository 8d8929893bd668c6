"""Provide the process groups of a pipeline's ranks, with Megatron's names."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hf_zero.comm.process_groups import default_device, divide_twice
from hf_zero.comm.topology import Topology, axis_over
from hf_zero.deepspeed.pipe.topology import ProcessTopology, default_topology
from hf_zero.errors import ConfigError


class PipelineParallelGrid:
    """The position of this rank in ``topology``, and the groups that it belongs to; the constructor is collective.

    The *slice* axis is the axis ``model`` of the topology: the ranks that split layers among them. The *model-parallel* group has all ranks
    that hold one model together: all stages, and the ranks that split their layers.

    Args:
        topology: Grid with the axes ``pipe`` and ``data``, and ``model`` if layers are split; None is ``default_topology``.
        process_group: Group of all ranks, or None for the default group; other groups are not allowed.

    Attributes:
        global_rank: Global rank of this process.
        world_size: Number of all ranks.
        pipe_parallel_size: Number of stages.
        data_parallel_size: Number of ranks with the same parameters.
        slice_parallel_size: Number of ranks that split a layer.
        model_parallel_size: The same number as ``slice_parallel_size``.
        stage_id: Stage of this rank.
        data_parallel_id: Position of this rank among the ranks with the same parameters.
        is_first_stage: Whether this rank's stage reads the inputs.
        is_last_stage: Whether this rank's stage computes the loss.
        pipe: Axis of the stages.
        pp_group: Process group of the stages of this rank's model.
        dp_group: Process group of the ranks with the same parameters.

    Raises:
        ConfigError: The topology lacks an axis or has an unknown one, or its size is not the number of ranks.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: dist.ProcessGroup | None = None) -> None:
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._topology = require_fit(topology or default_topology(len(ranks)), len(ranks))
        if len(ranks) != self.world_size:
            raise ConfigError(
                f"PipelineParallelGrid(process_group=...): the group has {len(ranks)} of {self.world_size} ranks; pass a group of all ranks"
            )
        self.pipe_parallel_size = self._topology.get_dim("pipe")
        self.data_parallel_size = self._topology.get_dim("data")
        self.slice_parallel_size = self.model_parallel_size = max(self._topology.get_dim("model"), 1)
        coord = self._topology.get_coord(self.global_rank)
        self.stage_id: int = coord.pipe
        self.data_parallel_id: int = coord.data
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self._axes = _axes(self._topology)
        self.pipe = self._axes["pipe"]
        self.pp_group, self.dp_group = (dist.get_process_group_ranks(self._axes[name].group) for name in ("pipe", "data"))

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineParallelGrid:
        """Return this object: ranks are not copied."""
        return self

    def topology(self) -> ProcessTopology:
        """Return the topology."""
        return self._topology

    def _is_grid_valid(self) -> bool:
        """Return True, because the constructor refuses a topology that does not fit the ranks."""
        return True

    def get_stage_id(self) -> int:
        """Return this rank's stage, from 0."""
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        """Return this rank's position among the ranks with the same parameters."""
        return self.data_parallel_id

    def get_global_rank(self) -> int:
        """Return the global rank of this process."""
        return self.global_rank

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the global rank of ``stage_id`` for the same samples; ``kwargs`` give other positions on the further axes.

        Raises:
            ConfigError: The stage or an axis does not exist.
        """
        coord = self._topology.get_coord(self.global_rank)._asdict()
        return self._topology.get_rank(**{**coord, "pipe": stage_id, **kwargs})

    def get_pipe_parallel_rank(self) -> int:
        """Return this rank's stage."""
        return self._axes["pipe"].rank

    def get_pipe_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self._axes["pipe"].world

    def get_pipe_parallel_group(self) -> dist.ProcessGroup:
        """Return the process group of the stages of this rank's model."""
        return self._axes["pipe"].group

    def get_data_parallel_rank(self) -> int:
        """Return this rank's position among the ranks with the same parameters."""
        return self._axes["data"].rank

    def get_data_parallel_world_size(self) -> int:
        """Return the number of ranks with the same parameters."""
        return self._axes["data"].world

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Return the process group of the ranks with the same parameters."""
        return self._axes["data"].group

    def get_model_parallel_rank(self) -> int:
        """Return this rank's position among the ranks that hold one model together: all stages, and the ranks that split their layers."""
        return self._axes["model"].rank

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks that hold one model together."""
        return self._axes["model"].world

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Return the process group of the ranks that hold one model together."""
        return self._axes["model"].group

    def get_slice_parallel_rank(self) -> int:
        """Return this rank's position among the ranks that divide its layers."""
        return self._axes["slice"].rank

    def get_slice_parallel_world_size(self) -> int:
        """Return the number of ranks that divide this rank's layers."""
        return self._axes["slice"].world

    def get_slice_parallel_group(self) -> dist.ProcessGroup:
        """Return the process group of the ranks that divide this rank's layers."""
        return self._axes["slice"].group

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size


def require_fit(topology: ProcessTopology, ranks: int) -> ProcessTopology:
    """Return ``topology`` if it is valid for a pipeline of ``ranks`` ranks.

    Raises:
        ConfigError: The topology lacks an axis or has an unknown one, or its size is not ``ranks``.
    """
    axes = topology.get_axis_names()
    if not {"pipe", "data"} <= set(axes) <= {"pipe", "data", "model"}:
        raise ConfigError(f"a pipeline's topology needs the axes pipe and data, and model if layers are split; this one has {axes}")
    if topology.world_size() != ranks:
        raise ConfigError(f"the topology {topology} has {topology.world_size()} ranks, but there are {ranks}; both must be equal")
    return topology


def _axes(topology: ProcessTopology) -> dict[str, Topology]:
    """Return the groups of this rank as axes: its stages, the ranks with the same parameters, the ranks that split its layers, and all
    ranks of its model.
    """
    world, device, key = dist.group.WORLD, default_device(), (tuple(topology.axes), tuple(topology.dims))
    assert world is not None
    alone = [[rank] for rank in range(dist.get_world_size())]
    together = [topology.filter_match(data=place) for place in range(topology.get_dim("data"))]
    data, pipe = divide_twice(world, ("grid", *key), topology.get_axis_comm_lists("data"), topology.get_axis_comm_lists("pipe"), device)
    slices = topology.get_axis_comm_lists("model") or alone
    model, within = divide_twice(world, ("grid of models", *key), together, slices, device)
    groups = {"data": data, "pipe": pipe, "model": model, "slice": within}
    return {name: axis_over(group, device) for name, group in groups.items()}
