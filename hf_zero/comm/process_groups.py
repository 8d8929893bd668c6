"""Process groups: every further one is made here, with the timeout of the group it divides; and what a group tells of itself."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_zero.system.planning import planning

FAKE = "fake"
"""torch's back end without peers, on which a plan runs: on a CPU it stands for gloo."""

Lines = Sequence[Sequence[int]]  # ranks of the default group, in groups that do not overlap


def exists(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` has not been destroyed."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


# -- making -----------------------------------------------------------------------------------------------------------

# Pairs of groups by the group that was divided and how: two engines share them.
_divided: dict[tuple[dist.ProcessGroup, Any], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def lines_of_all(own: Sequence[int], group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """The different ``own`` of all ranks of ``group`` (default: all ranks), in the order of their first ranks; collective."""
    if planning():
        return _lines_like(own, dist.get_process_group_ranks(group))
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, list(own), group=group)
    return [list(line) for line in dict.fromkeys(tuple(line) for line in told)]


def _lines_like(own: Sequence[int], ranks: Sequence[int]) -> list[list[int]]:
    """Lines of the shape of ``own`` that cover ``ranks``: in a regular mesh one follows from the other."""
    lines: list[list[int]] = []
    for rank in ranks:
        if not any(rank in line for line in lines):
            lines.append([rank + place - own[0] for place in own])
    return lines


def divide_twice(
    group: dist.ProcessGroup, key: Any, first: Lines, second: Lines, device: torch.device, backend: str | None = None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's groups of two divisions of ``group``, made once; every rank of the default group makes all of them.

    Args:
        group: What is divided.
        key: Tells this pair of divisions from others of ``group``.
        first: The lines of the first division.
        second: The lines of the second one.
        device: Of this rank.
        backend: Name of the second one's back end; None takes the one that fits.
    """
    for known in [key for key in _divided if not exists(key[0])]:
        del _divided[known]  # of a default group that was destroyed
    if (group, key) not in _divided:
        whole = group if list(first) == [dist.get_process_group_ranks(group)] else _divide(group, first, device)
        _divided[group, key] = (whole, _divide(group, second, device, backend))
    return _divided[group, key]


def _divide(group: dist.ProcessGroup, lines: Lines, device: torch.device, backend: str | None = None) -> dist.ProcessGroup:
    """Makes a process group of each line, with ``group``'s back end and timeout, and returns this rank's."""
    return _make(lines, timeout_of(group, device), backend or backend_with_host(group, device))


def _make(lines: Lines, timeout: timedelta | None, backend: str) -> dist.ProcessGroup:
    made = [dist.new_group(list(line), timeout=timeout, backend=backend) for line in lines]
    return next(part for line, part in zip(lines, made, strict=True) if dist.get_rank() in line)


def copy_group(group: dist.ProcessGroup, device: torch.device, backend: str, crossed: bool) -> dist.ProcessGroup:
    """Another process group of the ranks of ``group``, with its timeout; collective.

    Args:
        group: The ranks.
        device: Of this rank.
        backend: Name of the new group's back end.
        crossed: Ranks outside the group make copies of theirs in the same moment.
    """
    own, timeout = dist.get_process_group_ranks(group), timeout_of(group, device)
    if own == list(range(dist.get_world_size())):
        return dist.new_group(own, timeout=timeout, backend=backend)
    if not crossed:
        return dist.new_group(own, timeout=timeout, backend=backend, use_local_synchronization=True)
    return _make(lines_of_all(own), timeout, backend)  # every rank has to take part in making every group


def device_mesh(sizes: Mapping[str, int], device_type: str, joint: Mapping[str, Sequence[str]]) -> DeviceMesh:
    """All ranks as torch's mesh of named dimensions, for libraries that take one; collective.

    Args:
        sizes: Size by name, from the outside in; their product is the number of ranks.
        device_type: "cpu", "cuda", ...
        joint: Further names, each of several dimensions together.
    """
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name, parts in joint.items():
        mesh[tuple(parts)]._flatten(name)
    return mesh


# -- asking -----------------------------------------------------------------------------------------------------------


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout the group was created with; ``new_group`` would take the library's default otherwise. None if it does not tell."""
    for of in (device, torch.device("cpu")):  # a back end of the host serves a device that has none of its own
        with contextlib.suppress(RuntimeError):
            return getattr(getattr(group._get_backend(of), "options", None), "_timeout", None)
    return None


def serving_backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the back end that carries tensors of ``device``; a group may have one per device type (``cpu:gloo,cuda:nccl``)."""
    served = _served(group)
    if FAKE in served.values():
        return "gloo" if device.type == "cpu" else FAKE
    # A host's back end serves a device that has none of its own.
    return served.get(device.type) or served.get("cpu") or str(dist.get_backend(group))


def backend_with_host(group: dist.ProcessGroup, device: torch.device) -> str:
    """Back end for another group like ``group`` that carries host tensors over gloo besides: votes and objects wait for no device."""
    if FAKE in _served(group).values():
        return str(dist.get_backend_config(group))
    backend = serving_backend(group, device)
    return str(dist.get_backend(group)) if device.type == "cpu" or backend == "gloo" else f"cpu:gloo,{device.type}:{backend}"


def host_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where small messages lie: the host if the group carries host tensors, which then wait for no device; else ``device``."""
    return torch.device("cpu") if "cpu" in _served(group) else device


def _served(group: dist.ProcessGroup) -> dict[str, str]:
    config = dist.get_backend_config(group)
    return dict(part.split(":") for part in config.split(",") if ":" in part)
