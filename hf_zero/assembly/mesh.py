"""Build the mesh of an engine: one description from the configuration, the arguments, the environment and the libraries around it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from hf_zero.comm.axes import MODEL_GROUPS, model_parallel_group
from hf_zero.comm.nodes import Nodes, ranks_of_node
from hf_zero.config.mesh import EXPERT, SHARD_GROUP, Claim, Mesh, claims_of_config, claims_of_environment, claims_of_pair, solve
from hf_zero.sequence_parallel.state import sequence_groups
from hf_zero.tensor_parallel.apply import ranks_of
from hf_zero.tensor_parallel.split import require_whole

sources: list[Callable[[], list[Claim]]] = []
"""Functions by which packages above report what the libraries that they serve know of the mesh."""

CLAIMS = "_hf_zero_claims"  # attribute of a module: a tuple of claims

_OF_MPU = f"the model-parallel group of the mpu object ({' or '.join(f'{name}()' for name in MODEL_GROUPS)})"


def mesh_of(source: Mapping[str, Any], mpu: Any = None, mesh_param: Any = None, model: nn.Module | None = None) -> Mesh:
    """Return the mesh of an engine, which fits every source; collective if ``mpu`` is another library's object.

    Args:
        source: The configuration as the user gave it.
        mpu: Object of the script that returns process groups, or None.
        mesh_param: (data-parallel size, sequence-parallel size), or None.
        model: The user's module; it may be split over ranks already.

    Raises:
        ConfigError: Sources contradict each other, or do not fit the ranks.
        UnsupportedError: A source requests something that is not supported, or another library has divided the model over ranks.
    """
    if model is not None:
        require_whole(model)
    of_groups, ranks = _claims_of_mpu(mpu)
    claims = [*claims_of_pair(mesh_param), *of_groups, *_claims_around(source), *(claims_of_model(model) if model is not None else ())]
    split = ranks_of(model) if model is not None else None
    if split:
        claims.append(Claim("tp", len(split), "tp_model_init"))
    return solve(claims, ranks, fits_own_node)


def claims_of_model(model: nn.Module) -> list[Claim]:
    """Return the claims about the mesh that were recorded when ``model``, or a module inside it, was made."""
    return [claim for module in model.modules() for claim in module.__dict__.get(CLAIMS, ())]


def shard_groups(source: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> int:
    """Return the number of shard groups into which ``zero.Init`` divides ``group`` (default: all ranks), before there is a model or an
    engine.

    Args:
        source: The configuration as the user gave it.
        group: Process group of a script; None is all ranks.

    Raises:
        ConfigError: Sources contradict each other, or do not fit the ranks.
    """
    claims = _claims_around(source)
    if group is not None:  # one of the data-parallel ranks: no rank shares samples in it
        claims = [claim for claim in claims if claim.axis in ("dp_replicate", SHARD_GROUP)]
    return solve(claims, dist.get_world_size(group), fits_own_node).dp_replicate if shards(source) else 1


def expert_ranks(source: Mapping[str, Any], claims: Iterable[Claim] = ()) -> tuple[int, int]:
    """Return the number of adjacent ranks that hold all experts between them, and this rank's position among them, before there is an
    engine; local.

    Args:
        source: The configuration as the user gave it.
        claims: Further claims about the mesh.

    Raises:
        ConfigError: Sources contradict each other, or do not fit the ranks.
    """
    mesh = _mesh_of_load(source, claims, EXPERT)
    return (mesh.ep, dist.get_rank() % mesh.ep) if mesh is not None else (1, 0)


def pipeline_ranks(source: Mapping[str, Any], claims: Iterable[Claim] = ()) -> tuple[int, int]:
    """Return the number of ranks that together hold all layers, and this rank's position among them. Arguments and errors are those of
    ``expert_ranks``.
    """
    mesh = _mesh_of_load(source, claims, "pp")
    return (mesh.pp, dist.get_rank() // (mesh.ranks // mesh.pp)) if mesh is not None else (1, 0)


def _mesh_of_load(source: Mapping[str, Any], claims: Iterable[Claim], axis: str) -> Mesh | None:
    """Return the mesh before there is a model; None if no source says anything about ``axis``."""
    said = [*_claims_around(source), *claims]
    return solve(said, dist.get_world_size()) if any(claim.axis == axis for claim in said) else None


def shards(source: Mapping[str, Any]) -> bool:
    """Return whether the stage of a configuration, as the user gave it, shards anything; ``True`` is the old form of stage 1."""
    zero = source.get("zero_optimization")
    return str(zero.get("stage", 0)) != "0" if isinstance(zero, Mapping) else bool(zero)


def _claims_around(source: Mapping[str, Any]) -> list[Claim]:
    """Return the claims of all sources outside the calls: the configuration, the environment, the libraries."""
    return [*claims_of_config(source), *claims_of_environment(os.environ), *(claim for further in sources for claim in further())]


def _claims_of_mpu(mpu: Any) -> tuple[list[Claim], int]:
    """Return the claims that follow from the groups of a script's object, and the ranks that they cover."""
    if mpu is None:
        return [], dist.get_world_size()
    sequence = sequence_groups(mpu)
    if sequence is not None:
        return [Claim("sp", sequence.axis.world, "the sequence-parallel group of the mpu object")], sequence.topology.world
    if not hasattr(mpu, "get_data_parallel_group"):
        return [], dist.get_world_size()
    found, data = model_parallel_group(mpu), mpu.get_data_parallel_group().size()
    size = found.size() if found is not None else 1
    return [Claim("tp", size, _OF_MPU)], data * size


def fits_own_node(size: int) -> bool:
    """Return whether groups of ``size`` adjacent ranks fit nodes as large as this rank's; local, before any vote."""
    own = ranks_of_node()
    return Nodes((own,) if own else ()).fits(size)


def require_fit(mesh: Mesh, nodes: Nodes, groups: Mapping[str, int]) -> None:
    """Raise if groups of ranks would lie partly in one node and partly in another; local, the same on all ranks.

    Args:
        mesh: The mesh of the ranks.
        nodes: The nodes of the ranks.
        groups: Setting that requests groups of adjacent data-parallel ranks -> their size.

    Raises:
        ConfigError: The groups do not fit; the message gives the numbers, and sizes that would fit.
    """
    if mesh.tp > 1 and not is_to_split(mesh):
        return  # the groups of a script may have any order
    nodes.require_fit(mesh.tp, mesh.ranks, f"tensor parallelism (tp {mesh.tp})")
    for key, size in groups.items():
        nodes.require_fit(size, mesh.ranks, f"{key} of {size}" + (f" x tp {mesh.tp}" if mesh.tp > 1 else ""), mesh.tp)


def is_to_split(mesh: Mesh) -> bool:
    """Return whether a source requests that hf_zero splits the model over ranks; a script that only passes groups has split it itself."""
    return any(claim.axis == "tp" and claim.size > 1 and claim.source != _OF_MPU for claim in mesh.claims)
