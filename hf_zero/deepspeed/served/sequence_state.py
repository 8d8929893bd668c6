"""DeepSpeed's module of sequence-parallel groups, for scripts that make them and pass the module as ``mpu``."""

from __future__ import annotations

import torch.distributed as dist

from hf_zero.comm.topology import SequenceAxes, latest_sequence, sequence_axes
from hf_zero.errors import StateError


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Makes groups of adjacent ranks; collective.

    Raises:
        ConfigError: The size does not divide the number of ranks.
    """
    sequence_axes(sequence_parallel_size)


def _axes() -> SequenceAxes:
    axes = latest_sequence()
    if axes is None:
        raise StateError("there are no sequence-parallel groups; set sequence_parallel_size, or call initialize_sequence_parallel first")
    return axes


def get_sequence_parallel_group() -> dist.ProcessGroup:
    """The ranks that share this rank's samples."""
    return _axes().sequence.group


def get_sequence_parallel_world_size() -> int:
    """How many they are."""
    return _axes().sequence.world


def get_sequence_parallel_rank() -> int:
    """Which slice is this rank's."""
    return _axes().sequence.rank


def get_sequence_data_parallel_group() -> dist.ProcessGroup:
    """All groups together."""
    return _axes().joint.group


def get_sequence_data_parallel_world_size() -> int:
    """Number of ranks of all groups."""
    return _axes().joint.world


def get_sequence_data_parallel_rank() -> int:
    """This rank's place among them."""
    return _axes().joint.rank
