"""Open the process groups of one engine: for sharding, inside nodes, over experts and over the stages of a pipeline."""

from __future__ import annotations

from dataclasses import replace

from hf_zero.assembly.axes import Axes
from hf_zero.assembly.mesh import is_to_split, require_fit
from hf_zero.assembly.same_settings import everyone_of
from hf_zero.comm.axes import stages_together
from hf_zero.comm.back_end import open_collectives
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.nodes import TwoHops, nodes_of
from hf_zero.comm.own_groups import Purpose, borrow, give_back, own_topology
from hf_zero.comm.topology import Topology, divide_replicas, lines_of, require_divisor
from hf_zero.config.schema.root import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.observe import warn_once


class Networks:
    """The collectives of an engine's axes. The constructor is collective, and so is every method that opens a network.

    Args:
        axes: Axes of the ranks.
        config: The configuration; its settings about nodes are checked against the nodes.

    Attributes:
        collectives: Network of the axis that shards.
        model: Network of the model axis (tensor parallelism, pipelines); None without one.
        experts: Network of the ranks that hold the same experts; None if all ranks hold all experts.
        nodes: The nodes of the ranks.
        inside: Number of ranks that together hold all parameters; the complete axis unless the configuration sets fewer.
        everyone: All ranks of the engine, which vote together; includes the ranks that hold other parts of the model.

    Raises:
        ConfigError: A size does not fit the ranks or their nodes.
    """

    def __init__(self, axes: Axes, config: ZeroConfig) -> None:
        self.topology = axes.topology
        self._config = config
        self._borrowed: list[Topology] = []  # groups for reductions
        self.collectives: Collectives = self._open(self.topology)
        self.model = open_collectives(self.topology.model) if self.topology.model is not None else None
        self.nodes = nodes_of([self.collectives.data, *([self.model] if self.model is not None else [])])
        self._per_node = self._ranks_in_each_node()
        self.collectives.set_ranks_per_node(self._per_node)
        self.inside = self._ranks_inside()
        groups = {"shard groups (mics_shard_size, dp_replicate)": self.topology.world} if self.topology.replicate is not None else {}
        require_fit(axes.mesh, self.nodes, {**groups, "copies in the node (zero_hpz_partition_size, param_shard_size)": self.inside})
        self.everyone = everyone_of(None) if is_to_split(axes.mesh) or axes.mesh.pp > 1 else self.collectives.data
        self.experts = self._open(self.topology.expert_data) if self.topology.expert_data is not None else None

    def node(self) -> Collectives:
        """Open and return a new network of the ranks that together hold all parameters."""
        return self._open(replace(divide_replicas(self.topology, self.topology.world // self.inside), replicate=None))

    def borrow(self, topology: Topology) -> Collectives:
        """Open and return a second network of the ranks of ``topology``, for reductions; ``give_back`` releases it."""
        collectives = self._open(topology, "reductions")
        borrow(collectives.topology)
        self._borrowed.append(collectives.topology)
        return collectives

    def give_back(self) -> None:
        """Release the borrowed groups; every rank calls it."""
        while self._borrowed:
            give_back(self._borrowed.pop())

    def hops(self, *, in_node: bool) -> TwoHops | None:
        """Open the networks inside nodes and between nodes if gradients are reduced in two hops; otherwise return None.

        Args:
            in_node: Whether parameters stay inside a group of ranks, while gradients are sharded over all ranks.
        """
        world, size = self.topology.world, self.inside
        if not in_node:
            if world == 1 or not self._config.zero_optimization.zero_quantized_gradients:
                return None
            if self.nodes.uneven:
                warn_once(
                    f"zero_optimization.zero_quantized_gradients reduces in one hop over {self.nodes}: two hops need the same number "
                    "of ranks in each node"
                )
            size = self._per_node
        axes = divide_replicas(self.topology, world // size) if 1 < size < world else self.topology
        if axes is self.topology or axes.replicate is None:
            return None  # one node, or one rank per node
        return TwoHops(self.borrow(replace(axes, replicate=None)), self.borrow(axes.replicate))

    def stages(self, sets: list[tuple[int, ...]]) -> dict[tuple[int, ...], Collectives]:
        """Open a network for each set of pipeline stages that share a tied parameter (with replicas of its shards); return them by set."""
        return {stages: open_collectives(stages_together(self.topology, stages)) for stages in sets}

    def _open(self, topology: Topology, purpose: Purpose = "gathers") -> Collectives:
        collectives = open_collectives(own_topology(topology, purpose))
        collectives.connect()
        return collectives

    def _ranks_in_each_node(self) -> int:
        """Return the number of ranks of the axis in each node; 0 if it is unknown or differs between nodes."""
        ranks = self.topology.data.world * (self.topology.model.world if self.topology.model is not None else 1)
        if self.nodes.sizes and self.nodes.sizes[-1] >= ranks:
            return self.topology.world  # one node
        return self.nodes.ranks_in_each(lines_of(self.topology)) if self.nodes.sizes else 0

    def _ranks_inside(self) -> int:
        topology = self.topology
        size, key, least = self._config.hf_zero.param_shard_size, "hf_zero.param_shard_size", 2
        if size is None:
            size, key, least = self._config.zero_optimization.zero_hpz_partition_size, "zero_optimization.zero_hpz_partition_size", 1
            if size == 1 or self._config.zero_optimization.stage != 3:
                return topology.world
            if size > topology.world:  # the default of a program that was written for larger nodes
                warn_once(
                    f"{key} is {size}, more than the {topology.world} ranks that parameters are sharded over, so it has no effect: the "
                    "shards of these ranks already form a whole copy"
                )
                return topology.world
        if size == "node":
            size = self._per_node
            if not size:
                raise ConfigError(
                    f"{key} is 'node', but the ranks form {self.nodes}, which gives no single number of ranks per node. Set {key} to "
                    "a number of ranks"
                )
        together = topology.model.world if topology.model is not None else 1
        fits = [found for found in self.nodes.fitting(topology.world * together, together) if found >= least]
        require_divisor(int(size), topology.world, key, "ranks that parameters are sharded over", usable=fits)
        return int(size)
