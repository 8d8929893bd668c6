"""The axes of an engine: over which ranks parameters are sharded, models split and sequences divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_zero.comm.mpu import MODEL_GROUPS, model_parallel_group
from hf_zero.comm.topology import Topology, build_topology, divide_replicas, join_topologies
from hf_zero.errors import ConfigError
from hf_zero.sequence_parallel.state import SequenceParallel, count_slices_once, sequence_parallel_of
from hf_zero.tensor_parallel.split import count_groups_once, is_split, model_topology, requested_ranks, split_model


@dataclass(frozen=True)
class Axes:
    """Where an engine's ranks stand.

    Attributes:
        topology: The axis to shard over, with the model axis if there is one.
        sequence: Groups of ranks that share their samples; None where sequences are whole.
    """

    topology: Topology
    sequence: SequenceParallel | None


def axes_of(source: dict[str, Any], mpu: Any, mesh: Any, model: nn.Module, replicate: int = 1) -> tuple[Axes, dict[str, Any]]:
    """The axes, and the configuration with its batch counted over replicas; collective.

    Args:
        source: The configuration as the user gave it.
        mpu: Object with groups, or None.
        mesh: (data-parallel size, sequence-parallel size), or None.
        model: The user's module; it may be split already.
        replicate: ``dp_replicate_size``: shard groups that a mesh asks for; 1 leaves it to the configuration.

    Raises:
        ConfigError: What these say does not agree, or does not fit the ranks.
        UnsupportedError: A combination of axes that is not provided.
    """
    sequence = sequence_parallel_of(source, mpu, mesh)
    if sequence is not None:
        topology = with_shard_groups(sequence.topology, source, replicate)
        return Axes(topology, sequence), count_slices_once(source, sequence.topology)
    topology = with_shard_groups(_topology(mpu, model, requested_ranks(source)), source, replicate)
    together = topology.model.world if topology.model is not None else 1
    return Axes(topology, None), count_groups_once(source, topology.replicas, together)


def with_shard_groups(topology: Topology, source: Mapping[str, Any], replicate: int = 1) -> Topology:
    """``topology`` with its data-parallel axis divided as ``shard_groups`` says; collective."""
    return divide_replicas(topology, shard_groups(source, topology.world, replicate))


def shard_groups(source: Mapping[str, Any], world: int, replicate: int = 1) -> int:
    """How many shard groups the configuration or a mesh asks for. At stage 0, which shards nothing, 1.

    Args:
        source: The configuration as the user gave it, with ``zero_optimization.mics_shard_size``.
        world: Data-parallel ranks.
        replicate: Shard groups that a mesh asks for; 1 leaves it to the configuration.

    Raises:
        ConfigError: They do not divide the ranks, or contradict each other.
    """
    zero = source.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    size = _number(zero.get("mics_shard_size"), -1)
    if size > 0 and world % size:
        usable = ", ".join(str(found) for found in range(1, world + 1) if world % found == 0)
        raise ConfigError(
            f"zero_optimization.mics_shard_size is {size}, which does not divide the {world} data-parallel ranks; {usable} would"
        )
    if size > 0 and replicate > 1 and size * replicate != world:
        raise ConfigError(
            f"dp_replicate_size is {replicate} and zero_optimization.mics_shard_size {size}, which makes {replicate * size} data-parallel "
            f"ranks; there are {world}. Leave one of the two out, or set mics_shard_size to {max(1, world // replicate)}"
        )
    if _number(zero.get("stage"), 0) == 0:
        return 1
    return world // size if size > 0 else replicate


def _number(value: Any, default: int) -> int:
    """``value`` of a configuration as a whole number; ``default`` for what is none: the schema says what is wrong with it."""
    try:
        return default if value is None else int(value)
    except (TypeError, ValueError):
        return default


def _topology(mpu: Any, model: nn.Module, model_parallel: int) -> Topology:
    """The axes: those of the ``mpu`` object if one is given, else ``model_parallel`` adjacent ranks hold one model together.

    Raises:
        ConfigError: The ``mpu`` object and the configuration disagree.
    """
    if mpu is None:
        return model_topology(model, model_parallel)
    found = model_parallel_group(mpu)
    size = found.size() if found is not None else 1
    if model_parallel not in (1, size):
        names = " or ".join(f"{name}()" for name in MODEL_GROUPS)
        raise ConfigError(
            f"tensor_parallel.autotp_size is {model_parallel}, and the model-parallel group of the mpu object has {size} rank(s) "
            f"({names}); make them equal, or leave mpu out: {model_parallel} adjacent ranks then hold one model together"
        )
    data = mpu.get_data_parallel_group()
    return build_topology(data) if found is None or size == 1 else join_topologies(data, found)


def divide(model: nn.Module, source: dict[str, Any], axes: Axes) -> nn.Module:
    """``model`` as the axes want it: its parameters split over the model axis, its forwards over sequences; collective."""
    if requested_ranks(source) > 1 or is_split(model):
        model = split_model(model, source.get("tensor_parallel") or {}, axes.topology)
    if axes.sequence is not None:
        axes.sequence.bind(model)
    return model
