"""Models that torch or transformers has divided over ranks already: an engine shards whole ones, and says so."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from hf_zero.errors import UnsupportedError


def require_whole(model: nn.Module) -> None:
    """Refuses a model whose parameters are distributed over a DeviceMesh, as ``from_pretrained(distributed_config=...)`` loads them.

    Raises:
        UnsupportedError: It is one. Names a parameter, its mesh, and the settings that give the same layout here.
    """
    tensors = sys.modules.get("torch.distributed.tensor")  # without the module there is none of its tensors
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
        f"{type(model).__name__}: parameter {name!r} is a DTensor over {shown}: the model was divided over ranks before (from_pretrained "
        "with distributed_config, tp_plan or device_mesh; fully_shard; distribute_tensor), and an engine shards whole models itself. Load "
        f"it without: {split}zero_optimization.stage 3 shards parameters over all others; ParallelismConfig(dp_replicate_size=...) or "
        "zero_optimization.mics_shard_size keep replicas of the shards"
    )
