"""Provide DeepSpeed's functions for process groups: of the data-parallel axis, and of the ranks that hold one model together."""

from __future__ import annotations

import torch.distributed as dist

from hf_zero.comm.topology import Topology, newest_axis, newest_with
from hf_zero.deepspeed.served.comm import get_rank, get_world_size
from hf_zero.errors import StateError


def _divided() -> Topology | None:
    """Return the newest topology that divides models or sequences over ranks; None if there is none."""
    return newest_with("sequence") or newest_with("model")


def _get_sequence_data_parallel_group() -> dist.ProcessGroup:
    """Return the process group that ZeRO shards over and averages gradients over; with sequence parallelism it has all ranks.

    Raises:
        StateError: There is no process group yet.
    """
    topology = _divided()
    if topology is not None:
        return topology.group
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise StateError("there is no process group yet; call deepspeed.init_distributed() or build an Accelerator first")
    return dist.group.WORLD


def _get_sequence_data_parallel_world_size() -> int:
    """Return the number of ranks in ``_get_sequence_data_parallel_group()``."""
    topology = _divided()
    return get_world_size() if topology is None else topology.world


def _get_sequence_data_parallel_rank() -> int:
    """Return this process' rank in ``_get_sequence_data_parallel_group()``."""
    topology = _divided()
    return get_rank() if topology is None else topology.rank


def get_data_parallel_group() -> dist.ProcessGroup:
    """Return the group of ranks with different samples that this rank belongs to; with sequence parallelism one rank of each group that
    shares samples.

    Raises:
        StateError: There is no process group yet, or the script has made sequence-parallel groups that do not cover all ranks.
    """
    topology = _divided()
    if topology is None:
        return _get_sequence_data_parallel_group()
    if topology.sample_group is None:
        raise StateError("the sequence-parallel groups of the mpu object are not of all ranks: ask it for its data-parallel group")
    return topology.sample_group


def _get_data_parallel_group_ranks() -> list[int]:
    """Return the global ranks of ``get_data_parallel_group()``."""
    return dist.get_process_group_ranks(get_data_parallel_group())


def _get_broadcast_src_rank() -> int:
    """Return the global rank of the first rank in ``_get_sequence_data_parallel_group()``."""
    return dist.get_process_group_ranks(_get_sequence_data_parallel_group())[0]


def get_data_parallel_world_size() -> int:
    """Return the number of ranks in ``get_data_parallel_group()``."""
    topology = _divided()
    return get_world_size() if topology is None else topology.replicas


def get_data_parallel_rank() -> int:
    """Return this process' rank in ``get_data_parallel_group()``."""
    topology = _divided()
    return get_rank() if topology is None else topology.replica


def get_model_parallel_group() -> dist.ProcessGroup:
    """Return the process group of the ranks that hold one model together with this rank.

    Raises:
        StateError: Every rank has a complete model.
    """
    model = newest_axis("model")
    if model is None:
        raise StateError("no model is split; set tensor_parallel.autotp_size, or call deepspeed.tp_model_init first")
    return model.group


def get_model_parallel_world_size() -> int:
    """Return the number of ranks that hold one model together; 1 if the model is not divided."""
    model = newest_axis("model")
    return 1 if model is None else model.world


def get_model_parallel_rank() -> int:
    """Return this rank's position among the ranks that hold one model together."""
    model = newest_axis("model")
    return 0 if model is None else model.rank


def get_tensor_model_parallel_src_rank() -> int:
    """Return the global rank of the first rank that holds this rank's model; this rank itself if the model is not divided."""
    model = newest_axis("model")
    return get_rank() if model is None else model.ranks[0]


def _get_sequence_parallel_group() -> dist.ProcessGroup:
    """Return the process group of the ranks that hold slices of the same sequences.

    Raises:
        StateError: There is no sequence parallelism.
    """
    sequence = newest_axis("sequence")
    if sequence is None:
        raise StateError(
            "there are no sequence-parallel groups; set sequence_parallel_size, or accelerate's ParallelismConfig(sp_size=...)"
        )
    return sequence.group


def _get_sequence_parallel_world_size() -> int:
    """Return the number of ranks that hold slices of the same sequences; 1 if sequences are not divided."""
    sequence = newest_axis("sequence")
    return 1 if sequence is None else sequence.world


def _get_sequence_parallel_rank() -> int:
    """Return the index of this rank's slice of a sequence."""
    sequence = newest_axis("sequence")
    return 0 if sequence is None else sequence.rank


# DeepSpeed's names carry an underscore, older ones none.
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = get_model_parallel_world_size
_get_model_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_group = _get_model_parallel_group = get_model_parallel_group
get_tensor_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank
