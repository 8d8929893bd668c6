"""Describe the ranks of an engine as named axes: the axis that ZeRO shards over, its replicas, model parallelism, sequence parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from hf_zero.comm.bootstrap import init_distributed
from hf_zero.comm.process_groups import default_device, divide_twice, exists, lines_of_all, timeout_of
from hf_zero.errors import ConfigError, UnsupportedError

Axis = Literal["model", "sequence"]


@dataclass(frozen=True)
class Topology:
    """The axis that an engine shards over, and the further axes through this rank by name.

    [Note: order of axes] From the outermost to the innermost: ``replicate``, the axis itself, ``sequence`` (inside it), ``model``. Adjacent
    ranks are near each other, so the axis that communicates most often is innermost.

    Attributes:
        group: Process group of the axis.
        rank: This process' position on the axis.
        world: Number of ranks on the axis.
        device: Device that parameters and collectives use on this rank.
        replica: Index of this rank's replica among the ranks, or groups of ranks, that train on samples of their own.
        model: The ranks that hold one model together (tensor parallelism, pipelines), across the axis; None if each rank holds all of it.
        sequence: The ranks that hold slices of the same sequences; None where sequences are whole.
        replicate: The ranks that hold the same shards, one of each shard group; None where the axis is all data-parallel ranks.
        joint: All data-parallel ranks, if the axis is only a part of them; else None.
        expert: The ranks that hold all experts of a layer together (expert parallelism): some ranks of the axis, each with the ranks that
            hold layers together with it; None where each rank holds all experts.
        expert_data: The ranks of the axis that hold the same experts; None if each rank holds all, and on that axis itself.
        script_group: The script's group of the same ranks, where ``group`` is one of the engine's own.
        pipe: The ranks of a pipeline: one per stage, at this rank's position in the stage; None without a pipeline.
        tensor: In a pipeline, the ranks that hold each layer of this stage together; None where each rank holds whole layers.
        parts: In a pipeline with experts, the ranks that hold all parts of one model together: those of ``expert`` in every stage.
        same_slice: The ranks that hold the same slice of other sequences, one of each group of ``sequence``, for scripts; None where
            sequences are whole, and where a script's groups do not cover all ranks.
    """

    group: dist.ProcessGroup
    rank: int
    world: int
    device: torch.device
    replica: int
    model: Topology | None = None
    sequence: Topology | None = None
    replicate: Topology | None = None
    joint: Topology | None = None
    expert: Topology | None = None
    expert_data: Topology | None = None
    script_group: dist.ProcessGroup | None = None
    pipe: Topology | None = None
    tensor: Topology | None = None
    parts: Topology | None = None
    same_slice: dist.ProcessGroup | None = None

    def axis(self, name: Axis) -> Topology | None:
        """Return the axis of that name through this rank."""
        return self.model if name == "model" else self.sequence

    @property
    def data(self) -> Topology:
        """Return all data-parallel ranks as one axis: gradients are averaged over them, and their votes must agree."""
        return self.joint or self

    @property
    def layers(self) -> Topology:
        """Return the same axes, with only tensor parallelism on the model axis: the ranks that hold each layer together."""
        return self if self.pipe is None else replace(self, model=self.tensor)

    @property
    def copies(self) -> bool:
        """Return whether other ranks may hold copies of parameters of this axis: data-parallel ranks, or ranks of the model axis."""
        return self.data.world > 1 or self.model is not None

    @property
    def replicas(self) -> int:
        """Return the data-parallel size: the number of ranks, or groups of ranks, that train on samples of their own."""
        return self.data.world if self.sequence is None else self.data.world // self.sequence.world

    @property
    def expert_places(self) -> int:
        """Return the number of adjacent positions on the data-parallel axis that hold all experts of a layer together; 1 if each has
        all.
        """
        if self.expert is None:
            return 1
        layers = self.layers.model
        return self.expert.world // (layers.world if layers is not None else 1)

    @property
    def all_parts(self) -> Topology | None:
        """Return the ranks that together hold one model with its experts, if they are more than the model axis; None without experts."""
        return self.parts or self.expert

    @property
    def of_experts(self) -> bool:
        """Return whether this is the axis of the ranks that hold the same experts."""
        return self.expert is not None and self.expert_data is None

    @property
    def public_group(self) -> dist.ProcessGroup:
        """Return the group of these ranks that scripts may use."""
        return self.script_group or self.group

    @property
    def sample_group(self) -> dist.ProcessGroup | None:
        """Return the group of the ``replicas`` ranks that train on samples of their own, this rank included; None if no such group was
        made.
        """
        return self.data.public_group if self.sequence is None else self.same_slice

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks of the axis, numbered as in the default group."""
        return tuple(dist.get_process_group_ranks(self.group))


def axis_over(group: dist.ProcessGroup, device: torch.device | None = None) -> Topology:
    """Return the ranks of ``group`` as an axis without further axes."""
    rank = dist.get_rank(group)
    return Topology(group, rank, dist.get_world_size(group), device or default_device(), rank)


def build_topology(
    group: dist.ProcessGroup | None = None, device: torch.device | None = None, model_parallel: int = 1, replicate: int = 1
) -> Topology:
    """Return the data-parallel axes over ``group`` (default: all ranks), created if no process group exists yet; collective.

    Args:
        group: Group of the ranks to divide into axes.
        device: Device of this rank; None is ``default_device()``.
        model_parallel: Number of adjacent ranks that hold one model together; the ranks at the same position among them form the
            data-parallel axis.
        replicate: Number of shard groups among the data-parallel ranks; see ``divide_replicas``.

    Raises:
        ConfigError: ``model_parallel`` does not divide the number of ranks, or ``replicate`` the number of data-parallel ranks.
    """
    if replicate > 1:
        return divide_replicas(build_topology(group, device, model_parallel), replicate)
    init_distributed()
    group = group if group is not None else all_ranks()
    device = device or default_device()
    if model_parallel <= 1:
        return axis_over(group, device)
    ranks = dist.get_process_group_ranks(group)
    require_divisor(model_parallel, len(ranks), "tensor_parallel.autotp_size")
    data = [ranks[place::model_parallel] for place in range(model_parallel)]
    groups = divide_twice(group, ("model", model_parallel), data, _adjacent(ranks, model_parallel), device)
    return record_newest("model", join_topologies(*groups, device))


def topology_around(model: Sequence[int]) -> Topology:
    """Return the axes of all ranks where the ranks ``model``, this one included, hold one model together; collective.

    The ranks at the same position in their groups form the data-parallel axis.

    Args:
        model: Ranks of the default group.

    Raises:
        ConfigError: The groups of all ranks are not of one size, or overlap.
    """
    init_distributed()
    lines, everyone = lines_of_all(model), list(range(dist.get_world_size()))
    size = len(lines[0])
    if any(len(line) != size for line in lines) or sorted(sum(lines, [])) != everyone:
        raise ConfigError(f"the ranks that hold one model together must be groups of one size that do not overlap; they are {lines}")
    if sum(lines, []) == everyone:
        return build_topology(model_parallel=size)
    data, device = [[line[place] for line in lines] for place in range(size)], default_device()
    return record_newest("model", join_topologies(*divide_twice(all_ranks(), tuple(map(tuple, lines)), data, lines, device), device))


def join_topologies(data: dist.ProcessGroup, model: dist.ProcessGroup, device: torch.device | None = None) -> Topology:
    """Return the data-parallel and the model axis over two process groups, such as those of an ``mpu`` object."""
    return replace(axis_over(data, device), model=axis_over(model, device))


def divide_replicas(topology: Topology, count: int, key: str = "dp_replicate_size") -> Topology:
    """Return the data-parallel axis of ``topology`` divided into ``count`` shard groups of adjacent ranks, each with a whole set of shards;
    collective.

    Args:
        topology: Axes whose data-parallel axis is not divided yet.
        count: Number of shard groups; 1 returns ``topology`` unchanged.
        key: Name of the setting that requests it, for messages.

    Raises:
        ConfigError: ``count`` does not divide the data-parallel ranks.
    """
    require_divisor(count, topology.world, key, "data-parallel ranks")
    if count == 1:
        return topology
    size, device = topology.world // count, topology.device
    axes = lines_of(topology)
    inside = [line for axis in axes for line in _adjacent(axis, size)]
    across = [axis[place::size] for axis in axes for place in range(size)]
    shard, replicate = divide_twice(topology.group, ("replicate", count), inside, across, device)
    return replace(
        topology,
        group=shard,
        rank=dist.get_rank(shard),
        world=size,
        replicate=replace(axis_over(replicate, device), joint=topology),
        joint=topology,
    )


def lines_of(topology: Topology) -> list[list[int]]:
    """Return the ranks of all lines of the data-parallel axis, this rank's included; collective if there is more than one line."""
    ranks = list(topology.ranks)
    return [ranks] if len(ranks) == dist.get_world_size() else lines_of_all(ranks)


def sequence_topology(size: int, key: str = "sequence_parallel_size") -> Topology:
    """Return the axes of all ranks where ``size`` adjacent ranks share their samples; collective the first time.

    Args:
        size: Number of ranks of a group, at least 2.
        key: Name of the setting that requests it, for messages.

    Raises:
        ConfigError: ``size`` does not divide the number of ranks.
    """
    init_distributed()
    group, ranks = all_ranks(), list(range(dist.get_world_size()))
    require_divisor(size, len(ranks), key, "rank(s)", least=2)
    lines = _adjacent(ranks, size)
    # [Note: cpu:gloo] The differentiable all_gather of torch.distributed.nn, with which scripts join losses, takes a group's ranks for
    # global ranks if the group's back end is named "gloo"; under this other name it takes another path, which is correct.
    backend = "cpu:gloo" if len(lines) > 1 and str(dist.get_backend()) == "gloo" else None
    same_slice, sequence = divide_twice(group, ("sequence", size), _across(lines), lines, default_device(), backend)
    topology = replace(axis_over(group), sequence=axis_over(sequence), same_slice=same_slice, replica=dist.get_rank() // size)
    return record_newest("sequence", topology)


def context_topology(base: Topology, context: int, sequence: int = 1) -> tuple[Topology, Topology, Topology | None]:
    """Return ``base`` with an axis of the ranks that share sequences through context parallelism, and the parts of that axis; collective.

    Args:
        base: Axes whose data-parallel axis is not divided yet, maybe with a model axis.
        context: Number of ranks among which keys and values are gathered.
        sequence: Number of adjacent ranks inside each of these positions that exchange heads (sequence parallelism).

    Returns:
        ``base`` with the ``context * sequence`` adjacent ranks of its axis as ``sequence``; the ``context`` ranks at this rank's position
        among the ranks that exchange heads; and the ranks that exchange heads, or None if ``sequence`` is 1.

    Raises:
        ConfigError: ``context * sequence`` does not divide the ranks of the axis.
    """
    size, device = context * sequence, base.device
    key = "hf_zero.context_parallel_size" + (" x sequence_parallel_size" if sequence > 1 else "")
    require_divisor(size, base.world, key, "data-parallel ranks", least=2)
    axes = lines_of(base)
    together = [line for axis in axes for line in _adjacent(axis, size)]
    apart = [line for axis in axes for line in _across(_adjacent(axis, size))]
    backend = "cpu:gloo" if len(together) > 1 and str(dist.get_backend()) == "gloo" else None  # [Note: cpu:gloo]
    same_slice, joint = divide_twice(base.group, ("context", size), apart, together, device, backend)
    topology = record_newest("sequence", replace(base, sequence=axis_over(joint, device), same_slice=same_slice, replica=base.rank // size))
    if sequence == 1:
        return topology, axis_over(joint, device), None
    across = [line[place::sequence] for line in together for place in range(sequence)]
    inside = [part for line in together for part in _adjacent(line, sequence)]
    groups = divide_twice(base.group, ("context", size, sequence), across, inside, device)
    return topology, axis_over(groups[0], device), axis_over(groups[1], device)


def join_sequence(sequence: dist.ProcessGroup, joint: dist.ProcessGroup) -> Topology:
    """Return all ranks of ``joint`` with the sequence axis ``sequence``, two process groups of the caller; collective over ``joint``.

    Raises:
        ConfigError: The sequence groups of all ranks are not of one size, or overlap.
    """
    own = dist.get_process_group_ranks(sequence)
    lines = lines_of_all(own, joint)
    if any(len(line) != len(own) for line in lines) or sum(map(len, lines)) != dist.get_world_size(joint):
        raise ConfigError(f"sequence-parallel groups must be of one size and not overlap; they are {lines}")
    ranks, same_slice = dist.get_process_group_ranks(joint), None
    if len(ranks) == dist.get_world_size():
        key = ("same slice", tuple(map(tuple, lines)))
        _, same_slice = divide_twice(joint, key, [ranks], _across(lines), default_device())
    topology = replace(axis_over(joint), sequence=axis_over(sequence), same_slice=same_slice, replica=lines.index(own))
    return record_newest("sequence", topology)


def joint_topology(topology: Topology) -> Topology:
    """Return all ranks of the data-parallel and the model axes together, which save and load as one.

    Raises:
        UnsupportedError: The two axes do not cover all ranks of the default group.
    """
    data = topology.data
    if topology.model is None or topology.model.world == 1:
        return data
    if data.world * topology.model.world != dist.get_world_size():
        raise UnsupportedError(
            f"{data.world} data-parallel x {topology.model.world} model-parallel ranks are not the {dist.get_world_size()} "
            "ranks of the default process group; a checkpoint needs all of them"
        )
    return axis_over(all_ranks(), topology.device)


def group_timeout(topology: Topology) -> timedelta:
    """Return the timeout of the axis' group, or the library's default if the group does not report one."""
    return timeout_of(topology.group, topology.device) or dist.constants.default_pg_timeout


def all_ranks() -> dist.ProcessGroup:
    """Return the default process group.

    Raises:
        ConfigError: There is no default group.
    """
    group = dist.group.WORLD
    if group is None:
        raise ConfigError("there is no default process group")
    return group


def _across(lines: list[list[int]]) -> list[list[int]]:
    """Return, for each position, the ranks at that position in lines of one size."""
    return [list(ranks) for ranks in zip(*lines, strict=True)]


def _adjacent(ranks: list[int], size: int) -> list[list[int]]:
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]


def require_divisor(size: int, world: int, key: str, ranks: str = "ranks", least: int = 1, usable: Sequence[int] = ()) -> None:
    """Raise unless ``size`` divides ``world``; the message names ``key`` and lists valid sizes, or ``usable`` ones.

    Raises:
        ConfigError: ``size`` does not divide ``world``, or is below ``least``.
    """
    if size < least or world % size:
        fits = ", ".join(str(found) for found in usable or range(min(least, world), world + 1) if world % found == 0)
        raise ConfigError(f"{key} is {size}, which does not divide the {world} {ranks}; {fits} would")


_newest_with: dict[Axis, Topology] = {}


def record_newest(axis: Axis, topology: Topology) -> Topology:
    """Record ``topology`` as the newest one with ``axis``, and return it."""
    _newest_with[axis] = topology
    return topology


def newest_with(axis: Axis) -> Topology | None:
    """Return the newest topology that has ``axis``, for libraries without access to an engine; None if its groups are destroyed or there
    is none.
    """
    found = _newest_with.get(axis)
    further = found.axis(axis) if found is not None else None
    return found if further is not None and exists(further.group) else None


def newest_axis(axis: Axis) -> Topology | None:
    """Return this axis of the newest topology that has it; None in the same cases as ``newest_with``."""
    newest = newest_with(axis)
    return newest.axis(axis) if newest is not None else None
