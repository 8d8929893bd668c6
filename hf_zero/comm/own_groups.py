"""Make process groups that only the engine uses, so that a script's operations never come between the engine's collectives."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist

from hf_zero.comm.process_groups import backend_with_host, copy_group, exists
from hf_zero.comm.topology import Topology

Purpose = Literal["gathers", "reductions", "files"]

# [Note: the engine's own groups] nccl needs the collectives of one communicator in the same order on all ranks. A script's collectives
# inside a forward (SyncBatchNorm, losses over all ranks) come in the order of the script; gathers come in the order of the unshard pass,
# which may be ahead by a different distance on each rank. So the engine does not share the script's group. Gathers and reductions have a
# common order ([Note: one order]) but a group each, because a group carries one collective at a time. Groups are made once per group of the
# script and kept: a later engine takes the same ones.
_made: dict[tuple[dist.ProcessGroup, Purpose], Topology] = {}
_users: dict[dist.ProcessGroup, int] = {}


def own_topology(topology: Topology, purpose: Purpose = "gathers") -> Topology:
    """Return the ranks of ``topology`` in a process group of the engine's own; created at the first call, collective then.

    Votes and objects are sent over the group for gathers.
    """
    joint = own_topology(topology.joint, purpose) if topology.joint is not None and purpose == "gathers" else topology.joint
    if topology.world == 1:
        return replace(topology, joint=joint)
    for gone in [key for key in _made if not exists(key[0])]:
        del _made[gone]  # entries of a default group that was destroyed
    key = topology.group, purpose
    if key not in _made:
        alone = str(dist.get_backend(topology.group))
        # Files are in host memory, and a thread sends them.
        backend = {"gathers": backend_with_host(topology.group, topology.device), "files": "gloo"}.get(purpose, alone)
        crossed = any(axis is not None for axis in (topology.model, topology.joint, topology.expert))
        group = copy_group(topology.group, topology.device, backend, crossed)
        _made[key] = replace(topology, group=group, script_group=topology.group)
    return replace(topology, group=_made[key].group, script_group=topology.group, joint=joint)


def borrow(topology: Topology) -> None:
    """Add one user of a group of the engine's own; ``give_back`` removes one."""
    _users[topology.group] = _users.get(topology.group, 0) + 1


def give_back(topology: Topology) -> None:
    """Remove one user, and destroy the group with its last user; collective."""
    left = _users.get(topology.group, 0) - 1
    _users[topology.group] = left
    if left > 0 or topology.script_group is None:
        return
    del _users[topology.group]
    for key in [key for key, made in _made.items() if made.group is topology.group]:
        del _made[key]
    if exists(topology.group):
        if topology.device.type != "cpu":
            torch.accelerator.synchronize(topology.device)  # destroying the group would abort work that runs on the device
        dist.destroy_process_group(topology.group)
