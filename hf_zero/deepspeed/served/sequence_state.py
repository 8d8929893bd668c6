"""Provide DeepSpeed's module of sequence-parallel groups, for scripts that create the groups and pass this module as ``mpu``."""

from __future__ import annotations

import torch.distributed as dist

from hf_zero.comm.topology import Topology, newest_axis, newest_with, sequence_topology
from hf_zero.errors import StateError


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Create sequence-parallel groups of adjacent ranks; collective.

    Raises:
        ConfigError: The number of ranks is not a multiple of the size.
    """
    sequence_topology(sequence_parallel_size)


def _present(found: Topology | None) -> Topology:
    if found is None:
        raise StateError("there are no sequence-parallel groups; set sequence_parallel_size, or call initialize_sequence_parallel first")
    return found


def _sequence() -> Topology:
    return _present(newest_axis("sequence"))


def _joint() -> Topology:
    return _present(newest_with("sequence"))


def get_sequence_parallel_group() -> dist.ProcessGroup:
    """Return the process group of the ranks that share this rank's samples."""
    return _sequence().group


def get_sequence_parallel_world_size() -> int:
    """Return the number of ranks that share this rank's samples."""
    return _sequence().world


def get_sequence_parallel_rank() -> int:
    """Return the index of this rank's slice of a sequence."""
    return _sequence().rank


def get_sequence_data_parallel_group() -> dist.ProcessGroup:
    """Return the process group of all ranks of all sequence-parallel groups, which ZeRO shards over."""
    return _joint().group


def get_sequence_data_parallel_world_size() -> int:
    """Return the number of ranks of all groups."""
    return _joint().world


def get_sequence_data_parallel_rank() -> int:
    """Return this rank's position among the ranks of all groups."""
    return _joint().rank


# DeepSpeed's module has no further axis, but two names for this one.
get_model_parallel_group = get_sequence_parallel_group
get_model_parallel_world_size = get_sequence_parallel_world_size
get_model_parallel_rank = get_sequence_parallel_rank
