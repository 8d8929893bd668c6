"""DeepSpeed's process-group getters. There is one axis, data parallel over all ranks, so the answers are the default group's."""

from __future__ import annotations

import torch.distributed as dist

from hf_zero.compat.comm import get_rank, get_world_size
from hf_zero.errors import StateError


def get_data_parallel_group() -> dist.ProcessGroup:
    """The process group gradients are averaged over.

    Raises:
        StateError: There is no process group yet.
    """
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise StateError("there is no process group yet; call deepspeed.init_distributed() or build an Accelerator first")
    return dist.group.WORLD


def get_data_parallel_world_size() -> int:
    """Number of data-parallel ranks."""
    return get_world_size()


def get_data_parallel_rank() -> int:
    """This process' data-parallel rank."""
    return get_rank()


def get_model_parallel_world_size() -> int:
    """Ranks that share one copy of the layers: one, as nothing splits a layer."""
    return 1


def get_model_parallel_rank() -> int:
    """Rank within them."""
    return 0


# DeepSpeed's names carry an underscore, older ones none; without sequence parallelism both axes are the same.
_get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = get_model_parallel_world_size
_get_model_parallel_rank = get_model_parallel_rank
