"""Sequence-parallel groups of a run: the ``mpu`` object that ``register_with_transformers`` returns and ``initialize`` accepts."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from hf_zero.comm.axes import model_parallel_group
from hf_zero.comm.back_end import open_collectives
from hf_zero.comm.topology import Topology, join_sequence, sequence_topology
from hf_zero.errors import StateError, UnsupportedError
from hf_zero.sequence_parallel.context_forward import DividedForwards
from hf_zero.sequence_parallel.forward import SlicedForwards, SliceSettings, is_bound
from hf_zero.sequence_parallel.joining import Layout
from hf_zero.sequence_parallel.sliceable import divided_part


class SequenceParallel:
    """Groups of ranks that hold slices of the same sequences; ``register_with_transformers`` returns it.

    The methods have the names of DeepSpeed's module ``parallel_state_sp``.

    Attributes:
        topology: All groups together, which ZeRO shards over, with this rank's group as its sequence axis.
        settings: Settings for transformers models; None for scripts that insert ``DistributedAttention`` themselves.
    """

    def __init__(self, topology: Topology, settings: SliceSettings | None = None) -> None:
        self.topology = topology
        self.settings = settings

    @property
    def axis(self) -> Topology:
        """Return the axis of the ranks that share this rank's samples."""
        if self.topology.sequence is None:
            raise StateError("SequenceParallel: its topology has no sequence axis; use that of sequence_topology() or join_sequence()")
        return self.topology.sequence

    def bind(self, model: nn.Module) -> None:
        """Make forwards of ``model`` run over slices, if there are ``settings`` and it does not do so yet."""
        if self.settings is not None and not is_bound(model, self.settings):
            SlicedForwards(model, open_collectives(self.axis), self.settings)

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        """Return the process group of the ranks that share this rank's samples."""
        return self.axis.group

    def get_sequence_parallel_world_size(self) -> int:
        """Return the number of ranks that share this rank's samples."""
        return self.axis.world

    def get_sequence_parallel_rank(self) -> int:
        """Return the position of this rank's slice."""
        return self.axis.rank

    def get_sequence_data_parallel_group(self) -> dist.ProcessGroup:
        """Return the process group over which ZeRO shards: the ranks of all groups."""
        return self.topology.group

    def get_sequence_data_parallel_world_size(self) -> int:
        """Return the number of ranks of all groups."""
        return self.topology.world

    def get_sequence_data_parallel_rank(self) -> int:
        """Return this rank's position among the ranks of all groups."""
        return self.topology.rank

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group of ranks with different samples, one of each sequence-parallel group; None where a script's groups
        do not cover all ranks.
        """
        return self.topology.sample_group

    def get_data_parallel_world_size(self) -> int:
        """Return the number of groups, each of which trains on samples of its own."""
        return self.topology.replicas

    def get_data_parallel_rank(self) -> int:
        """Return the position of this rank's group."""
        return self.topology.replica


class ContextParallel(SequenceParallel):
    """Groups of ranks that hold parts of the same sequences and gather keys and values, optionally with sequence parallelism inside.

    Attributes:
        across: Ranks whose keys and values are gathered, one for each part of a sequence.
        inside: Ranks that exchange heads for tokens; None without sequence parallelism.
        strategy: "allgather" or "alltoall".
        layout: The division of sequences.
    """

    def __init__(
        self, topology: Topology, across: Topology, inside: Topology | None, settings: SliceSettings, strategy: str = "allgather"
    ) -> None:
        super().__init__(topology, settings)
        self.across = across
        self.inside = inside
        self.strategy = strategy
        self.layout = Layout(open_collectives(self.axis), inside.world if inside is not None else 1)

    def bind(self, model: nn.Module) -> None:
        """Make training forwards of ``model``, or of the part of it that can be divided, forwards over parts of sequences."""
        part = divided_part(model)
        if self.settings is None or is_bound(part, self.settings):
            return
        inside = open_collectives(self.inside) if self.inside is not None else None
        divided = DividedForwards(part, self.layout, open_collectives(self.across), inside, self.settings, self.strategy)
        if part is not model:
            divided.be_inside(model)


def sequence_parallel_of(size: int, mpu: Any) -> SequenceParallel | None:
    """Return the sequence-parallel groups of an engine; None for none. Collective.

    Args:
        size: Ranks that share their samples, of a mesh that fits ``mpu``.
        mpu: The object given to ``initialize``, whose groups win, or None.
    """
    found = sequence_groups(mpu)
    return SequenceParallel(sequence_topology(size)) if found is None and size > 1 else found


def sequence_groups(mpu: Any) -> SequenceParallel | None:
    """Return the sequence-parallel groups of an ``mpu`` object; None where it has none. Collective where the object is another library's.

    Raises:
        ConfigError: The groups of all ranks are not of one size, or overlap.
        UnsupportedError: It has groups that hold one model together as well.
    """
    if isinstance(mpu, SequenceParallel):
        return mpu
    if not hasattr(mpu, "get_sequence_parallel_group") or mpu.get_sequence_parallel_world_size() <= 1:
        return None
    sequence = mpu.get_sequence_parallel_group()
    joint: Any = mpu.get_sequence_data_parallel_group() if hasattr(mpu, "get_sequence_data_parallel_group") else dist.group.WORLD
    model = model_parallel_group(mpu)
    # DeepSpeed's own object names one group twice.
    if model is not None and model.size() > 1 and dist.get_process_group_ranks(model) != dist.get_process_group_ranks(sequence):
        raise UnsupportedError("the mpu object has model-parallel and sequence-parallel groups: the two cannot be combined")
    return SequenceParallel(join_sequence(sequence, joint))
