"""Implement `deepspeed.comm`: create the process group and return ranks and sizes, with torch.distributed.

The table maps the collectives of `deepspeed.comm` to the functions of torch.distributed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_zero.comm import bootstrap
from hf_zero.comm.device import default_device
from hf_zero.comm.process_groups import device_mesh


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Create the default process group of torch.distributed; see :func:`hf_zero.comm.bootstrap.init_distributed` for the arguments.

    If accelerate calls it with ``dist_backend=None``, it also sets accelerate's backend, see [Note: accelerate without an accelerator].
    """
    bootstrap.init_distributed(
        dist_backend, auto_mpi_discovery, distributed_port, verbose, timeout, init_method, dist_init_required, config, rank, world_size
    )
    if dist_backend is None:
        _tell_accelerate(dist.get_backend())


def _tell_accelerate(backend: str) -> None:
    """Set the backend in accelerate's state while accelerate builds it without one.

    [Note: accelerate without an accelerator] ``PartialState.__init__`` chooses a backend for the accelerators that it knows. On a machine
    without accelerator it has None. It then calls ``is_initialized()``, calls ``init_distributed(dist_backend=None)`` if there is no group,
    and treats "no backend" as "one process": every rank would see ``num_processes == 1`` and ``is_main_process``, read the complete data
    set and write the same files. The group exists, so only the name of its backend is missing, which accelerate stores in the dictionary
    that all its states share. It is set only while that object is being built (its counts do not exist yet), and only if accelerate found
    no backend itself. Both calls set it, because a second state of a process, or one after the script's own ``init_process_group``, makes
    only the first call.
    """
    state_module = sys.modules.get("accelerate.state")
    if state_module is None:
        return
    shared = state_module.PartialState._shared_state
    if shared and shared.get("backend") is None and "num_processes" not in shared:
        shared["backend"] = backend


def is_available() -> bool:
    """Return whether this PyTorch can communicate at all."""
    return dist.is_available()


def is_initialized() -> bool:
    """Return whether the default process group exists; also set the backend if accelerate calls (see the note above)."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    _tell_accelerate(dist.get_backend())
    return True


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return the rank in ``group`` (default: all); a process without a group is rank 0 of 1."""
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of ranks in ``group`` (default: all)."""
    return dist.get_world_size(group) if is_initialized() else 1


def get_local_rank() -> int:
    """Return the rank on this machine, from the launcher's variables."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> dist.ProcessGroup | None:
    """Return the default process group; None before it is created."""
    return dist.group.WORLD if is_initialized() else None


def barrier(group: dist.ProcessGroup | None = None, async_op: bool = False, device_ids: list[int] | None = None) -> Any:
    """Wait for all ranks of ``group``; return immediately in a process without a group."""
    if not is_initialized():
        return None
    return dist.barrier(group=group, async_op=async_op, device_ids=device_ids)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """Return a torch DeviceMesh of all ranks with named dimensions, cached by shape; collective.

    Args:
        mesh_shape: Sizes of the dimensions, outermost first; their product is the number of ranks.
        mesh_dim_names: Name of each dimension.
    """
    return device_mesh(dict(zip(mesh_dim_names, mesh_shape, strict=True)), default_device().type, {})


# DeepSpeed checks torch's version with these functions; every supported torch has the collectives.


def has_all_gather_into_tensor() -> bool:
    """Return True, because torch.distributed has this collective."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """Return True, because torch.distributed has this collective."""
    return True


def get_all_ranks_from_group(group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the global ranks of ``group`` (default: all ranks), in the order of ``group``."""
    return [0] if not is_initialized() else dist.get_process_group_ranks(group or dist.group.WORLD)


def get_local_rank_from_launcher() -> int:
    """Return the rank on this machine, from the launcher's variables; 0 without a launcher."""
    return get_local_rank()


def get_world_rank_from_launcher() -> int:
    """Return the global rank, from the launcher's variables; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def get_world_size_from_launcher() -> int:
    """Return the number of ranks, from the launcher's variables; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))
