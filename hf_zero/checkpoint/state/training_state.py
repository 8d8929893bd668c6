"""State that a checkpoint holds, as values that the engine passes and receives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from hf_zero.checkpoint.format.names import refuse_sparse
from hf_zero.checkpoint.format.tp_shards import SavedTpShard
from hf_zero.checkpoint.state.module_entries import has_extra_state
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.topology import Topology
from hf_zero.core.averages import AveragedWeights
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.units.marks import is_elsewhere
from hf_zero.core.units.names import named_buffers, named_params, saved_name
from hf_zero.core.units.unit import Unit, find_unit
from hf_zero.system.object_store import Place


class Stateful(Protocol):
    """A scheduler, loss scaler, or comparison of gradient norms."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: Any) -> Any:
        """Load a state that ``state_dict`` has returned."""


@dataclass(frozen=True)
class TensorAxis:
    """This rank's place on the tensor-parallel axis.

    Attributes:
        rank: Its position.
        world: Ranks on the axis.
        tp_shards: What it holds of each parameter or buffer that is split; those not named are whole on every rank of the axis.
    """

    rank: int = 0
    world: int = 1
    tp_shards: Mapping[str, SavedTpShard] = field(default_factory=dict)

    def tp_shard_of(self, name: str, shape: Sequence[int]) -> SavedTpShard:
        """Return the part this rank holds of ``name``, whose shape here is ``shape``."""
        return self.tp_shards.get(name) or SavedTpShard(tuple(shape))


@dataclass(frozen=True)
class Holders:
    """This rank's position among the ranks that divide the writing of one tensor, or of its parts.

    Attributes:
        rank: This rank's place; replicas of one shard are side by side, so that a file holds a row of a unit's elements.
        world: Their number.
        part: Which part of the tensor they hold: their rank on the tensor-parallel axis, or among those that share the experts.
        parts: How many such parts there are; ``world`` times this is all ranks.
    """

    rank: int
    world: int
    part: int = 0
    parts: int = 1


def values_of(unit: Unit) -> torch.Tensor:
    """Return (shard_numel,): the master of a trained unit, else its shard in the training type."""
    return unit.master if unit.master is not None else unit.shard


@dataclass(frozen=True)
class TrainingState:
    """The parts of an engine that a checkpoint holds.

    Attributes:
        module: The user's module.
        units: Its flat buffers.
        collectives: The axis they are divided over.
        everyone: All ranks that save and load together; ``collectives`` unless there are replicas or a tensor-parallel axis.
        tensor: The tensor-parallel axis.
        stage: ZeRO stage, for information.
        optimizer: None for an engine that only runs forward.
        scheduler: The engine's scheduler, or None.
        scaler: The loss scaler.
        counters: Counters of the engine.
        averages: Averages of the weights.
        spikes: Gradient norms of the last steps, or None.
        joinable: Names of the parameters of param groups that no unit trains yet, because they were frozen or added.
        join: Makes units of some of them, whose optimizer states are loaded then; collective.
        changing: Called with the folder of a checkpoint before a load changes the first value, and with "" when it has ended well.
    """

    module: nn.Module
    units: list[Unit]
    collectives: Collectives
    stage: int
    optimizer: ShardedOptimizer | None
    scheduler: Stateful | None
    scaler: Stateful
    counters: Mapping[str, int]
    everyone: Collectives
    tensor: TensorAxis = field(default_factory=TensorAxis)
    averages: Sequence[AveragedWeights] = ()
    spikes: Stateful | None = None
    joinable: Sequence[str] = ()
    join: Callable[[Sequence[str]], None] = lambda _names: None
    changing: Callable[[str], None] = lambda _folder: None

    @property
    def holders(self) -> Holders:
        """Return the ranks that share the writing of tensors that all data-parallel ranks hold, or shard among them."""
        axis = self.collectives.topology
        return Holders(_beside_replicas(axis), axis.data.world, self.tensor.rank, self.tensor.world)

    @property
    def holders_of_experts(self) -> Holders:
        """Return the ranks that hold the same experts and divide the writing of them."""
        topology = self.collectives.topology
        alike, together = topology.expert_data, topology.all_parts
        if together is None or alike is None:
            return self.holders
        return Holders(_beside_replicas(alike), alike.data.world, together.rank, together.world)

    def holders_of(self, unit: Unit) -> Holders:
        """Return the ranks that share the writing of ``unit``'s parts."""
        return self.holders_of_experts if unit.collectives.topology.of_experts else self.holders

    @property
    def parts(self) -> int:
        """Return the number of parts of tensors that not every data-parallel rank holds."""
        return max(self.tensor.world, self.holders_of_experts.parts)

    def loose_params(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters that no unit holds: frozen ones at stages 0 to 2, and non-floating-point ones; none of other stages."""
        for name, param in named_params(self.module):
            if find_unit(param) is None and not is_elsewhere(param):
                yield name, param

    def aliases(self) -> dict[str, str]:
        """Return further names of tied parameters and of buffers -> the name used for them everywhere else."""
        first = {id(param): name for name, param in named_params(self.module)}
        named = named_params(self.module, remove_duplicate=False)
        found = {name: first[id(param)] for name, param in named if name != first[id(param)]}
        known = {id(buffer): name for name, buffer in named_buffers(self.module, persistent=True)}
        again = named_buffers(self.module, remove_duplicate=False, persistent=True)
        return found | {name: known[id(buffer)] for name, buffer in again if name != known[id(buffer)]}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return persistent buffers by name; one that is registered twice appears once.

        Raises:
            CheckpointError: There are sparse ones.
        """
        found = dict(named_buffers(self.module, persistent=True))
        refuse_sparse(found)
        return found

    def modules_with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules that keep state of their own kind (``get_extra_state``)."""
        for name, module in self.module.named_modules():
            if has_extra_state(module):
                yield saved_name(name), module


def _beside_replicas(axis: Topology) -> int:
    """Return this rank's place among the ranks of ``axis`` and their replicas: the replicas of one shard have adjacent places."""
    return axis.rank if axis.replicate is None else axis.rank * axis.replicate.world + axis.replicate.rank


@dataclass(frozen=True)
class Loaded:
    """Result of a load for the caller.

    Attributes:
        path: The folder.
        client_state: Client state of the save.
        counters: Counters of the engine; None when only the module was wanted.
        bytes_read: Bytes this rank read from tensor files.
    """

    path: Place
    client_state: Any
    counters: dict[str, int] | None
    bytes_read: int
