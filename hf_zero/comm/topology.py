"""The default process group and the groups the engine works in: every process group is created here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.comm.store import store_at_address
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.launch.placement import export_placement, require_address
from hf_zero.observe import log_rank0

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Topology:
    """The data-parallel axis this engine shards over.

    Attributes:
        group: Process group of the axis.
        rank: This process' position on the axis.
        world: Number of ranks on the axis.
        device: Device that parameters and collectives use on this rank.
        model: The ranks that hold one model together (tensor parallelism); None where each rank has it all.
        script_group: The script's group of the same ranks, where ``group`` is one of the engine's own.
    """

    group: dist.ProcessGroup
    rank: int
    world: int
    device: torch.device
    model: Topology | None = None
    script_group: dist.ProcessGroup | None = None

    @property
    def public_group(self) -> dist.ProcessGroup:
        """The group of these ranks that scripts may use."""
        return self.script_group or self.group

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the axis, as the default group counts them."""
        return tuple(dist.get_process_group_ranks(self.group))


def default_device() -> torch.device:
    """The accelerator that the script has made the current one, else that of this local rank; the CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    return torch.device(accelerator.type, _chosen_index(accelerator) or int(os.environ.get("LOCAL_RANK", "0")) % max(count, 1))


def _chosen_index(accelerator: torch.device) -> int:
    """Index of the current device; 0 where nobody has chosen one. Nothing is started to find that out."""
    started = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    return 0 if started is not None and not started() else torch.accelerator.current_device_index()


def default_backend() -> str:
    """The backend torch.distributed recommends for the device of this rank (nccl, xccl, ...); gloo on a CPU, and where there is none."""
    device = default_device()
    try:
        return "gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device)
    except ValueError:
        return "gloo"


def default_timeout() -> timedelta:
    """Time a collective may take. ``DEEPSPEED_TIMEOUT`` (minutes) is honoured; else torch.distributed's default."""
    minutes = os.environ.get("DEEPSPEED_TIMEOUT")
    if minutes is not None:
        try:
            return timedelta(minutes=float(minutes))
        except ValueError:
            raise ConfigError(f"environment variable DEEPSPEED_TIMEOUT is {minutes!r}, a number of minutes is allowed") from None
    return dist.constants.default_pg_timeout


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
    """Creates the default torch.distributed group when there is none.

    This rank's device is made the current one, also where a script has made the group: torch.distributed sends objects from the current
    device, which is the first one on all ranks until somebody says otherwise. A device that the script has chosen itself stays.

    The arguments are those of DeepSpeed's function of the same name. Ranks come from RANK, WORLD_SIZE, ... or, under mpirun and srun,
    from what these set (``hf_zero.launch.placement``). Without a launcher's environment the process becomes a group of one, with no
    port opened.

    Args:
        dist_backend: Name of a torch.distributed backend; None takes the device's own.
        auto_mpi_discovery: Look at the variables of mpirun and srun when RANK is not set.
        distributed_port: Port of rank 0 when the environment names no MASTER_PORT.
        verbose: Log one line on rank 0.
        timeout: Longest time a collective may take.
        init_method: Passed to torch.distributed.
        dist_init_required: False with no group is an error; None and True create one.
        config: Accepted; nothing is read from it.
        rank: Rank, when the environment is not to be asked.
        world_size: Number of ranks, likewise.

    Raises:
        ConfigError: The environment is incomplete, or no group exists and ``dist_init_required`` is False.
    """
    device = default_device()
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise ConfigError("dist_init_required is False but there is no torch.distributed process group; create one first or pass None")
    if auto_mpi_discovery and init_method is None and rank < 0:
        export_placement(port=distributed_port)
    backend = dist_backend or default_backend()
    timeout = timeout or default_timeout()
    if init_method is None and rank < 0 and "RANK" not in os.environ:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but RANK is not set; start with torchrun or accelerate launch")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        require_address(os.environ)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
        missing = [name for name in _RENDEZVOUS if name not in os.environ]
        if init_method is None and rank < 0 and missing:
            raise ConfigError(f"environment variables {', '.join(missing)} are missing; start with torchrun or accelerate launch")
        store = (_store_of_attempt(timeout) or store_at_address(timeout)) if init_method is None and rank < 0 else None
        if store is not None:
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, init_method=init_method, store=store, rank=rank, world_size=world_size, timeout=timeout)
    if verbose:
        log_rank0("process group: backend %s, %d rank(s), timeout %s", backend, dist.get_world_size(), timeout)


_groups_made = 0


def _store_of_attempt(timeout: timedelta) -> dist.Store | None:
    """The part of torchrun's store that belongs to this attempt; None where torchrun has made no store.

    [Note: stores of restarted runs] The ranks of a restarted run meet in the store of the launcher, which may be that of the attempt
    before: a rank then finds the address of one that is dead, and the attempt fails (accelerate's launcher always, torchrun at
    times). Attempts are counted alike on one machine only; on several ones PyTorch's own way stays. The groups
    of one process are counted too: after ``destroy_process_group`` (``accelerator.end_training`` does it) the next group would find
    the addresses of the last.
    """
    global _groups_made
    variables = os.environ
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or variables.get("GROUP_WORLD_SIZE") != "1":
        return None
    address, port, world = variables["MASTER_ADDR"], int(variables["MASTER_PORT"]), int(variables["WORLD_SIZE"])
    store = dist.TCPStore(address, port, world, is_master=False, timeout=timeout)
    _groups_made += 1
    return dist.PrefixStore(f"attempt_{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}_group_{_groups_made}", store)


def build_topology(group: dist.ProcessGroup | None = None, device: torch.device | None = None, model_parallel: int = 1) -> Topology:
    """The data-parallel axis over ``group`` (default: all ranks), created if no process group exists yet; collective.

    Args:
        group: The ranks to divide into axes.
        device: Device of this rank; None asks ``default_device``.
        model_parallel: This many adjacent ranks hold one model together; the ranks with the same place among them form the
            data-parallel axis.

    Raises:
        ConfigError: ``model_parallel`` does not divide the number of ranks.
    """
    init_distributed()
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise ConfigError("there is no default process group")
    device = device or default_device()
    if model_parallel <= 1:
        return _axis(group, device)
    world = dist.get_world_size(group)
    if world % model_parallel:
        usable = ", ".join(str(size) for size in range(1, world + 1) if world % size == 0)
        raise ConfigError(f"tensor_parallel.autotp_size is {model_parallel}, which does not divide the {world} ranks; {usable} would")
    return _remember(_cross(group, model_parallel), device)


def topology_around(model: Sequence[int]) -> Topology:
    """The axes of all ranks where ``model``, this rank among them, hold one model together; collective.

    The ranks with the same place in their groups form the data-parallel axis.

    Args:
        model: Ranks of the default group.

    Raises:
        ConfigError: The groups of all ranks are not of one size, or overlap.
    """
    init_distributed()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(model))
    lines = [list(line) for line in dict.fromkeys(tuple(line) for line in everyone)]
    size = len(lines[0])
    if any(len(line) != size for line in lines) or sorted(rank for line in lines for rank in line) != list(range(len(everyone))):
        raise ConfigError(f"the ranks that hold one model together must be groups of one size that do not overlap; they are {lines}")
    group = dist.group.WORLD
    if group is None or sum(lines, []) == list(range(len(everyone))):
        return build_topology(model_parallel=size)
    data = [[line[place] for line in lines] for place in range(size)]
    return _remember(_divided(group, tuple(map(tuple, lines)), data, lines), default_device())


def _remember(groups: tuple[dist.ProcessGroup, dist.ProcessGroup], device: torch.device) -> Topology:
    """The axes over this rank's data- and model-parallel groups, as ``latest_topology`` returns them."""
    global _latest
    _latest = replace(_axis(groups[0], device), model=_axis(groups[1], device))
    return _latest


_latest: Topology | None = None  # of the newest model that is divided over a model axis


def latest_topology() -> Topology | None:
    """The axes of the newest divided model, for libraries that ask without an engine; None if its groups are gone or there is none."""
    return _latest if _latest is not None and exists(_latest.group) else None


@dataclass(frozen=True)
class SequenceAxes:
    """The axes of ranks that hold slices of the same sequences.

    Attributes:
        sequence: The ranks that share samples, each with its slice of every sequence.
        joint: All of these groups' ranks together: what ZeRO shards and reduces over.
        place: Which of the groups this rank's is.
    """

    sequence: Topology
    joint: Topology
    place: int

    @property
    def groups(self) -> int:
        """Number of groups: the data-parallel size."""
        return self.joint.world // self.sequence.world


def sequence_axes(size: int, key: str = "sequence_parallel_size") -> SequenceAxes:
    """The axes of all ranks where ``size`` adjacent ones share their samples; collective the first time.

    Args:
        size: Ranks of a group, at least 2.
        key: What asked for it, for messages.

    Raises:
        ConfigError: ``size`` does not divide the number of ranks.
    """
    global _latest_sequence
    init_distributed()
    world, device = dist.get_world_size(), default_device()
    if size < 2 or world % size or dist.group.WORLD is None:
        usable = ", ".join(str(found) for found in range(1, world + 1) if world % found == 0)
        raise ConfigError(f"{key} is {size}, which does not divide the {world} rank(s); {usable} would")
    lines = [list(range(start, start + size)) for start in range(0, world, size)]
    # [Note: cpu:gloo] The differentiable all_gather of torch.distributed.nn, with which scripts join losses, takes ranks of a group for
    # global ones where the group's back end is named "gloo"; under its other name it goes another way, which is right.
    other = "cpu:gloo" if len(lines) > 1 and str(dist.get_backend()) == "gloo" else None
    _, group = _divided(dist.group.WORLD, ("sequence", size), [list(range(world))], lines, other)
    _latest_sequence = SequenceAxes(_axis(group, device), _axis(dist.group.WORLD, device), dist.get_rank() // size)
    return _latest_sequence


def join_sequence(sequence: dist.ProcessGroup, joint: dist.ProcessGroup) -> SequenceAxes:
    """Axes over process groups that the caller made, such as those of an ``mpu`` object; collective over ``joint``."""
    global _latest_sequence
    device = default_device()
    everyone: list[Any] = [None] * dist.get_world_size(joint)
    own = dist.get_process_group_ranks(sequence)
    dist.all_gather_object(everyone, own, group=joint)
    lines = list(dict.fromkeys(tuple(line) for line in everyone))
    if any(len(line) != len(own) for line in lines) or sum(map(len, lines)) != len(everyone):
        raise ConfigError(f"sequence-parallel groups must be of one size and not overlap; they are {[list(line) for line in lines]}")
    _latest_sequence = SequenceAxes(_axis(sequence, device), _axis(joint, device), lines.index(tuple(own)))
    return _latest_sequence


_latest_sequence: SequenceAxes | None = None


def latest_sequence() -> SequenceAxes | None:
    """The newest sequence-parallel axes, for libraries that ask without an engine; None if their groups are gone or there are none."""
    return _latest_sequence if _latest_sequence is not None and exists(_latest_sequence.sequence.group) else None


def axis_over(group: dist.ProcessGroup, device: torch.device | None = None) -> Topology:
    """The ranks of ``group`` as an axis."""
    return _axis(group, device or default_device())


def join_topologies(data: dist.ProcessGroup, model: dist.ProcessGroup, device: torch.device | None = None) -> Topology:
    """Axes over process groups that the caller made, such as those of an ``mpu`` object."""
    device = device or default_device()
    return replace(_axis(data, device), model=_axis(model, device))


def exists(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` has not been destroyed."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


def _axis(group: dist.ProcessGroup, device: torch.device) -> Topology:
    return Topology(group, dist.get_rank(group), dist.get_world_size(group), device)


# Groups of the axes of one group, by that group and how its ranks are divided: two engines share them.
_crossed: dict[tuple[dist.ProcessGroup, Any], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def _cross(group: dist.ProcessGroup, model_parallel: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's data-parallel and model-parallel groups where adjacent ranks hold one model together."""
    ranks = dist.get_process_group_ranks(group)
    data = [ranks[place::model_parallel] for place in range(model_parallel)]
    model = [ranks[start : start + model_parallel] for start in range(0, len(ranks), model_parallel)]
    return _divided(group, model_parallel, data, model)


def _divided(
    group: dist.ProcessGroup, how: Any, data: list[list[int]], model: list[list[int]], backend: str | None = None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's groups of the two axes, made once; every rank of the default group creates all of them."""
    for known in [key for key in _crossed if not exists(key[0])]:
        del _crossed[known]  # of a default group that was destroyed
    if (group, how) not in _crossed:
        whole = group if data == [dist.get_process_group_ranks(group)] else _divide(group, data)
        _crossed[group, how] = (whole, _divide(group, model, backend))
    return _crossed[group, how]


def _divide(group: dist.ProcessGroup, lines: list[list[int]], backend: str | None = None) -> dist.ProcessGroup:
    """Makes a process group of each line of ranks, with ``group``'s back end and timeout, and returns this rank's."""
    axis = _axis(group, default_device())
    timeout, backend = timeout_of(axis), backend or backend_with_host(axis)
    made = [dist.new_group(line, timeout=timeout, backend=backend) for line in lines]
    return next(part for line, part in zip(lines, made, strict=True) if dist.get_rank() in line)


def divide_alike(topology: Topology, backend: str) -> dist.ProcessGroup:
    """Another process group of the ranks of ``topology``, with its timeout; every rank of its lines takes part."""
    own = list(topology.ranks)
    timeout, everyone = timeout_of(topology), list(range(dist.get_world_size()))
    if own != everyone and topology.model is None:  # ranks outside the axis know nothing of this
        return dist.new_group(own, timeout=timeout, backend=backend, use_local_synchronization=True)
    lines = [own]
    if own != everyone:  # every rank has to take part in making every group, those of the other lines too
        told: list[Any] = [None] * len(everyone)
        dist.all_gather_object(told, own)
        lines = [list(line) for line in dict.fromkeys(tuple(line) for line in told)]
    made = [dist.new_group(line, timeout=timeout, backend=backend) for line in lines]
    return made[lines.index(own)]


def joint_topology(topology: Topology) -> Topology:
    """All ranks of the data-parallel and the model axis together: what saves and loads as one.

    Raises:
        UnsupportedError: The two axes do not cover all ranks of the default group.
    """
    if topology.model is None or topology.model.world == 1:
        return topology
    if topology.world * topology.model.world != dist.get_world_size() or dist.group.WORLD is None:
        raise UnsupportedError(
            f"{topology.world} data-parallel x {topology.model.world} model-parallel ranks do not make the {dist.get_world_size()} of the "
            "default process group; checkpoints need all of them"
        )
    return Topology(dist.group.WORLD, dist.get_rank(), dist.get_world_size(), topology.device)


def group_timeout(topology: Topology) -> timedelta:
    """The timeout of the axis' group, or the library's default where the group does not tell."""
    return timeout_of(topology) or dist.constants.default_pg_timeout


def timeout_of(topology: Topology) -> timedelta | None:
    """The timeout the group was created with; ``new_group`` would take the library's default otherwise. None if it does not tell."""
    for device in (topology.device, torch.device("cpu")):  # a back end of the host serves a device that has none of its own
        with contextlib.suppress(RuntimeError):
            return getattr(getattr(topology.group._get_backend(device), "options", None), "_timeout", None)
    return None


def serving_backend(topology: Topology) -> str:
    """Name of the back end that carries tensors of the topology's device; a group may have one per device type (``cpu:gloo,cuda:nccl``)."""
    served = _served(topology.group)
    # A host's back end serves a device that has none of its own.
    return served.get(topology.device.type) or served.get("cpu") or str(dist.get_backend(topology.group))


def backend_with_host(topology: Topology) -> str:
    """Back end for another group like ``topology``'s that carries host tensors over gloo besides: votes and objects wait for no device."""
    backend, device = serving_backend(topology), topology.device.type
    return str(dist.get_backend(topology.group)) if device == "cpu" or backend == "gloo" else f"cpu:gloo,{device}:{backend}"


def host_device(topology: Topology) -> torch.device:
    """Where small messages lie: the host if the group carries host tensors, which then wait for no device; else the device."""
    return torch.device("cpu") if "cpu" in _served(topology.group) else topology.device


def _served(group: dist.ProcessGroup) -> dict[str, str]:
    config = dist.get_backend_config(group)
    return dict(part.split(":") for part in config.split(",") if ":" in part)
