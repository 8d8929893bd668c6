"""Implement `deepspeed.comm`: create the process group, return ranks and sizes, and log collectives (`configure`, `log_summary`).

The collectives of `deepspeed.comm` are in `collectives.py`.
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
from hf_zero.comm.back_end import build_collectives
from hf_zero.comm.comms_log import CommsLogSettings, CommsRow, current_log, start_log, stop_log, table_text
from hf_zero.comm.process_groups import default_device, device_mesh
from hf_zero.comm.topology import build_topology
from hf_zero.config.read import read_config
from hf_zero.config.resolve import resolve
from hf_zero.observe import global_rank, warn_once


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


def get_global_rank(group: dist.ProcessGroup | None = None, group_rank: int = 0) -> int:
    """Return the global rank of rank ``group_rank`` of ``group`` (default: all ranks)."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def barrier(
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    prof: bool = False,
    log_name: str = "barrier",
    debug: str | None = None,
) -> Any:
    """Wait for all ranks of ``group``; return immediately in a process without a group. The last three arguments have no effect."""
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


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Turn the log of collectives on or off for engines that are made later; arguments take precedence over the section ``comms_logger``.

    Args:
        deepspeed_config: Path, dict, JSON or base64 text; only its ``comms_logger`` section is read.
        enabled: Whether to record collectives.
        prof_all: Whether to record every operation.
        prof_ops: Names of the operations to record if ``prof_all`` is False.
        verbose: Whether to log every call on rank 0.
        debug: Whether to record calls separately by unit and phase.

    Raises:
        ConfigError: An operation is unknown.
    """
    given = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    values = {name: value for name, value in given.items() if value is not None}
    written = (read_config(deepspeed_config).get("comms_logger") or {}) if deepspeed_config is not None else {}
    section = resolve({"train_micro_batch_size_per_gpu": 1, "comms_logger": {**written, **values}}, world_size=1).config.comms_logger
    if section is None or not section.enabled:
        stop_log()
        return
    start_log(CommsLogSettings.of(section))


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print the table of all recorded collectives, on rank 0; collective with ``show_straggler``.

    Args:
        show_straggler: Whether to compare ranks: for each operation the rank that arrived last, and how much longer this rank took.
        return_dict: Whether to return the numbers too, on every rank.

    Returns:
        With ``return_dict`` a dict: operation -> bytes of a message -> count, milliseconds and Gbit/s; otherwise None.
    """
    log = current_log()
    if log is None:
        warn_once("log_summary(): nothing is recorded; set comms_logger.enabled in the configuration before initialize()")
        return {} if return_dict else None
    by_rank = None
    if show_straggler and dist.is_initialized():
        by_rank = build_collectives(build_topology()).gather_objects(log.seconds_by_kind(), "traffic log")
    rows = log.rows(by_rank)
    if global_rank() == 0:
        print(table_text(rows) if rows else "comms_logger: no collective was recorded (one rank has none)", flush=True)
    return _numbers(rows) if return_dict else None


def _numbers(rows: list[CommsRow]) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    for row in rows:
        name = f"{row.kind.operation} ({row.kind.caller})" if row.kind.caller else row.kind.operation
        entry = {
            "count": row.tally.count,
            "total_latency_ms": 1e3 * row.tally.seconds,
            "avg_latency_ms": 1e3 * row.average,
            "waited_ms": 1e3 * row.tally.waited,
            "tput_avg_gbps": row.algorithm_bandwidth * 8e-9,
            "busbw_avg_gbps": row.bus_bandwidth * 8e-9,
        }
        if row.fastest is not None:
            entry.update(straggler_ms=1e3 * (row.tally.seconds - row.least), last_to_arrive=row.fastest)
        numbers.setdefault(name, {})[row.kind.nbytes] = entry
    return numbers
