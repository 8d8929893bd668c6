"""Create all process groups except the default one, with the timeout of the group they divide, and look up properties of a group."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_zero.errors import StateError
from hf_zero.system.planning import planning

# torch 2.13 renamed this function; both names are the same.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

MOST_CONNECTED = 16  # largest group in which gloo may connect every pair of ranks
FAKE = "fake"
"""torch's fake back end, on which a memory plan runs: on a CPU it replaces gloo."""

Lines = Sequence[Sequence[int]]  # disjoint groups of ranks of the default group


def exists(group: dist.ProcessGroup) -> bool:
    """Return whether ``group`` has not been destroyed."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


# -- creation ---------------------------------------------------------------------------------------------------------

# Pairs of groups by the divided group and the key of the division, so that two engines share them.
_divided: dict[tuple[dist.ProcessGroup, Any], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def lines_of_all(own: Sequence[int], group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Return the distinct ``own`` of all ranks of ``group`` (default: all ranks), in the order of their first ranks; collective.

    Ranks at equal distances are sent as three numbers: a whole line grows with the world, and each rank would receive all of them.
    """
    if is_pretended(group):
        return _lines_like(own, dist.get_process_group_ranks(group))
    step = own[1] - own[0] if len(own) > 1 else 1
    regular = step > 0 and list(own) == list(range(own[0], own[-1] + 1, step))
    group = group or dist.distributed_c10d._get_default_group()
    device = host_device(group, default_device())
    mine = torch.tensor([own[0], own[-1] + 1, step] if regular else [-1, 0, 0], device=device)
    gathered = torch.empty(3 * dist.get_world_size(group), dtype=mine.dtype, device=device)
    all_gather_single(gathered, mine, group=group)
    numbers = dict.fromkeys(zip(*[iter(gathered.tolist())] * 3, strict=True))  # each line once
    return [list(range(*line)) for line in numbers] if (-1, 0, 0) not in numbers else _irregular_lines(own, group)


def _irregular_lines(own: Sequence[int], group: dist.ProcessGroup | None) -> list[list[int]]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, list(own), group=group)
    return [list(line) for line in dict.fromkeys(tuple(line) for line in gathered)]


def _lines_like(own: Sequence[int], ranks: Sequence[int]) -> list[list[int]]:
    """Return the lines that cover ``ranks`` and have the pattern of ``own``: in a regular mesh one line determines all lines."""
    lines: list[list[int]] = []
    covered: set[int] = set()
    for rank in ranks:
        if rank not in covered:
            lines.append([rank + place - own[0] for place in own])
            covered.update(lines[-1])
    return lines


def divide_twice(
    group: dist.ProcessGroup, key: Any, first: Lines, second: Lines, device: torch.device, backend: str | None = None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's groups of two divisions of ``group``, made once; every rank of the default group makes all of them.

    Args:
        group: The group to divide.
        key: Distinguishes this pair of divisions from others of ``group``.
        first: The lines of the first division.
        second: The lines of the second division.
        device: Device of this rank.
        backend: Name of the second division's back end; None takes the same as for the first.
    """
    for known in [key for key in _divided if not exists(key[0])]:
        del _divided[known]  # entries of a default group that was destroyed
    if (group, key) not in _divided:
        whole = group if list(first) == [dist.get_process_group_ranks(group)] else _divide(group, first, device)
        _divided[group, key] = (whole, _divide(group, second, device, backend))
    return _divided[group, key]


def _divide(group: dist.ProcessGroup, lines: Lines, device: torch.device, backend: str | None = None) -> dist.ProcessGroup:
    """Create a process group of each line, with ``group``'s back end and timeout; return this rank's group."""
    return _make(lines, timeout_of(group, device), backend or backend_with_host(group, device))


def _make(lines: Lines, timeout: timedelta | None, backend: str) -> dist.ProcessGroup:
    """Return this rank's group of ``lines``; every rank in one of the lines must call this with the same lines.

    [Note: groups of others] torch requires ``new_group`` to be called for groups without this rank too. Such a call only counts, because
    groups are named by their number. But on nccl with a device each call takes part in a split of the communicator, once per line of the
    world. So each rank creates only its own group, under the number that the group has in the order of ``lines``.
    """
    counted, made = dist.distributed_c10d._world, None
    for line in lines:
        if dist.get_rank() in line:
            made = _new_group(line, timeout, backend)
        else:
            counted.group_count += 1
    if made is None:
        raise StateError(f"rank {dist.get_rank()} is in none of the groups {list(lines)}")
    return made


def _new_group(ranks: Sequence[int], timeout: timedelta | None, backend: str, alone: bool = False) -> dist.ProcessGroup:
    """Return a new process group of ``ranks``; with ``alone`` only these ranks take part."""
    with _connected_on_use() if len(ranks) > MOST_CONNECTED else contextlib.nullcontext():
        return dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=alone)


@contextlib.contextmanager
def _connected_on_use() -> Iterator[None]:
    """Make gloo groups that are created in the context connect two ranks at their first message.

    [Note: connections of gloo] gloo connects every pair of ranks when a group is made: on 4096 ranks as many sockets in every process,
    where 1024 open files are a common limit. Votes and rings need only a few. An environment variable is the only switch; the user's value
    wins.
    """
    name = "TORCH_GLOO_LAZY_INIT"
    if name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]


def copy_group(group: dist.ProcessGroup, device: torch.device, backend: str, crossed: bool) -> dist.ProcessGroup:
    """Return another process group of the ranks of ``group``, with its timeout; collective.

    Args:
        group: Group of the ranks.
        device: Device of this rank.
        backend: Name of the new group's back end.
        crossed: Ranks outside the group copy their own groups at the same time.
    """
    own, timeout = dist.get_process_group_ranks(group), timeout_of(group, device)
    if own == list(range(dist.get_world_size())):
        return _new_group(own, timeout, backend)
    if not crossed:
        return _new_group(own, timeout, backend, alone=True)
    return _make(lines_of_all(own), timeout, backend)  # every rank has to take part in the creation of every group


# Meshes by default group and shape: a script that creates another Accelerator gets the same groups again.
_meshes: dict[tuple[dist.ProcessGroup, Any], DeviceMesh] = {}


def device_mesh(sizes: Mapping[str, int], device_type: str, joint: Mapping[str, Sequence[str]]) -> DeviceMesh:
    """Return all ranks as torch's mesh with named dimensions, for libraries that need one; created once per shape, collective.

    Args:
        sizes: Size by name, outermost first; their product is the number of ranks.
        device_type: "cpu", "cuda" or another device type.
        joint: Further names, each for several dimensions together.
    """
    for known in [key for key in _meshes if not exists(key[0])]:
        del _meshes[known]
    shape = (tuple(sizes.items()), device_type, tuple((name, tuple(parts)) for name, parts in joint.items()))
    key = dist.distributed_c10d._get_default_group(), shape
    if key not in _meshes:
        mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        for name, parts in joint.items():
            mesh[tuple(parts)]._flatten(name)
        _meshes[key] = mesh
    return _meshes[key]


# -- properties -------------------------------------------------------------------------------------------------------


def default_store() -> dist.Store | None:
    """Return the store in which the ranks of the default group met; None without a default group, or if its back end needs none (mpi)."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return the timeout with which the group was created (``new_group`` would take the library's default); None if it is unknown."""
    for of in (device, torch.device("cpu")):  # a host back end serves a device that has none of its own
        with contextlib.suppress(RuntimeError):
            return getattr(getattr(group._get_backend(of), "options", None), "_timeout", None)
    return None


def serving_backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the back end that carries tensors of ``device``; a group may have one per device type (``cpu:gloo,cuda:nccl``)."""
    served = _served(group)
    if is_pretended(group):
        return "gloo" if device.type == "cpu" else FAKE
    # A host back end serves a device that has none of its own.
    return served.get(device.type) or served.get("cpu") or str(dist.get_backend(group))


def backend_with_host(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the back end for another group like ``group`` that also carries host tensors over gloo, so that votes and objects wait
    for no device.
    """
    if FAKE in _served(group).values():
        return str(dist.get_backend_config(group))
    backend = serving_backend(group, device)
    return str(dist.get_backend(group)) if device.type == "cpu" or backend == "gloo" else f"cpu:gloo,{device.type}:{backend}"


def is_pretended(group: dist.ProcessGroup | None) -> bool:
    """Return whether ``group`` (default: all ranks) belongs to a memory plan, whose other ranks do not exist."""
    return planning() and FAKE in _served(group or dist.distributed_c10d._get_default_group()).values()


def host_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return the device for small messages: the host if the group carries host tensors, which wait for no device; otherwise
    ``device``.
    """
    return torch.device("cpu") if "cpu" in _served(group) else device


def _served(group: dist.ProcessGroup) -> dict[str, str]:
    if group is not None and not exists(group):
        raise StateError(
            "the process group has been destroyed (by accelerator.end_training() or torch.distributed.destroy_process_group()), so the "
            "ranks cannot send each other values any more. Train, gather parameters, save and load before that call"
        )
    config = dist.get_backend_config(group)
    return dict(part.split(":") for part in config.split(",") if ":" in part)


def default_device() -> torch.device:
    """Return the accelerator that the script has made current, otherwise the one of this local rank; the CPU without accelerators."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    return torch.device(accelerator.type, _chosen_index(accelerator) or int(os.environ.get("LOCAL_RANK", "0")) % max(count, 1))


def _chosen_index(accelerator: torch.device) -> int:
    """Return the index of the current device; 0 if the script has not chosen one. Does not initialise the device."""
    started = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    return 0 if started is not None and not started() else torch.accelerator.current_device_index()
