"""Choose the axes of an engine: over which ranks parameters are sharded, models split and sequences divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_zero.assembly.float8_layers import refuse_float8
from hf_zero.assembly.mesh import is_to_split, mesh_of, shards
from hf_zero.assembly.packed_weights import refuse_packed
from hf_zero.comm.axes import divide_experts, divide_stages, model_parallel_group
from hf_zero.comm.topology import Topology, build_topology, context_topology, divide_replicas, join_topologies
from hf_zero.config.batch import count_replicas_once, other_share
from hf_zero.config.mesh import Mesh
from hf_zero.errors import UnsupportedError
from hf_zero.expert_parallel.apply import divide_model
from hf_zero.expert_parallel.find import modules_of_experts
from hf_zero.expert_parallel.held import mark_again
from hf_zero.observe import warn_once
from hf_zero.pipeline.apply import divide_layers, plan_pipeline, put_forward
from hf_zero.sequence_parallel.attention import attention_replaced, exchange_heads_in_attention
from hf_zero.sequence_parallel.forward import SliceSettings
from hf_zero.sequence_parallel.state import ContextParallel, SequenceParallel, sequence_groups, sequence_parallel_of
from hf_zero.tensor_parallel.split import is_split, mark_own_layers, model_topology, split_model


@dataclass(frozen=True)
class Axes:
    """Axes of an engine's ranks.

    Attributes:
        mesh: Sizes of all axes, consistent with all sources.
        topology: The axis that parameters are sharded over, with the model axis if there is one.
        sequence: Groups of ranks that share their samples; None if sequences are not divided.
    """

    mesh: Mesh
    topology: Topology
    sequence: SequenceParallel | None


def axes_of(source: dict[str, Any], mpu: Any, mesh: Any, model: nn.Module) -> tuple[Axes, dict[str, Any]]:
    """Return the axes of an engine, and the configuration with ``train_batch_size`` counted over replicas; collective.

    Args:
        source: The configuration as the user gave it.
        mpu: Object of the script that returns process groups, or None.
        mesh: (data-parallel size, sequence-parallel size), or None.
        model: The user's module; it may be split already.

    Raises:
        ConfigError: The sources contradict each other, or do not fit the ranks.
        UnsupportedError: The combination of axes is not supported.
    """
    described = mesh_of(source, mpu, mesh, model)
    sequence = _context_parallel(source, mpu, model, described) if described.cp > 1 else sequence_parallel_of(described.sp, mpu)
    if described.pp > 1:
        whole = divide_stages(described.pp, described.tp)
    else:
        whole = sequence.topology if sequence is not None else _topology(mpu, model, described.tp)
    topology = divide_replicas(whole, described.dp_replicate) if shards(source) else whole
    topology = divide_experts(topology, described.ep)
    if mpu is None and described.tp > 1 and described.sp * described.cp * described.pp == 1:
        _warn_of_shared_samples(source, described)
    return Axes(described, topology, sequence), count_samples(source, described)


def count_samples(source: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Return ``source`` with ``train_batch_size`` counted over replicas, also if it was given over all ranks or over one group."""
    mistaken = (mesh.ranks, mesh.ranks // mesh.sp, mesh.ranks // mesh.tp, 1) if mesh.sp * mesh.cp > 1 else (mesh.ranks,)
    return count_replicas_once(source, mesh.replicas, mistaken)


def _warn_of_shared_samples(source: dict[str, Any], mesh: Mesh) -> None:
    """Warn if the third batch size is derived here from the replicas and has another value with DeepSpeed, which counts ranks; local."""
    shares = other_share(source, mesh.replicas, mesh.ranks)
    if shares is not None:
        name, here, there = shares
        warn_once(
            f"{name} is {here}, because train_batch_size {source['train_batch_size']} is divided by the data-parallel size, "
            f"{mesh.replicas}: the {mesh.tp} ranks of one model share their samples. DeepSpeed divides by all {mesh.ranks} ranks and "
            f'uses {there}. Remove train_batch_size, and set "{name}" to {there} to train as with DeepSpeed; {here} keeps this batch'
        )


def _context_parallel(source: dict[str, Any], mpu: Any, model: nn.Module, mesh: Mesh) -> SequenceParallel:
    """Return the groups of ``mesh`` that divide sequences, inside the data-parallel axis; collective.

    Raises:
        UnsupportedError: A script's object has sequence-parallel groups of its own.
    """
    if isinstance(mpu, ContextParallel):
        return mpu
    if sequence_groups(mpu) is not None:
        raise UnsupportedError(
            f"context parallelism over {mesh.cp} ranks and sequence-parallel groups of the mpu object cannot be combined: give "
            "sequence_parallel_size and hf_zero.context_parallel_size in the configuration, without mpu"
        )
    settings = SliceSettings(None, True, None, exchange_heads_in_attention, attention_replaced)
    own = source.get("hf_zero")
    strategy = str((own if isinstance(own, dict) else {}).get("context_parallel_strategy") or "allgather").lower()
    return ContextParallel(*context_topology(_topology(mpu, model, mesh.tp), mesh.cp, mesh.sp), settings, strategy)


def _topology(mpu: Any, model: nn.Module, model_parallel: int) -> Topology:
    """Return the axes of a mesh: those of ``mpu`` if it is given; otherwise ``model_parallel`` adjacent ranks hold one model together."""
    if mpu is None:
        return model_topology(model, model_parallel)
    data = mpu.get_data_parallel_group()
    found = model_parallel_group(mpu)
    return build_topology(data) if found is None or found.size() == 1 else join_topologies(data, found)


def divide(model: nn.Module, source: dict[str, Any], axes: Axes) -> nn.Module:
    """Return ``model`` divided by the axes: parameters over the model axis, experts over theirs, forwards over sequences; collective."""
    divided = {
        "tensor parallelism": is_to_split(axes.mesh) or is_split(model),
        "expert parallelism": axes.mesh.ep > 1,
        "a pipeline": axes.mesh.pp > 1,
    }
    for axis, divides in divided.items():
        if divides:
            refuse_packed(model, axis)
    pipeline = plan_pipeline(model, source.get("pipeline") or {}, axes.topology)
    if is_to_split(axes.mesh) or is_split(model):
        refuse_float8(model)
        keeps = modules_of_experts(model) if axes.mesh.ep > 1 else ()
        model = split_model(model, source.get("tensor_parallel") or {}, axes.topology.layers, keeps=keeps)
    elif axes.mesh.tp > 1 and axes.topology.model is not None:
        mark_own_layers(model, axes.topology.model)
    if pipeline is not None:
        mark_again(model)
        divide_layers(model, pipeline, axes.topology)
    model = divide_model(model, axes.topology)
    if pipeline is not None:
        put_forward(model, pipeline, axes.topology)
    if axes.sequence is not None:
        axes.sequence.bind(model)
    return model
