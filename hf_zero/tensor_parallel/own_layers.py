"""Recognize layers that a script or a library has already divided over ranks.

A script may have divided layers itself, as Megatron does: its marks on parameters are translated into hf_zero's. Models that torch or
transformers has divided are refused, because an engine shards whole models.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from hf_zero.comm.topology import Topology
from hf_zero.core.units.layout import Range
from hf_zero.core.units.marks import TpShard, mark_tp_shard, tp_shard_of
from hf_zero.core.units.unit import full_shape
from hf_zero.errors import ConfigError, UnsupportedError

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
