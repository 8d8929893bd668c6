"""`deepspeed.comm`: process start-up and questions about ranks, over torch.distributed.

Collectives of `deepspeed.comm` are torch.distributed's own functions, mapped by the table.
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
    """Creates the default torch.distributed group, see :func:`hf_zero.comm.bootstrap.init_distributed` for the arguments.

    Called by accelerate with ``dist_backend=None`` it also tells accelerate which backend was taken,
    see [Note: accelerate without an accelerator].
    """
    bootstrap.init_distributed(
        dist_backend, auto_mpi_discovery, distributed_port, verbose, timeout, init_method, dist_init_required, config, rank, world_size
    )
    if dist_backend is None:
        _tell_accelerate(dist.get_backend())


def _tell_accelerate(backend: str) -> None:
    """[Note: accelerate without an accelerator]

    ``PartialState.__init__`` picks a backend from the accelerators it knows. On a machine without one it has None, asks us
    whether there is a group, calls ``init_distributed(dist_backend=None)`` if there is none, and then takes "no backend" for
    "one process": every rank would see ``num_processes == 1`` and ``is_main_process``, read the whole data set and write the
    same files. The group exists, so the one missing fact is its backend; accelerate keeps it in the dictionary all states
    share. We fill it in only while that object is being built (its counts are not there yet) and only if it found none itself,
    at either of the two calls: a second state of a process, or one made after the script's own ``init_process_group``, stops
    at the first.
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
    """Return whether the default process group exists; a call from accelerate also passes the backend on (see the note above)."""
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
    """Return the rank on this machine, as the launcher gives it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> dist.ProcessGroup | None:
    """Return the default process group, None before there is one."""
    return dist.group.WORLD if is_initialized() else None


def barrier(group: dist.ProcessGroup | None = None, async_op: bool = False, device_ids: list[int] | None = None) -> Any:
    """Waits for all ranks of ``group``; returns at once in a process without a group."""
    if not is_initialized():
        return None
    return dist.barrier(group=group, async_op=async_op, device_ids=device_ids)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """Return all ranks as torch's mesh of named dimensions; made once for a shape, collective.

    Args:
        mesh_shape: Sizes from the outside in; their product is the number of ranks.
        mesh_dim_names: A name for each.
    """
    return device_mesh(dict(zip(mesh_dim_names, mesh_shape, strict=True)), default_device().type, {})


# What DeepSpeed asks of the version of torch is always there.


def has_all_gather_into_tensor() -> bool:
    """Return True."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """Return True."""
    return True


def get_all_ranks_from_group(group: dist.ProcessGroup | None = None) -> list[int]:
    """Return ranks of ``group`` (default: all) as the default group counts them, in the order of ``group``."""
    return [0] if not is_initialized() else dist.get_process_group_ranks(group or dist.group.WORLD)


def get_local_rank_from_launcher() -> int:
    """Return this rank on its machine, as the launcher says; 0 without one."""
    return get_local_rank()


def get_world_rank_from_launcher() -> int:
    """Return this rank, as the launcher says; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def get_world_size_from_launcher() -> int:
    """Return the number of ranks, as the launcher says; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))
