"""DeepSpeed's process-group getters: the data-parallel axis, and the ranks that hold one model together."""

from __future__ import annotations

import torch.distributed as dist

from hf_zero.comm.topology import Topology, latest_sequence, latest_topology
from hf_zero.deepspeed.served.comm import get_rank, get_world_size
from hf_zero.errors import StateError


def _split() -> Topology | None:
    """The axes of the newest model that several ranks hold together; None where every rank has all of its model."""
    topology = latest_topology()
    return topology if topology is not None and topology.model is not None else None


def get_data_parallel_group() -> dist.ProcessGroup:
    """The process group gradients are averaged over; that of all ranks where ranks share the sequences of their samples.

    Raises:
        StateError: There is no process group yet.
    """
    topology, sequence = _split(), latest_sequence()
    if sequence is not None:
        return sequence.joint.group
    if topology is not None:
        return topology.group
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise StateError("there is no process group yet; call deepspeed.init_distributed() or build an Accelerator first")
    return dist.group.WORLD


def get_data_parallel_world_size() -> int:
    """Number of ranks in ``get_data_parallel_group()``."""
    topology, sequence = _split(), latest_sequence()
    if sequence is not None:
        return sequence.joint.world
    return get_world_size() if topology is None else topology.world


def get_data_parallel_rank() -> int:
    """This process' rank in ``get_data_parallel_group()``."""
    topology, sequence = _split(), latest_sequence()
    if sequence is not None:
        return sequence.joint.rank
    return get_rank() if topology is None else topology.rank


def get_model_parallel_group() -> dist.ProcessGroup:
    """The ranks that hold one model together with this one.

    Raises:
        StateError: Every rank has all of its model.
    """
    topology = _split()
    if topology is None or topology.model is None:
        raise StateError("no model is split; set tensor_parallel.autotp_size, or call deepspeed.tp_model_init first")
    return topology.model.group


def get_model_parallel_world_size() -> int:
    """Ranks that hold one model together; 1 where nothing is split."""
    topology = _split()
    return topology.model.world if topology is not None and topology.model is not None else 1


def get_model_parallel_rank() -> int:
    """Rank within them."""
    topology = _split()
    return topology.model.rank if topology is not None and topology.model is not None else 0


def get_tensor_model_parallel_src_rank() -> int:
    """The first of them, as the default group counts ranks; this rank itself where nothing is split."""
    topology = _split()
    return topology.model.ranks[0] if topology is not None and topology.model is not None else get_rank()


def _get_sequence_parallel_group() -> dist.ProcessGroup:
    """The ranks that hold slices of the same sequences.

    Raises:
        StateError: There are no such groups.
    """
    sequence = latest_sequence()
    if sequence is None:
        raise StateError(
            "there are no sequence-parallel groups; set sequence_parallel_size, or accelerate's ParallelismConfig(sp_size=...)"
        )
    return sequence.sequence.group


def _get_sequence_parallel_world_size() -> int:
    """How many they are; 1 where sequences are whole."""
    sequence = latest_sequence()
    return 1 if sequence is None else sequence.sequence.world


def _get_sequence_parallel_rank() -> int:
    """Which slice is this rank's."""
    sequence = latest_sequence()
    return 0 if sequence is None else sequence.sequence.rank


# DeepSpeed's names carry an underscore, older ones none.
_get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = get_model_parallel_world_size
_get_model_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_group = _get_model_parallel_group = get_model_parallel_group
get_tensor_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank
