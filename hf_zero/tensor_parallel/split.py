"""Split the model of an engine: agree on a plan, check that all ranks hold the same model, apply the plan.

A script may have divided layers itself, as Megatron does: its marks on parameters are translated into hf_zero's. Models that torch or
transformers has divided are refused, because an engine shards whole models.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_zero.comm.back_end import open_collectives
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.topology import Topology, build_topology, topology_around
from hf_zero.config.mesh import requested_ranks
from hf_zero.config.read import read_config
from hf_zero.core.step.agreement import equal_values
from hf_zero.core.step.precision import cast_parameters
from hf_zero.core.units.layout import Range
from hf_zero.core.units.marks import TpShard, is_expert, is_part, mark_tp_shard, tp_shard_of
from hf_zero.core.units.unit import full_shape
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.observe import log_rank0
from hf_zero.tensor_parallel.apply import apply_plan, plan_of, ranks_of
from hf_zero.tensor_parallel.functions import ModelGroup
from hf_zero.tensor_parallel.overrides import overrides_of
from hf_zero.tensor_parallel.plan import WHOLE, TpPlan
from hf_zero.tensor_parallel.planner import UnknownFlowError, make_plan
from hf_zero.tensor_parallel.same_data import SameData, equal_random_state
from hf_zero.tensor_parallel.trace import Inputs


def is_split(module: nn.Module) -> bool:
    """Return whether ``module`` is already split over ranks by tensor parallelism."""
    return plan_of(module) is not None


def model_topology(module: nn.Module, requested: int) -> Topology:
    """Return the axes of an engine for ``module``: around the ranks it is already split over, else ``requested`` adjacent ranks;
    collective.

    Args:
        module: The model.
        requested: ``tensor_parallel.autotp_size`` of the configuration; 1 if it is not set.
    """
    ranks = ranks_of(module)
    return build_topology(model_parallel=requested) if not ranks else topology_around(ranks)


def split_model(
    module: nn.Module,
    section: Mapping[str, Any],
    topology: Topology,
    plan: TpPlan | Mapping[str, str] | None = None,
    fill: Callable[[TpPlan], None] | None = None,
    inputs: Inputs | None = None,
    keeps: Collection[str] = (),
) -> nn.Module:
    """Split ``module`` in place over the model axis of ``topology``; collective. A module that is already split is only checked.

    Args:
        module: Any model, the same on every rank of the axis.
        section: The configuration's ``tensor_parallel``.
        topology: The engine's axes.
        plan: A plan, or patterns of paths with splits ("model.layers.*.mlp.down_proj": "row"); None makes one.
        fill: Function that gives an empty module the values of this rank's tensor-parallel shards.
        inputs: Arguments of a call that runs the module, by name; None makes them up for transformers' models.
        keeps: Paths of modules whose own parameters stay whole.

    Raises:
        ConfigError: The model does not divide, or is already split over other ranks.
    """
    axis = topology.model
    present = plan_of(module)
    if present is not None:
        _require_same(module, section, axis)
        _require_unwrapped(module, present)
        return module
    if axis is None or axis.world == 1:
        return module
    collectives = open_collectives(axis)

    def make() -> TpPlan:
        if isinstance(plan, TpPlan) and not plan.edited:
            return plan
        return make_plan(module, axis.world, inputs, overrides_of(section, plan, module).keeping(keeps))

    agreed = _agree(collectives, make)
    if fill is not None:
        fill(agreed)
    elif not any(param.is_meta or hasattr(param, "ds_id") for param in module.parameters()):
        equal_weights(module, collectives, "a tensor-parallel group")
    apply_plan(module, agreed, ModelGroup(collectives))
    equal_random_state(collectives)
    SameData(module, collectives, tensor_only=True)
    log_rank0("%s", "; ".join((summary(module, agreed), *agreed.notes)))
    return module


def _require_same(module: nn.Module, section: Mapping[str, Any], axis: Topology | None) -> None:
    ranks, asked = ranks_of(module), section.get("autotp_size")
    if asked is not None and requested_ranks({"tensor_parallel": section}) != len(ranks):
        raise ConfigError(f"the model is split over {len(ranks)} ranks, but tensor_parallel.autotp_size is {asked}")
    if axis is None or axis.ranks != ranks:
        others = f"the mpu object says {list(axis.ranks)}" if axis is not None else "the mpu object names no model-parallel group"
        raise ConfigError(f"ranks {list(ranks)} hold the model together since tp_model_init, and {others}")


def _require_unwrapped(module: nn.Module, plan: TpPlan) -> None:
    """Check that split layers are still at their paths: inside another module (an adapter) their sums would be wrong."""
    for path, child in module.named_modules():
        names = path.split(".")
        if not any(tp_shard_of(param) is not None and not is_expert(param) for param in child.parameters(recurse=False)):
            continue
        if not any(".".join(names[start:]) in plan.modules for start in range(len(names))):
            parent = module.get_submodule(path.rpartition(".")[0])
            raise ConfigError(
                f"{path} was split by tp_model_init and wrapped in {type(parent).__name__} after it; change the model (adapters, "
                "quantization) before it is split"
            )


def _agree(collectives: Collectives, make: Callable[[], TpPlan]) -> TpPlan:
    """Return the plan that ``make`` returns on rank 0, on every rank; an error of rank 0 is raised on every rank."""
    made: tuple[str, Any] = ("", None)
    if collectives.rank == 0:
        try:
            made = ("plan", make().to_dict())
        except UnknownFlowError as error:
            made = ("unknown flow", str(error))
        except ConfigError as error:
            made = ("error", str(error))
    kind, content = collectives.broadcast_object(made, 0, "tensor-parallel plan")
    if kind != "plan":
        raise UnknownFlowError(content) if kind == "unknown flow" else ConfigError(content)
    return TpPlan.from_dict(content)


def equal_weights(module: nn.Module, collectives: Collectives, group: str) -> None:
    """Give all ranks of the group, called ``group`` in messages, rank 0's parameters and buffers where theirs differ; collective."""
    named = chain(module.named_parameters(), module.named_buffers())
    equal_values({name: value for name, value in named if not is_part(value)}, collectives, group)  # parts differ between ranks


def summary(module: nn.Module, plan: TpPlan) -> str:
    """Return one line for the log: ranks, the fraction of parameters that is split, and the number of layers per kind of split."""
    counts: dict[str, int] = {}
    for entry in plan.modules.values():
        counts[entry.split] = counts.get(entry.split, 0) + 1
    whole = sum(_numel(entry.shape) for entry in plan.parameters.values())
    total = (
        sum(param.numel() for param in module.parameters()) + whole - sum(_numel(e.shape) // plan.ranks for e in plan.parameters.values())
    )
    kinds = ", ".join(f"{count} {split}" for split, count in sorted(counts.items()) if split != WHOLE)
    return (
        f"tensor parallelism over {plan.ranks} ranks: {whole / max(total, 1):.0%} of the parameters are split "
        f"({kinds}; {counts.get(WHOLE, 0)} linear layers whole)"
    )


def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype | None = None,
    config: Any = None,
    plan: TpPlan | Mapping[str, str] | None = None,
    tp_group: dist.ProcessGroup | None = None,
    inputs: Inputs | None = None,
    keeps: Collection[str] = (),
    **kwargs: Any,
) -> nn.Module:
    """Split ``model`` over groups of ``tp_size`` ranks before ``initialize``; collective. Like DeepSpeed's function of that name.

    Args:
        model: Any model, the same on every rank.
        tp_size: Number of ranks that hold one model together.
        dtype: Cast all parameters to this dtype; None leaves them. Buffers are not cast. With ``config`` the cast is left to
            ``initialize``: transformers passes fp16 for a configuration that does not set a precision, which means fp32.
        config: Configuration, or its ``tensor_parallel`` section.
        plan: The plan, or patterns, as in ``split_model``; None makes one.
        tp_group: This rank's group; None takes adjacent ranks.
        inputs: Arguments of a call that runs all of the model (``{"x": torch.empty(2, 16)}``; values do not matter); None makes them up
            for transformers' models.
        keeps: Paths of modules whose own parameters stay whole.
        **kwargs: Ignored, for compatibility.

    Returns:
        The same model, split in place.

    Raises:
        ConfigError: ``tp_size`` does not fit the ranks, or the model does not divide.
        UnknownFlowError: The model cannot be traced, and no layers to split are named.
        UnsupportedError: Another library has divided the model over ranks.
    """
    if tp_group is not None and tp_group.size() != tp_size:
        raise ConfigError(f"tp_model_init: tp_size is {tp_size}, and tp_group has {tp_group.size()} ranks")
    require_whole(model)
    section = read_config(config) if config is not None else {}
    section = {"autotp_size": tp_size, **(section.get("tensor_parallel") or section)}
    topology = build_topology(model_parallel=tp_size) if tp_group is None else topology_around(dist.get_process_group_ranks(tp_group))
    split_model(model, section, topology, plan, inputs=inputs, keeps=keeps)
    return cast_parameters(model, dtype, {}) if dtype is not None and config is None else model


def _numel(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


_DIVIDED = ("model_parallel", "tensor_model_parallel")  # attributes of a parameter; true where it is a part


def mark_own_layers(model: nn.Module, axis: Topology) -> None:
    """Mark the parameters that a script declares as parts; all other parameters count as copies that every rank of the axis has.

    With the marks, the norm counts every element once, and a checkpoint has the parts of all ranks. A parameter with ``model_parallel`` or
    ``tensor_model_parallel`` is divided in dimension ``partition_dim`` (default 0); ``partition_stride`` is the number of pieces of the
    whole, each of which is divided over the ranks.

    Args:
        model: The model on this rank; its parameters may be sharded already.
        axis: The ranks that hold one model together.

    Raises:
        ConfigError: ``partition_dim`` is no dimension of the parameter, or ``partition_stride`` does not divide it.
    """
    for name, param in model.named_parameters():
        if any(getattr(param, flag, False) for flag in _DIVIDED) and tp_shard_of(param) is None:
            mark_tp_shard(param, _part(name, param, axis))


def _part(name: str, param: nn.Parameter, axis: Topology) -> TpShard:
    shape = full_shape(param)
    dim, pieces = max(getattr(param, "partition_dim", 0), 0), getattr(param, "partition_stride", 1)
    if dim >= len(shape) or pieces < 1 or shape[dim] % pieces:
        raise ConfigError(
            f"{name} {tuple(shape)} is marked as a part of a divided parameter, with partition_dim {dim} and partition_stride {pieces}; "
            "a dimension of it, and a number that divides this dimension, are allowed"
        )
    size = shape[dim] // pieces
    ranges = tuple(Range(start, start + size) for start in range(axis.rank * size, pieces * axis.world * size, axis.world * size))
    whole = torch.Size((*shape[:dim], shape[dim] * axis.world, *shape[dim + 1 :]))
    return TpShard(whole, dim, ranges)


def require_whole(model: nn.Module) -> None:
    """Refuse a model whose parameters are DTensors over a DeviceMesh, as ``from_pretrained(distributed_config=...)`` loads them.

    Raises:
        UnsupportedError: A parameter is a DTensor. The message has its name and mesh, and the settings that give the same layout here.
    """
    tensors = sys.modules.get("torch.distributed.tensor")  # no DTensor can exist while the module is not imported
    kind: Any = getattr(tensors, "DTensor", ())
    found = next(((name, param) for name, param in model.named_parameters() if isinstance(param, kind)), None)
    if found is None:
        return
    name, param = found
    mesh: Any = getattr(param, "device_mesh", None)
    dims = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)) if mesh is not None else {}
    shown = ", ".join(f"{dim} {size}" for dim, size in dims.items()) or "a DeviceMesh"
    tp = dims.get("tp", 1)
    split = f'"tensor_parallel": {{"autotp_size": {tp}}} in the configuration splits it over {tp} ranks, and ' if tp > 1 else ""
    raise UnsupportedError(
        f"{type(model).__name__}: parameter {name!r} is a DTensor over {shown}: the model was already divided over ranks "
        "(from_pretrained with distributed_config, tp_plan or device_mesh; fully_shard; distribute_tensor), but an "
        f"engine needs a whole model and shards it itself. Load it without: {split}zero_optimization.stage 3 shards "
        "parameters over all other ranks; ParallelismConfig(dp_replicate_size=...) or zero_optimization.mics_shard_size "
        "keep replicas of the shards"
    )
